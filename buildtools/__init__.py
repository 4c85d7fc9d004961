"""Sources into a wheel, and the series from one Megatron to the next: what ``build.py`` is made of.

Imports go one way; ``tests/test_style.py`` holds the ranks and ``docs/ARCHITECTURE.md`` says what
each module is for. Only the standard library is used, so that a verified tree can be assembled on
any host that has Python 3.12.
"""
