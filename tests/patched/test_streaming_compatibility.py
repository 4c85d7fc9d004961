"""The table of combinations is what the tests have."""

from __future__ import annotations

from tests.patched import compatibility


def test_the_document_is_what_the_tests_render() -> None:
    """Else: `python -m tests.patched.compatibility` with the Python of the test environment."""
    assert compatibility.PATH.read_text(encoding="utf-8") == compatibility.render()
