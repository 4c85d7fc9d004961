"""Statements inside a function: those around a hook, those that bind a name, those that use one.

``save_checkpoint`` changes in every release; what a hook in it relies on is the statement before
it, the statement after it, the conditions around it, and where the names it reads come from. All of
these are found by what they say and not by where they stand, so that they can be looked for in
another release.
"""

from __future__ import annotations

import ast
import builtins
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from buildtools.console import BuildError
from buildtools.patchfile import Hunk
from buildtools.symbols import (
    BODIES,
    Definition,
    Function,
    bound_names,
    extent,
    header,
    is_compound,
)


@dataclass(frozen=True)
class Block:
    """A list of statements, and the headers of what it is nested in, outermost first."""

    statements: list[ast.AST]
    around: tuple[str, ...]


@dataclass(frozen=True)
class Statement:
    """A statement, and the headers of what it is nested in."""

    node: ast.AST
    around: tuple[str, ...]

    @property
    def text(self) -> str:
        """What it says and under which conditions; of a compound statement, its header."""
        return "\n".join([*self.around, own_text(self.node)])

    @property
    def shown(self) -> str:
        """The same for people: one line, indented as deep as it is nested."""
        return "    " * len(self.around) + first_line(self.node)

    def expressions(self) -> Iterator[ast.AST]:
        """Yield every node of the statement but those of the statements inside it."""
        return own_nodes(self.node)


def own_text(node: ast.AST) -> str:
    """Return a statement as text, without the statements inside it."""
    return header(node) if is_compound(node) else ast.dump(node)


def first_line(node: ast.AST) -> str:
    """Return a statement as source, of a compound one only its head."""
    text = ast.unparse(node)
    return text.splitlines()[0] if is_compound(node) else text


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions in a statement's head."""
    for name, value in ast.iter_fields(node):
        if name in BODIES:
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from ast.walk(item)


def blocks(node: ast.AST, around: tuple[str, ...] = ()) -> Iterator[Block]:
    """Yield every block below a node, outer ones first."""
    for name in BODIES:
        statements = getattr(node, name, None)
        if not isinstance(statements, list) or not statements:
            continue
        # Which of its blocks: the body and the else branch are under other conditions.
        inner = (*around, f"{name} of {header(node)}") if around or is_nested(node) else (name,)
        yield Block(statements, inner)
        for statement in statements:
            yield from blocks(statement, inner)


def is_nested(node: ast.AST) -> bool:
    """Return whether a node is a condition of what is inside it: the outermost definition is not.

    Its signature may change without any statement in it having another meaning.
    """
    return not isinstance(node, Function | ast.ClassDef | ast.Module)


def statements(definition: ast.AST, *, into_definitions: bool = True) -> Iterator[Statement]:
    """Yield the statements below a definition in the order of the source.

    Args:
        definition: a function, a class or a module.
        into_definitions: whether functions and classes inside it count, as statements of it.
    """

    def flatten(node: ast.AST, around: tuple[str, ...]) -> Iterator[Statement]:
        if isinstance(node, Definition) and not into_definitions:
            return
        yield Statement(node, around)
        for name in BODIES:
            for child in getattr(node, name, None) or []:
                yield from flatten(child, (*around, f"{name} of {header(node)}"))

    for name in BODIES:
        for node in getattr(definition, name, None) or []:
            yield from flatten(node, (name,))


# ------------------------------------------------------------------------------- around a hook


@dataclass(frozen=True)
class Place:
    """A gap between two neighbouring statements: what stands before it and after it."""

    text: str
    shown: str


def _place(block: Block, index: int, end: int) -> Place:
    """Return the gap that the statements ``[index, end)`` of a block fill; they are left out."""
    before = block.statements[index - 1] if index else None
    after = block.statements[end] if end < len(block.statements) else None
    texts = [own_text(node) if node else "nothing" for node in (before, after)]
    shown = [first_line(node) if node else "(nothing)" for node in (before, after)]
    return Place("\n".join([*block.around, *texts]), f"{shown[0]}\n  <hook>\n{shown[1]}")


def places(definition: ast.AST) -> Iterator[Place]:
    """Yield every gap of a definition."""
    for block in blocks(definition):
        for index in range(len(block.statements) + 1):
            yield _place(block, index, index)


@dataclass(frozen=True)
class Hook:
    """Statements that a hunk inserts into a definition.

    Attributes:
        places: the gaps they stand in.
        reads: the names they take from the code around them, sorted.
    """

    places: tuple[Place, ...]
    reads: tuple[str, ...]


def hook_of(definitions: Iterable[ast.AST], hunk: Hunk, where: str) -> Hook:
    """Return what a hunk inserts, looked up in the file after the patch.

    Args:
        definitions: the symbol after the patch.
        hunk: the change.
        where: who asks, for the error.

    Raises:
        BuildError: the hunk does not insert whole statements.
    """
    matcher = difflib.SequenceMatcher(None, hunk.old, hunk.new, autojunk=False)
    found: list[Place] = []
    reads: set[str] = set()
    every_block = [block for definition in definitions for block in blocks(definition)]
    for kind, _, _, start, end in matcher.get_opcodes():
        if kind == "equal":
            continue
        first, last = hunk.new_start + start, hunk.new_start + end - 1
        inserted = _inserted(every_block, first, last) if kind == "insert" else None
        if inserted is None:
            raise BuildError(
                f"{where}: the hunk at line {hunk.start} does not insert whole statements: name "
                "the symbol without '@' in Tripwires"
            )
        block, index, stop = inserted
        found.append(_place(block, index, stop))
        for node in block.statements[index:stop]:
            reads |= _reads(node)
    return Hook(tuple(found), tuple(sorted(reads)))


def _inserted(every: list[Block], first: int, last: int) -> tuple[Block, int, int] | None:
    """Return the block and the range of its statements that fill the lines ``[first, last]``."""
    for block in every:
        inside = [
            index
            for index, node in enumerate(block.statements)
            if first <= extent(node)[0] and extent(node)[1] <= last
        ]
        across = [
            node
            for node in block.statements
            if extent(node)[0] < first <= extent(node)[1] and not is_compound(node)
        ]
        if inside and not across:
            return block, inside[0], inside[-1] + 1
    return None


def _reads(node: ast.AST) -> set[str]:
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    bound = {name for part in ast.walk(node) for name in bound_names(part)}
    loaded = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    return loaded - bound - set(dir(builtins))


# ---------------------------------------------------------------------------- by what they name


def bindings(definition: ast.AST, name: str) -> list[Statement]:
    """Return the statements that bind a local name."""
    return [each for each in statements(definition) if name in bound_names(each.node)]


def parameter(definition: ast.AST, name: str) -> str | None:
    """Return whether ``name`` is a parameter, as text with its annotation, or None."""
    if isinstance(definition, Function):
        arguments = definition.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in every:
            if argument.arg == name:
                return ast.dump(argument)
    return None


def mentions(definition: ast.AST, names: Iterable[str]) -> list[Statement]:
    """Return the statements that name any of ``names`` (dotted, as in the source), in order."""
    wanted = set(names)
    return [
        each
        for each in statements(definition)
        if any(
            isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) in wanted
            for part in each.expressions()
        )
    ]
