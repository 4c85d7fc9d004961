"""Where a change lies: the symbols around each hunk, and copies of them that no merge can see."""

from __future__ import annotations

import ast

from buildtools.patchfile import FileChange
from buildtools.symbols import Function, Module, Sources, split_symbol


def enclosing_symbols(change: FileChange, before: bytes, after: bytes) -> list[str]:
    """Return, for each hunk in order, the qualname of the definition that its change lies in.

    Added lines are looked up in the file after the change, removed ones in the file before it; a
    hunk whose lines lie in several definitions names the outermost that holds them all. '' is the
    module level, and all that can be said of a file that is no Python.
    """
    try:
        old, new = Module(before), Module(after)
    except SyntaxError:
        return [""] * len(change.hunks)
    found = []
    for hunk in change.hunks:
        head, tail = hunk.leading, hunk.trailing
        names = {
            old.innermost(line)
            for line in range(hunk.start + head, hunk.start + len(hunk.old) - tail)
            if before.splitlines()[line - 1].strip()
        }
        names |= {
            _known_to(old, new.innermost(line))
            for line in range(hunk.new_start + head, hunk.new_start + len(hunk.new) - tail)
            if after.splitlines()[line - 1].strip()
        }
        found.append(_common(names))
    return found


def _known_to(module: Module, qualname: str) -> str:
    """Return the innermost definition around ``qualname`` (itself included) that existed before."""
    while qualname and qualname not in module.definitions:
        qualname = qualname.rpartition(".")[0]
    return qualname


def _common(names: set[str]) -> str:
    split = [name.split(".") if name else [] for name in names]
    shared = []
    for level in zip(*split, strict=False):
        if len(set(level)) != 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def twins(old: Sources, new: Sources, symbol: str) -> list[str]:
    """Return the functions of ``new`` with the body of ``symbol`` in ``old`` that are new copies.

    Upstream may duplicate a function that a patch changes; the copy then lacks the patch, which no
    merge can see. Bodies of fewer than three statements are too common to say anything.
    """
    path, qualname = split_symbol(symbol)
    module = old.module(path)
    originals = [
        node
        for node in (module.definitions.get(qualname, []) if module else [])
        if isinstance(node, Function) and len(node.body) >= 3
    ]
    if not originals:
        return []
    return sorted(_copies(new, originals) - _copies(old, originals) - {symbol})


def _copies(sources: Sources, originals: list[Function]) -> set[str]:
    shapes = {_shape(node) for node in originals}
    bodies = {_body(node) for node in originals}
    found = set()
    for path in sources:
        module = sources.module(path)
        for qualname, nodes in (module.definitions if module else {}).items():
            for node in nodes:
                if isinstance(node, Function) and _shape(node) in shapes and _body(node) in bodies:
                    found.add(f"{path}::{qualname}")
    return found


def _shape(node: Function) -> tuple[int, tuple[type[ast.stmt], ...]]:
    """Return what is cheap to compare before `_body` is."""
    return len(node.args.args), tuple(type(item) for item in node.body)


def _body(node: Function) -> str:
    return "\n".join([ast.dump(node.args), *map(ast.dump, node.body)])
