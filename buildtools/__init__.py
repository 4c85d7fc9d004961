"""Sources into a wheel: what ``build.py`` is made of.

Modules import downwards only: ``verbs`` > ``check`` ``doctor`` ``wheel`` > ``manifest``
``notice`` > ``tree`` > ``apply`` ``overlay`` ``upstream`` > ``series`` ``patchfile`` ``archive``
``git`` ``pin`` > ``objects`` ``paths`` ``console``. Only the standard library is used, so that a
verified tree can be assembled on any host that has Python 3.12.
"""
