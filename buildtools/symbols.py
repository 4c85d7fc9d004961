"""Python sources by symbol: what a name means in a tree, wherever in its file it stands.

A symbol is written ``path::qualname``, e.g. ``megatron/core/model.py::Model.step``. The qualname is
a function, a method, a class, an attribute of a class, or a module's variable; a symbol without
qualname is the whole file. Fingerprints are of the AST without docstrings: comments, docstrings and
formatting do not change them, anything else does. `ast.dump` is stable within one minor version of
Python, and `build.py` runs under exactly one.
"""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

BODIES = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields of a statement that hold statements, in the order of the source."""


def fingerprint(parts: Iterable[str]) -> str:
    """Return 16 hex digits that stand for a sequence of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def split_symbol(symbol: str) -> tuple[str, str]:
    """Split ``path::qualname``; the qualname of a whole file is empty."""
    path, _, qualname = symbol.partition("::")
    return path, qualname


def header(node: ast.AST) -> str:
    """Return a statement as text without the statements inside it: ``if x:`` without its body."""
    fields = [
        (name, ast.dump(value) if isinstance(value, ast.AST) else [_dump(each) for each in value])
        if isinstance(value, ast.AST | list)
        else (name, repr(value))
        for name, value in ast.iter_fields(node)
        if name not in BODIES
    ]
    return f"{type(node).__name__}{fields}"


def _dump(value: object) -> str:
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)


def is_compound(node: ast.AST) -> bool:
    """Return whether a statement holds other statements."""
    return any(getattr(node, name, None) for name in BODIES)


def _remove_docstrings(node: ast.AST) -> None:
    """Take out every statement that is a bare string: docstrings, also those of fields."""
    for name in BODIES:
        block = getattr(node, name, None)
        if not isinstance(block, list) or not block:
            continue
        kept = [child for child in block if not _is_string(child)]
        setattr(node, name, kept or [ast.copy_location(ast.Pass(), block[0])])
        for child in kept:
            _remove_docstrings(child)


