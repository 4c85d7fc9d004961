"""The census: every place of upstream that reads or writes main params or optimizer state.

While streaming, these tensors have no storage. A reader that is not known is a crash, or worse, so
each one is classified by hand, and `build.py check` fails with file and line on one that is new or
whose handling of these tensors has changed.

What counts of a reader is a slice of it: the statements that name such a tensor, those that use a
variable made from one, the conditions these are under, and every way to leave early. The rest of a
long function may change freely.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from buildtools.console import BuildError
from buildtools.statements import Statement, statements
from buildtools.symbols import Definition, Function, Module, Sources, bound_names
from buildtools.tokens import WORDS, token

_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Assert)
_COLLECT = frozenset({"append", "extend", "add", "update", "insert", "setdefault"})


@dataclass(frozen=True)
class Reader:
    """A function (or the rest of a module or class) that touches main params or optimizer state.

    Attributes:
        symbol: ``path::qualname``; nested functions count as part of the outermost one.
        touches: what it names, sorted.
        signature: decorators, names of arguments and defaults.
        statements: the slice of it that matters, in order.
        line: where it starts to touch them.
    """

    symbol: str
    touches: tuple[str, ...]
    signature: tuple[str, ...]
    statements: tuple[Statement, ...]
    line: int


def readers(sources: Sources) -> dict[str, Reader]:
    """Return the readers of a tree by symbol.

    Raises:
        BuildError: a file that may hold one cannot be parsed.
    """
    found = {}
    for path in sources:
        if not path.endswith(".py") or not WORDS.search(sources[path]):
            continue
        module = sources.module(path)
        if module is None:
            raise BuildError(
                f"census: {path} is not Python {sys.version_info[0]}."
                f"{sys.version_info[1]}: its readers of optimizer state cannot be counted"
            )
        for reader in _of_module(path, module):
            found[reader.symbol] = reader
    return found


def _of_module(path: str, module: Module) -> Iterator[Reader]:
    is_optimizer = "/optimizer/" in path
    for qualname, nodes in _units(module):
        touched: set[str] = set()
        lines = []
        for node in nodes:
            for part in _own_walk(node):
                named = token(part, is_optimizer)
                if named:
                    touched.add(named)
                    lines.append(part.lineno)  # type: ignore[attr-defined]
        if touched:
            yield Reader(
                f"{path}::{qualname}",
                tuple(sorted(touched)),
                tuple(text for node in nodes for text in _signature(node)),
                tuple(each for node in nodes for each in _slice(node, is_optimizer)),
                min(lines),
            )


def _units(module: Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield the functions that are in no other function, and what is left of classes and module."""
    found: dict[str, list[ast.AST]] = {"": [module.tree]}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                found.setdefault(f"{prefix}{child.name}", []).append(child)
            elif isinstance(child, ast.ClassDef):
                found.setdefault(f"{prefix}{child.name}", []).append(child)
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(module.tree, "")
    yield from found.items()


def _own_walk(unit: ast.AST) -> Iterator[ast.AST]:
    """Walk a function whole, and a class or module without the definitions in it."""
    if isinstance(unit, Function):
        yield from ast.walk(unit)
        return
    for child in ast.iter_child_nodes(unit):
        if not isinstance(child, Definition):
            yield child
            yield from _own_walk(child)


def _signature(unit: ast.AST) -> list[str]:
    """Return what of a definition's head decides how it is called, annotations apart."""
    if not isinstance(unit, Definition):
        return []
    parts = [ast.dump(each) for each in unit.decorator_list]
    if isinstance(unit, Function):
        arguments = [part.arg for part in ast.walk(unit.args) if isinstance(part, ast.arg)]
        defaults = [*unit.args.defaults, *(each for each in unit.args.kw_defaults if each)]
        parts += [*arguments, *map(ast.dump, defaults)]
    return parts


def _slice(unit: ast.AST, is_optimizer: bool) -> Iterator[Statement]:
    """Yield the statements of a unit that handle the tensors, and those that leave it early."""
    every = list(statements(unit, into_definitions=isinstance(unit, Function)))
    nested = [
        node
        for node in (ast.walk(unit) if isinstance(unit, Function) else ())
        if isinstance(node, Function) and node is not unit
    ]
    tainted: set[str] = set()
    while True:
        before = len(tainted)
        for statement in every:
            if _is_tainted(statement, tainted, is_optimizer):
                tainted |= _targets(statement.node)
                # A function inside it gets the tensors from whoever names it, and hands them back.
                named = {part.id for part in statement.expressions() if isinstance(part, ast.Name)}
                for function in nested:
                    if function.name in named:
                        tainted |= {
                            a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)
                        }
        for function in nested:
            inside = statements(function)
            if any(_is_tainted(statement, tainted, is_optimizer) for statement in inside):
                tainted.add(function.name)
        tainted -= {"self", "cls"}
        if len(tainted) == before:
            break
    for statement in every:
        if isinstance(statement.node, _EXITS) or _is_tainted(statement, tainted, is_optimizer):
            yield statement


def _is_tainted(statement: Statement, tainted: set[str], is_optimizer: bool) -> bool:
    for part in statement.expressions():
        if token(part, is_optimizer):
            return True
        if isinstance(part, ast.Name) and part.id in tainted:
            return True
        if isinstance(part, ast.Attribute) and ast.unparse(part) in tainted:
            return True
    return False


def _targets(node: ast.AST) -> set[str]:
    """Return the names, also of attributes, that a statement lets hold what it handles."""
    found = bound_names(node)
    for part in ast.walk(node) if isinstance(node, ast.stmt) else ():
        if isinstance(part, ast.Subscript | ast.Attribute) and isinstance(part.ctx, ast.Store):
            found |= _base(part)
        if isinstance(part, ast.NamedExpr):
            found.add(part.target.id)
        if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name:
            found.add(part.name)
        func = part.func if isinstance(part, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr in _COLLECT:
            found |= _base(func.value)
    return found - {"self", "cls"}


def _base(node: ast.AST) -> set[str]:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()
