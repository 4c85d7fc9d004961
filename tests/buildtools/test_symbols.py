"""A symbol is what it says, wherever it stands; cosmetics are not part of it."""

from __future__ import annotations

import pytest

from buildtools.patchfile import FileChange, Hunk
from buildtools.placement import enclosing_symbols
from buildtools.symbols import Module, Sources

SOURCE = b'''\
"""Module."""

LIMIT = 3


class Model(Base):
    """Docs."""

    field: int = 1
    """Docs of the field."""

    def __init__(self, size):
        """Docs."""
        self.size = size
        self.left, self.right = split(size)

    @decorated
    def step(self, loss):
        # a comment
        return self.size * loss


if torch:
    def helper():
        return 1
else:
    def helper():
        return 2
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'        """Docs."""\n', b'        """Other docs,\n\n        longer."""\n'),
        (b"        # a comment\n", b"\n        # another\n"),
        (b"self.size * loss", b"(self.size\n                * loss)"),
        (b'    """Docs of the field."""\n', b""),
        (b"LIMIT = 3\n", b"LIMIT = 3  # why\n\n\n"),
    ],
)
def test_cosmetics_change_no_fingerprint(old: bytes, new: bytes) -> None:
    before, after = Module(SOURCE), Module(SOURCE.replace(old, new))

    assert SOURCE.count(old) >= 1
    assert SOURCE.replace(old, new) != SOURCE
    for symbol in ("", "LIMIT", "Model", "Model.step", "Model.__init__", "Model.left", "helper"):
        assert before.fingerprint(symbol) == after.fingerprint(symbol) is not None


@pytest.mark.parametrize(
    ("symbol", "old", "new"),
    [
        ("LIMIT", b"LIMIT = 3", b"LIMIT = 4"),
        ("Model", b"Model(Base)", b"Model(Other)"),
        ("Model", b"field: int = 1", b"field: int = 2"),
        ("Model.field", b"field: int = 1", b"field: int = 2"),
        ("Model.size", b"self.size = size", b"self.size = size + 1"),
        ("Model.right", b"split(size)", b"split(size, 2)"),
        ("Model.step", b"@decorated", b"@decorated(1)"),
        ("Model.step", b"loss):", b"loss=1):"),
        ("Model.step", b"self.size * loss", b"loss * self.size"),
        ("helper", b"return 2", b"return 3"),
    ],
)
def test_anything_else_changes_it(symbol: str, old: bytes, new: bytes) -> None:
    assert Module(SOURCE).fingerprint(symbol) != Module(SOURCE.replace(old, new)).fingerprint(
        symbol
    )


@pytest.mark.parametrize(
    ("symbol", "addition"),
    [
        ("helper", b"\nhelper = wrap(helper)\n"),
        ("Model.step", b"\nModel.step = wrap(Model.step)\n"),
        ("Model.step", b"\nModel.other = 1\n"),
    ],
)
def test_whoever_binds_a_name_again_is_part_of_it(symbol: str, addition: bytes) -> None:
    changed = Module(SOURCE + addition).fingerprint(symbol) != Module(SOURCE).fingerprint(symbol)

    assert changed is (b"other" not in addition)


def test_a_method_is_no_part_of_its_class() -> None:
    """It is a symbol of its own: a class changes with its bases and fields."""
    changed = Module(SOURCE.replace(b"self.size * loss", b"0"))

    assert changed.fingerprint("Model") == Module(SOURCE).fingerprint("Model")


def test_what_is_not_there_has_no_fingerprint() -> None:
    sources = Sources({"a.py": SOURCE, "b.txt": b"text", "broken.py": b"def ("})

    for symbol in ("a.py::Gone", "a.py::Model.gone", "c.py", "b.txt::x", "broken.py::x"):
        assert sources.fingerprint(symbol) is None
    assert sources.fingerprint("b.txt") is not None


def test_a_symbol_that_moved_is_found_elsewhere() -> None:
    sources = Sources({"a.py": b"", "b/c.py": SOURCE})

    assert sources.moved("a.py::Model.step") == ["b/c.py::Model.step"]


def _hunk(before: bytes, after: bytes) -> FileChange:
    """The whole file as one hunk, cut down to three lines of context."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    head = next(n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    tail = next(
        n for n, (a, b) in enumerate(zip(reversed(old), reversed(new), strict=False)) if a != b
    )
    start, shown = max(head - 3, 0), max(tail - 3, 0)
    hunk = Hunk(
        start=start + 1,
        new_start=start + 1,
        old=tuple(old[start : len(old) - shown]),
        new=tuple(new[start : len(new) - shown]),
        leading=head - start,
        trailing=tail - shown,
        added=0,
        removed=0,
    )
    return FileChange("a.py", "", "", (hunk,))


@pytest.mark.parametrize(
    ("old", "new", "symbol"),
    [
        (b"        self.size = size\n", b"        self.size = 2\n", "Model.__init__"),
        (b"    @decorated\n", b"    @other\n", "Model.step"),
        (b"        return 2\n", b"        x = 1\n        return 2\n", "helper"),
        (b"    def step", b"    def added(self):\n        return 0\n\n    def step", "Model"),
        (b"LIMIT = 3\n", b"LIMIT = 3\nOTHER = 4\n", ""),
        (b"* loss\n", b"* loss\n\n    def last(self):\n        return 0\n", "Model"),
        (b"    field: int = 1\n", b"    field: int = 1\n    more: int = 1\n", "Model"),
    ],
)
def test_a_hunk_lies_in_the_innermost_definition_that_was_there(
    old: bytes, new: bytes, symbol: str
) -> None:
    after = SOURCE.replace(old, new)

    assert enclosing_symbols(_hunk(SOURCE, after), SOURCE, after) == [symbol]
