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
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from buildtools.console import BuildError
from buildtools.statements import Statement, statements
from buildtools.symbols import Definition, Function, Module, Sources, bound_names

ATTRIBUTES = frozenset(
    {
        "main_param",
        "main_param_sharded",
        "main_params",
        "model_fp32_groups",
        "model_float16_groups",
        "shard_float16_groups",
        "shard_fp32_groups",
        "shard_fp32_from_float16_groups",
        "float16_groups",
        "fp32_from_float16_groups",
        "fp32_from_fp32_groups",
        "param_groups",
        "exp_avg",
        "exp_avg_sq",
        "momentum_buffer",
        "optimizer_state_keys",
    }
)
"""Attributes, variables and keys of dicts that lead to such tensors."""

KEYS = ATTRIBUTES | {"params", "fp32_from_fp16_params", "fp32_from_fp16"}
STATE_OWNERS = ("optimizer", "sub_optimizer", "base_optimizer", "cpu_optimizer", "gpu_optimizer")
CALLS = frozenset(
    {
        "get_parameters",
        "_get_main_param_and_optimizer_states",
        "_set_main_param_and_optimizer_states",
    }
)
"""Methods that hand such tensors out or fill them."""

_WORDS = re.compile(
    "|".join(
        [
            rf"\b(?:{'|'.join(sorted(ATTRIBUTES | CALLS))})\b",
            rf"(?:{'|'.join(STATE_OWNERS)})\.state\b",
            rf"['\"](?:{'|'.join(sorted(KEYS))})['\"]",
        ]
    ).encode()
)
"""What a file without readers does not hold: it need not be parsed."""

_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Assert)
_COLLECT = frozenset({"append", "extend", "add", "update", "insert", "setdefault"})


@dataclass(frozen=True)
class Reader:
    """A function (or the rest of a module or class) that touches main params or optimizer state.

    Attributes:
        symbol: ``path::qualname``; nested functions count as part of the outermost one.
        touches: what it names, sorted.
        statements: the slice of it that matters, in order.
        line: where it starts to touch them.
    """

    symbol: str
    touches: tuple[str, ...]
    statements: tuple[Statement, ...]
    line: int


def readers(sources: Sources) -> dict[str, Reader]:
    """Return the readers of a tree by symbol.

    Raises:
        BuildError: a file that may hold one cannot be parsed.
    """
    found = {}
    for path in sources:
        if not path.endswith(".py") or not _WORDS.search(sources[path]):
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
    for qualname, nodes in _units(module):
        touched: set[str] = set()
        lines = []
        for node in nodes:
            for part in _own_walk(node):
                token = _token(part)
                if token:
                    touched.add(token)
                    lines.append(part.lineno)  # type: ignore[attr-defined]
        if touched:
            slices = tuple(each for node in nodes for each in _slice(node))
            yield Reader(f"{path}::{qualname}", tuple(sorted(touched)), slices, min(lines))


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


def _token(node: ast.AST) -> str | None:
    """Return what a node names of main params or optimizer state, or None."""
    if isinstance(node, ast.Attribute):
        if node.attr in ATTRIBUTES:
            return node.attr
        if node.attr == "state" and _is_optimizer(node.value):
            return "optimizer.state"
        if node.attr in CALLS:
            return f"{node.attr}()"
    if isinstance(node, ast.Name) and node.id in ATTRIBUTES:
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in KEYS:
        return f"'{node.value}'"
    return None


def _is_optimizer(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in STATE_OWNERS


def _slice(unit: ast.AST) -> Iterator[Statement]:
    """Yield the statements of a unit that handle the tensors, and those that leave it early."""
    every = list(statements(unit, into_definitions=isinstance(unit, Function)))
    tainted: set[str] = set()
    while True:
        before = len(tainted)
        for statement in every:
            if _is_tainted(statement, tainted):
                tainted |= _targets(statement.node)
        if len(tainted) == before:
            break
    for statement in every:
        if isinstance(statement.node, _EXITS) or _is_tainted(statement, tainted):
            yield statement


def _is_tainted(statement: Statement, tainted: set[str]) -> bool:
    return any(
        _token(part) or (isinstance(part, ast.Name) and part.id in tainted)
        for part in statement.expressions()
    )


def _targets(node: ast.AST) -> set[str]:
    """Return the local names that a statement lets hold what it handles."""
    found = {name for name in bound_names(node) if "." not in name}
    for part in ast.walk(node) if isinstance(node, ast.stmt) else ():
        if isinstance(part, ast.Subscript | ast.Attribute) and isinstance(part.ctx, ast.Store):
            found |= _base(part)
        if isinstance(part, ast.NamedExpr):
            found.add(part.target.id)
        func = part.func if isinstance(part, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr in _COLLECT:
            found |= _base(func.value)
    return found - {"self", "cls"}


def _base(node: ast.AST) -> set[str]:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()
