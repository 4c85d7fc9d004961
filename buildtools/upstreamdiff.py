"""What upstream did, between two pristine trees, to the symbols that patches change."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from buildtools.patchfile import FileChange, Hunk
from buildtools.placement import enclosing_symbols, twins
from buildtools.report import SymbolReport
from buildtools.symbols import Module, Sources, extent, symbol_source

_TELLING = 12
"""Length from which on a line says something: `else:` is everywhere."""
_SECTION = re.compile(r"^\[.*\]\s*$")


@lru_cache(maxsize=256)
def symbols_of(change: FileChange, before: bytes, after: bytes) -> tuple[str, ...]:
    """Return the symbol that each hunk of a change lies in; in a TOML file, the table."""
    if change.path.endswith(".toml"):
        return tuple(_table(after, hunk) for hunk in change.hunks)
    if not change.path.endswith(".py"):
        return ("",) * len(change.hunks)
    return tuple(enclosing_symbols(change, before, after))


def _table(content: bytes, hunk: Hunk) -> str:
    lines = content.decode(errors="replace").split("\n")[: hunk.new_start - 1 + hunk.leading]
    tables = [line.strip() for line in lines if _SECTION.match(line)]
    return tables[-1] if tables else ""


@lru_cache(maxsize=256)
def symbol_text(path: str, content: bytes, qualname: str) -> str | None:
    """Return the text of a symbol; of the module level, what is in no function and no class."""
    text = content.decode("utf-8", errors="replace")
    if path.endswith(".toml"):
        return _table_text(text, qualname)
    if not path.endswith(".py"):
        return text
    if qualname:
        return symbol_source(content, qualname)
    try:
        module = Module(content)
    except SyntaxError:
        return text
    inside = {
        line
        for nodes in module.definitions.values()
        for node in nodes
        for line in range(extent(node)[0], extent(node)[1] + 1)
    }
    lines = enumerate(text.split("\n"), start=1)
    return "\n".join(line for number, line in lines if number not in inside)


def _table_text(text: str, table: str) -> str | None:
    found: list[str] | None = None if table else []
    for line in text.split("\n"):
        if _SECTION.match(line):
            if found:
                break
            found = [] if line.strip() == table else found
        if found is not None:
            found.append(line)
    return "\n".join(found) if found is not None else None


def parses(path: str, content: bytes) -> bool:
    """Return whether a file is valid Python, or none at all."""
    if not path.endswith(".py"):
        return True
    try:
        ast.parse(content)
    except (SyntaxError, ValueError):
        return False
    return True


class Upstream:
    """Two pristine trees.

    Args:
        old: the files of the one the series is on.
        new: the files of the other.
        renames: old path -> new path, of the files that upstream moved.
    """

    def __init__(
        self, old: Mapping[str, bytes], new: Mapping[str, bytes], renames: Mapping[str, str]
    ) -> None:
        self._old = old
        self._new = new
        self._renames = renames

    def path_now(self, path: str) -> str:
        """Return where a file of the old tree is in the new one."""
        return self._renames.get(path, path)

    def report(self, path: str, qualname: str) -> SymbolReport:
        """Return what upstream did to a symbol."""
        now = self.path_now(path)
        symbol = f"{path}::{qualname}" if qualname else path
        old = symbol_text(path, self._old.get(path, b""), qualname)
        new = symbol_text(now, self._new[now], qualname) if now in self._new else None
        if new is None:
            return SymbolReport(symbol, "gone", "", tuple(self._elsewhere(path, qualname)))
        if old == new:
            return SymbolReport(symbol, "same", "")
        diff = difflib.unified_diff(
            (old or "").splitlines(), new.splitlines(), f"{path} {qualname}".rstrip(),
            f"{now} {qualname}".rstrip(), lineterm="",
        )  # fmt: skip
        return SymbolReport(symbol, "changed", "\n".join(diff) + "\n")

    def _elsewhere(self, path: str, qualname: str) -> list[str]:
        name = qualname.rpartition(".")[2].encode()
        if not name or not path.endswith(".py"):
            return []
        pattern = re.compile(rb"\b(?:def|class) " + re.escape(name) + rb"\b")
        found = []
        for other, content in self._new.items():
            if other.endswith(".py") and pattern.search(content) and parses(other, content):
                names = Module(content).definitions
                found += [
                    f"{other}::{each}"
                    for each in names
                    if each.rpartition(".")[2].encode() == name and f"{other}::{each}" != path
                ]
        return sorted(found)

    def has_added(self, path: str, lines: Iterable[bytes]) -> list[bytes]:
        """Return which of ``lines`` upstream has in a file where it did not have them before."""
        known = {line.strip() for line in self._old.get(path, b"").split(b"\n")}
        now = {line.strip() for line in self._new.get(self.path_now(path), b"").split(b"\n")}
        wanted = dict.fromkeys(line.strip() for line in lines)
        return [line for line in wanted if len(line) >= _TELLING and line in now - known]

    def copies(self, path: str, qualname: str) -> list[str]:
        """Return where upstream has put a copy of a function that it did not have before."""
        words = self._words(path, qualname)
        if not words:
            return []
        # A file that moved is no copy of itself.
        moved = {self.path_now(name): content for name, content in self._old.items()}
        old, new = (
            Sources(
                {
                    name: content
                    for name, content in files.items()
                    if name.endswith(".py") and all(word in content for word in words)
                }
            )
            for files in (moved, self._new)
        )
        return twins(old, new, f"{self.path_now(path)}::{qualname}")

    def _words(self, path: str, qualname: str) -> list[bytes]:
        """Return names that every file with a copy must hold, so that few have to be parsed."""
        content = self._old.get(path, b"")
        if not qualname or not path.endswith(".py") or not parses(path, content):
            return []
        found = {
            part.id if isinstance(part, ast.Name) else part.attr
            for node in Module(content).definitions.get(qualname, [])
            for part in ast.walk(node)
            if isinstance(part, ast.Name | ast.Attribute)
        }
        return sorted((name.encode() for name in found if name.isascii()), key=len, reverse=True)