def _is_string(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


class Module:
    """One parsed file.

    Raises:
        SyntaxError: the content is not Python of this version.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        with warnings.catch_warnings():  # upstream has invalid escapes; they are not ours to tell
            warnings.simplefilter("ignore", SyntaxWarning)
            self.tree: ast.Module = ast.parse(content)
        _remove_docstrings(self.tree)
        self._bindings: dict[int, dict[str, list[ast.AST]]] = {}

    @cached_property
    def definitions(self) -> dict[str, list[Definition]]:
        """Functions and classes by qualname; a name defined twice (if/else) has two nodes."""
        found: dict[str, list[Definition]] = {}

        def visit(node: ast.AST, prefix: str) -> None:
            for child in (each for name in BODIES for each in getattr(node, name, None) or []):
                if isinstance(child, Definition):
                    qualname = f"{prefix}{child.name}"
                    found.setdefault(qualname, []).append(child)
                    visit(child, f"{qualname}.")
                else:
                    visit(child, prefix)

        visit(self.tree, "")
        return found

    def parts(self, qualname: str) -> list[ast.AST]:
        """Return the nodes that make up a symbol; empty if there is no such symbol.

        A function is its definition, an attribute of a class is every statement that binds it, in
        the class body or through ``self``, and a module's variable every statement that binds it.
        """
        if not qualname:
            return [self.tree]
        owner, _, name = qualname.rpartition(".")
        if qualname in self.definitions:
            # Whoever binds the name again decides what it is in the end.
            return [*self.definitions[qualname], *self._rebound(owner, name)]
        if not owner:
            return [node for node in self.tree.body if name in bound_names(node)]
        found: list[ast.AST] = []
        for node in self.definitions.get(owner, []):
            if isinstance(node, ast.ClassDef):
                found += self._bound_in(node).get(name, [])
        return found

    def _rebound(self, owner: str, name: str) -> list[ast.AST]:
        here = name if not owner else f"{owner}.{name}"
        found: list[ast.AST] = [node for node in self.tree.body if here in bound_names(node)]
        for node in self.definitions.get(owner, []) if owner else ():
            if isinstance(node, ast.ClassDef):
                found += [item for item in node.body if name in bound_names(item)]
        return found

    def _bound_in(self, node: ast.ClassDef) -> dict[str, list[ast.AST]]:
        """Return the statements that bind each attribute of a class, those in its body first."""
        if id(node) not in self._bindings:
            table: dict[str, list[ast.AST]] = {}
            for item in node.body:
                for name in bound_names(item):
                    table.setdefault(name, []).append(item)
            for part in ast.walk(node):
                for name in bound_names(part):
                    if name.startswith("self."):
                        table.setdefault(name.removeprefix("self."), []).append(part)
            self._bindings[id(node)] = table
        return self._bindings[id(node)]

    def fingerprint(self, qualname: str) -> str | None:
        """Return the fingerprint of a symbol, or None if there is no such symbol.

        A class counts with its header and fields, not with its methods: those are symbols of their
        own.
        """
        parts = self.parts(qualname)
        return fingerprint(self._text(part) for part in parts) if parts else None

    @staticmethod
    def _text(node: ast.AST) -> str:
        if not isinstance(node, ast.ClassDef):
            return ast.dump(node)
        fields = [ast.dump(item) for item in node.body if not isinstance(item, Definition)]
        return "\n".join([header(node), *fields])

    def source(self, qualname: str) -> str | None:
        """Return the text of a symbol as upstream wrote it, or None if there is no such symbol."""
        lines = self.content.decode("utf-8", errors="replace").splitlines()
        pieces = []
        for node in self.parts(qualname):
            if isinstance(node, ast.Module):
                return "\n".join(lines)
            first, last = extent(node)
            pieces.append("\n".join(lines[first - 1 : last]))
        return "\n...\n".join(pieces) if pieces else None

    def line(self, qualname: str) -> int:
        """Return the line at which a symbol starts; 1 if there is no such symbol."""
        parts = self.parts(qualname)
        return extent(parts[0])[0] if parts and not isinstance(parts[0], ast.Module) else 1

    def innermost(self, line: int) -> str:
        """Return the qualname of the innermost definition that line ``line`` lies in, or ''."""
        best = ("", 0)
        for qualname, nodes in self.definitions.items():
            for node in nodes:
                first, last = extent(node)
                if first <= line <= last and first >= best[1]:
                    best = (qualname, first)
        return best[0]


def bound_names(node: ast.AST) -> set[str]:
    """Return the names and ``self.`` attributes that a statement itself binds."""
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor | ast.NamedExpr):
        targets = [node.target]
    elif isinstance(node, ast.With | ast.AsyncWith):
        targets = [item.optional_vars for item in node.items if item.optional_vars]
    elif isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    found = set()
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                found.add(part.id)
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                found.add(f"{part.value.id}.{part.attr}")
    return found - {"self"}


def extent(node: ast.AST) -> tuple[int, int]:
    """Return the first line (decorators included) and the last line of a statement."""
    if isinstance(node, ast.match_case):
        return extent(node.pattern)[0], extent(node.body[-1])[1]
    located = [node, *getattr(node, "decorator_list", [])]
    first = min(each.lineno for each in located)
    return first, node.end_lineno or first  # type: ignore[attr-defined]


class Sources(Mapping[str, bytes]):
    """The files of a tree by POSIX path, parsed when they are asked for.

    Args:
        files: content by path.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)
        self._modules: dict[str, Module | None] = {}

    @classmethod
    def of_directory(cls, root: Path, paths: Iterable[str]) -> Sources:
        """Read the files ``paths`` below ``root``."""
        return cls({path: (root / path).read_bytes() for path in paths})

    def __getitem__(self, path: str) -> bytes:
        return self._files[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def module(self, path: str) -> Module | None:
        """Return the parsed file, or None if it is missing, no Python, or not parsable."""
        if path not in self._modules:
            content = self._files.get(path)
            try:
                parse = content is not None and path.endswith(".py")
                self._modules[path] = Module(content) if parse and content is not None else None
            except SyntaxError:
                self._modules[path] = None
        return self._modules[path]

    def fingerprint(self, symbol: str) -> str | None:
        """Return the fingerprint of ``path::qualname``, or None if the tree has no such symbol."""
        path, qualname = split_symbol(symbol)
        module = self.module(path)
        if module is not None:
            return module.fingerprint(qualname)
        if qualname or path not in self:
            return None
        return fingerprint([self[path].decode("utf-8", errors="replace")])

    def source(self, symbol: str) -> str | None:
        """Return the text of ``path::qualname``, or None if the tree has no such symbol."""
        path, qualname = split_symbol(symbol)
        module = self.module(path)
        if module is not None:
            return module.source(qualname)
        return None if qualname or path not in self else self[path].decode(errors="replace")

    def moved(self, symbol: str) -> list[str]:
        """Return where else the tree has a definition of this qualname."""
        path, qualname = split_symbol(symbol)
        if not qualname:
            return []
        name = qualname.rpartition(".")[2]
        defines = re.compile(rb"\b(?:def|class) " + re.escape(name.encode()) + rb"\b")
        found = []
        for other, content in self.items():
            is_one = other != path and defines.search(content)
            module = self.module(other) if is_one else None
            if module is not None and qualname in module.definitions:
                found.append(f"{other}::{qualname}")
        return sorted(found)


def symbol_source(content: bytes, qualname: str) -> str | None:
    """Return the text of a symbol of one file, or None if there is no such symbol."""
    try:
        return Module(content).source(qualname)
    except SyntaxError:
        return None
