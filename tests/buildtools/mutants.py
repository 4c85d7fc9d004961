"""Mutated upstreams: what a tripwire or the census must notice, one change at a time."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from buildtools.symbols import Definition, Function, Module, extent


def _lines(content: bytes) -> list[str]:
    return content.decode().splitlines(keepends=True)


def _joined(lines: list[str]) -> bytes | None:
    """Return the lines as a file, or None if they are not Python any more."""
    text = "".join(lines).encode()
    try:
        ast.parse(text)
    except SyntaxError:
        return None
    return text


def _indent(node: ast.AST) -> str:
    return " " * int(node.col_offset)  # type: ignore[attr-defined, no-any-return]


def insert_before(content: bytes, node: ast.AST, statement: str) -> bytes | None:
    """Insert a statement before another one; None if that is no place for one (``elif``)."""
    lines = _lines(content)
    lines.insert(extent(node)[0] - 1, f"{_indent(node)}{statement}\n")
    return _joined(lines)


def without(content: bytes, node: ast.AST) -> bytes | None:
    """Replace a statement by ``pass``."""
    first, last = extent(node)
    lines = _lines(content)
    lines[first - 1 : last] = [f"{_indent(node)}pass\n"]
    return _joined(lines)


def unparsed(content: bytes, node: ast.AST, new: ast.AST | list[ast.AST]) -> bytes | None:
    """Replace a statement by others."""
    first, last = extent(node)
    text = "\n".join(map(ast.unparse, new if isinstance(new, list) else [new]))
    lines = _lines(content)
    lines[first - 1 : last] = [f"{_indent(node)}{line}\n" for line in text.splitlines()]
    return _joined(lines)


def _function(module: Module, qualname: str) -> Function | None:
    nodes = module.definitions.get(qualname, [])
    return nodes[0] if nodes and isinstance(nodes[0], Function) else None


def body_changed(module: Module, qualname: str) -> bytes | None:
    """Let a function do something more, a class have another field, or a name another value."""
    node = module.parts(qualname)[0]
    if isinstance(node, Definition):
        return insert_before(module.content, node.body[0], "mutated = True")
    if isinstance(node, ast.Module):
        return insert_before(module.content, node.body[-1], "mutated = True")
    value = getattr(node, "value", None) or getattr(node, "annotation", None)
    if value is None:
        return without(module.content, node)
    changed = ast.parse(ast.unparse(node)).body[0]
    changed.value = ast.Tuple([value], ast.Load())  # type: ignore[attr-defined]
    return unparsed(module.content, node, changed)


def argument_added(module: Module, qualname: str) -> bytes | None:
    """Give a function one more argument."""
    node = _function(module, qualname)
    if node is None:
        return None
    changed = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(changed, Function)
    changed.args.kwonlyargs.append(ast.arg("mutated"))
    changed.args.kw_defaults.append(ast.Constant(None))
    return unparsed(module.content, node, changed)


def order_swapped(module: Module, qualname: str) -> bytes | None:
    """Swap two neighbouring statements of a function that differ."""
    node = _function(module, qualname)
    for one, two in zip(node.body, node.body[1:], strict=False) if node else ():
        if ast.dump(one) != ast.dump(two):
            first, last = extent(one)[0], extent(two)[1]
            lines = _lines(module.content)
            parts = [ast.unparse(two), ast.unparse(one)]
            lines[first - 1 : last] = [
                f"{_indent(one)}{line}\n" for part in parts for line in part.splitlines()
            ]
            return _joined(lines)
    return None


def gone(module: Module, qualname: str) -> bytes | None:
    """Take a definition away."""
    node = module.parts(qualname)[0]
    return without(module.content, node) if isinstance(node, Definition) else None


SYMBOL_MUTATIONS: dict[str, Callable[[Module, str], bytes | None]] = {
    "body changed": body_changed,
    "argument added": argument_added,
    "order swapped": order_swapped,
    "gone": gone,
}


def reads_more(module: Module, nodes: list[ast.AST]) -> bytes | None:
    """Let a reader take one more main param, where it handles some already."""
    for node in nodes:
        if isinstance(node, ast.stmt):
            mutant = insert_before(module.content, node, "mutated = [p.main_param for p in ()]")
            if mutant:
                return mutant
    return None


def guards_removed(module: Module, nodes: list[ast.AST]) -> Iterator[bytes]:
    """Yield the file without a condition, once for each condition among ``nodes``."""
    for node in nodes:
        if isinstance(node, ast.If) and not node.orelse:
            mutant = unparsed(module.content, node, list(node.body))
            if mutant:
                yield mutant


NEW_READER = """

def mutated_reader(optimizer):
    return [param.norm() for group in optimizer.param_groups for param in group["params"]]
"""
