"""Finds objects of Megatron's modules that are not what Megatron's source says.

For every imported `megatron.*` module the source is parsed, and the live module compared with it:

* a function or method that the source defines must be code from a `def` of that name in that file;
* a class that the source defines must be of that module;
* a name imported from another Megatron module must be that module's object;
* a name imported from anywhere else must not come from `tests`, apart from named stand-ins.

So a patched function, method or binding is found, whoever patched it. Objects that wrap their code
in something that cannot be looked through are skipped; `num_checked` tells how many were not.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any


@dataclass(slots=True)
class Scan:
    """Result of `scan`: names that are not Megatron's own, and how many were compared."""

    foreign: list[str] = field(default_factory=list)
    num_checked: int = 0


def scan(stand_ins: frozenset[str] = frozenset()) -> Scan:
    """Compare all imported Megatron modules with their sources.

    Args:
        stand_ins: qualified names of external objects from `tests` that may be bound.
    """
    result = Scan()
    for name, module in sorted(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "__file__", None):
            path = str(module.__file__)
            if path.endswith(".py"):
                _scan_module(module, Path(path), stand_ins, result)
    return result


def _scan_module(module: ModuleType, path: Path, stand_ins: frozenset[str], result: Scan) -> None:
    tree = ast.parse(path.read_bytes())
    defined = _definitions(tree.body)
    for name, lines in defined.items():
        if name in vars(module):
            _check(f"{module.__name__}.{name}", vars(module)[name], lines, path, result)
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            owner = vars(module).get(node.name)
            if inspect.isclass(owner) and owner.__module__ == module.__name__:
                _scan_class(f"{module.__name__}.{node.name}", owner, node, path, result)
    for name, value in vars(module).items():
        if name in defined:
            continue
        origin = getattr(value, "__module__", None) or ""
        if isinstance(value, FunctionType):
            origin = value.__globals__.get("__name__", origin)
        if origin.split(".")[0] == "tests":
            qualified = f"{origin}.{getattr(value, '__qualname__', name)}"
            if qualified not in stand_ins:
                result.foreign.append(f"{module.__name__}.{name} is {qualified}")
    _scan_imports(module, tree, result)


def _scan_class(name: str, owner: type, node: ast.ClassDef, path: Path, result: Scan) -> None:
    for attribute, lines in _definitions(node.body).items():
        if attribute in vars(owner):
            _check(f"{name}.{attribute}", vars(owner)[attribute], lines, path, result)


def _check(name: str, value: Any, lines: set[int], path: Path, result: Scan) -> None:
    if inspect.isclass(value):
        result.num_checked += 1
        if value.__module__ != name.rsplit(".", 1)[0]:
            result.foreign.append(f"{name} is a class of {value.__module__}")
        return
    code = _code_of(value)
    if code is None:
        return
    result.num_checked += 1
    if Path(code.co_filename) != path or code.co_firstlineno not in lines:
        result.foreign.append(f"{name} is {code.co_filename}:{code.co_firstlineno}")


def _code_of(value: Any) -> CodeType | None:
    """Return the code below decorators, properties, static and class methods."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, functools.partial):
        value = value.func
    value = inspect.unwrap(value) if callable(value) else value
    return value.__code__ if isinstance(value, FunctionType) else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also those under `if`, `try` and `with`, but not inside functions."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _definitions(body: list[ast.stmt]) -> dict[str, set[int]]:
    """Return the lines at which each function or class of a body starts, decorators included."""
    found: dict[str, set[int]] = {}
    for node in _statements(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.setdefault(node.name, set()).add(first)
    return found


def _scan_imports(module: ModuleType, tree: ast.Module, result: Scan) -> None:
    """Names that are bound once, by an import from Megatron, must be the imported object."""
    bound = [node for node in _statements(tree.body) if isinstance(node, ast.ImportFrom)]
    names = [alias.asname or alias.name for node in bound for alias in node.names]
    assigned = {
        target.id
        for node in _statements(tree.body)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in ast.walk(node)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    }
    defined = _definitions(tree.body).keys() | assigned
    for node in bound:
        source = sys.modules.get(_absolute(module, node))
        if source is None or not source.__name__.startswith("megatron."):
            continue
        for alias in node.names:
            name = alias.asname or alias.name
            if name in defined or names.count(name) > 1 or alias.name not in vars(source):
                continue
            if name in vars(module):
                result.num_checked += 1
                if vars(module)[name] is not vars(source)[alias.name]:
                    result.foreign.append(
                        f"{module.__name__}.{name} is not {source.__name__}.{alias.name}"
                    )


def _absolute(module: ModuleType, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = (module.__package__ or "").split(".")
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])
