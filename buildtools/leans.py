"""Who leans on which symbol of upstream: the patches by their trailers, the overlay by its code.

Of the overlay it is derived: what it imports from upstream, what its subclasses override, by
themselves or through another class of the overlay, and every attribute of ``self`` that is
upstream's. What code leans on through any other object, a comment
``# Tripwire: path::qualname`` on the spot names; its path is relative to the file.

A trailer may end in ``@``: then not the whole symbol counts but what stands around the hook in it,
and the statements that name anything listed after the ``@``, in their order.
"""

from __future__ import annotations

import ast
import io
import posixpath
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from buildtools.console import BuildError
from buildtools.objects import blob_id
from buildtools.overlay import overlay_files
from buildtools.patchfile import Patch, apply_change
from buildtools.placement import enclosing_symbols
from buildtools.series import parse_header
from buildtools.statements import Hook, hook_of
from buildtools.symbols import Definition, Module, Sources, bound_names

_COMMENT = re.compile(r"# Tripwire: (\S+)")


@dataclass
class Lean:
    """A symbol that something leans on.

    Attributes:
        symbol: as it was named, e.g. ``path::qualname`` or ``path::qualname@name,name``.
        by: numbers of patches and paths of overlay files.
        hooks: what patches insert into it; for symbols with ``@``.
    """

    symbol: str
    by: set[str] = field(default_factory=set)
    hooks: list[Hook] = field(default_factory=list)


def leans(patches: list[Patch], overlay: Path, pristine: Sources) -> dict[str, Lean]:
    """Return everything that is leaned on, by symbol.

    Args:
        patches: the series; it must apply to ``pristine``.
        overlay: its directory.
        pristine: the pinned upstream.

    Raises:
        BuildError: a trailer, comment or import names what upstream does not have, or a hunk lies
            in a symbol that the trailers of its patch do not name. All are reported.
    """
    found: dict[str, Lean] = {}
    problems = list(_of_patches(patches, pristine, found))
    problems += _of_overlay(overlay, pristine, found)
    for lean in found.values():
        symbol = lean.symbol.partition("@")[0]
        if pristine.fingerprint(symbol) is None:
            moved = pristine.moved(symbol)
            hint = f"; there is {' and '.join(moved)}" if moved else ""
            problems.append(f"{', '.join(sorted(lean.by))}: upstream has no {symbol}{hint}")
    if problems:
        raise BuildError("\n".join(["tripwires cannot be laid:", *sorted(set(problems))]))
    return found


def overlay_leans(overlay: Path, sources: Sources) -> dict[str, Lean]:
    """Return what the overlay would lean on in another tree, as far as that has it.

    A base class may get a new base, or a method that the overlay overrides without knowing.
    """
    found: dict[str, Lean] = {}
    list(_of_overlay(overlay, sources, found))
    return found


def _of_overlay(overlay: Path, sources: Sources, found: dict[str, Lean]) -> Iterator[str]:
    contents = {
        path: (overlay / path).read_bytes()
        for path in overlay_files(overlay)
        if path.endswith(".py")
    }
    ours = {
        (path, node.name): node
        for path, content in contents.items()
        for node in Module(content).tree.body
        if isinstance(node, ast.ClassDef)
    }
    for path, content in contents.items():
        yield from _of_overlay_file(path, content, ours, sources, found)


def _add(found: dict[str, Lean], symbol: str, by: str, hooks: Iterable[Hook] = ()) -> None:
    lean = found.setdefault(symbol, Lean(symbol))
    lean.by.add(by)
    lean.hooks += hooks


# ----------------------------------------------------------------------------------- the patches


def trailer_symbols(patch: Patch) -> list[str]:
    """Return what the trailer ``Tripwires`` of a patch names; entries are apart by ``, ``."""
    value = parse_header(patch.message).trailers.get("Tripwires", "")
    return [symbol for symbol in re.split(r",\s+", value) if symbol]


def _of_patches(patches: list[Patch], pristine: Sources, found: dict[str, Lean]) -> Iterator[str]:
    contents: dict[str, bytes] = {}
    for patch in patches:
        number = patch.name[:4]
        named = trailer_symbols(patch)
        for symbol in named:
            _add(found, symbol, number)
        for change in patch.changes:
            before = contents.get(change.path, pristine.get(change.path, b""))
            if blob_id(before) != change.before:
                yield f"{patch.name}: {change.path} is not the file this patch was made for"
                continue
            after = contents[change.path] = apply_change(change, before)
            for hunk, qualname in zip(
                change.hunks, enclosing_symbols(change, before, after), strict=True
            ):
                where = f"{change.path}::{qualname}" if qualname else change.path
                match = [each for each in named if each.partition("@")[0] == where]
                if not match:
                    yield f"{patch.name}: Tripwires must name {where}: the patch changes it"
                elif "@" in match[0] and change.path.endswith(".py"):
                    definitions = Module(after).parts(qualname)
                    try:
                        hook = hook_of(definitions, hunk, f"{patch.name}: {where}")
                    except BuildError as error:
                        if match[0].endswith("@"):  # without names, nothing would be left
                            yield str(error)
                        continue
                    _add(found, match[0], number, [hook])


# ----------------------------------------------------------------------------------- the overlay


def _of_overlay_file(
    path: str,
    content: bytes,
    ours: dict[tuple[str, str], ast.ClassDef],
    pristine: Sources,
    found: dict[str, Lean],
) -> Iterator[str]:
    module = Module(content)
    names: dict[str, tuple[str, str]] = {name: (path, name) for at, name in ours if at == path}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.startswith("megatron")]
            yield from (f"{path}: import names from {name}, not the module" for name in modules)
        if not isinstance(node, ast.ImportFrom):
            continue
        source = resolve_import(path, node)
        if source is None:
            continue
        for alias in node.names:
            name = alias.asname or alias.name
            if "/nvme_state_store" in source:
                names[name] = (f"{source}.py", alias.name)
                continue
            target = definition_of(pristine, source, alias.name)
            if target is None:
                yield f"{path}: imports {alias.name} from {source}, where upstream has none"
                continue
            names[name] = target
            _add(found, "::".join(target), path)
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            nodes, bases = _family(node, names, ours, pristine)
            problems: list[str] = []
            for symbol in _used_members(path, nodes, bases, pristine, problems):
                _add(found, symbol, path)
            yield from problems
    for symbol in _comments(path, content):
        _add(found, symbol, path)


def _family(
    node: ast.ClassDef,
    names: dict[str, tuple[str, str]],
    ours: dict[tuple[str, str], ast.ClassDef],
    pristine: Sources,
) -> tuple[list[ast.ClassDef], list[tuple[str, str]]]:
    """Return a class with its bases in the overlay, and its direct bases of upstream's.

    What a base in the overlay overrides or uses, it does so in the subclass's place, too. The bases
    of that base count where its own file is looked at.
    """
    bases = [names[name] for base in node.bases if (name := ast.unparse(base)) in names]
    return (
        [node, *(ours[base] for base in bases if base in ours)],
        [base for base in bases if base not in ours and pristine.module(base[0]) is not None],
    )


def _comments(path: str, content: bytes) -> Iterator[str]:
    for token in tokenize.tokenize(io.BytesIO(content).readline):
        match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))


def resolve_import(path: str, node: ast.ImportFrom) -> str | None:
    """Return the path (without ``.py``) that ``from x import ...`` in ``path`` takes names from.

    None if it is not below ``megatron``.
    """
    if node.level:
        package = path.split("/")[: -node.level]
        return "/".join([*package, *(node.module or "").split(".")]).rstrip("/")
    dotted = node.module or ""
    return dotted.replace(".", "/") if dotted.split(".")[0] == "megatron" else None


def definition_of(sources: Sources, source: str, name: str) -> tuple[str, str] | None:
    """Return the file and name behind ``from source import name``, through re-exports."""
    for path in (f"{source}.py", f"{source}/__init__.py"):
        module = sources.module(path)
        if module is None:
            continue
        if name in module.definitions:
            return path, name
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and name in bound_names(node):
                original = next(
                    alias.name for alias in node.names if (alias.asname or alias.name) == name
                )
                further = resolve_import(path, node)
                found = definition_of(sources, further, original) if further else None
                if found:
                    return found
        if module.parts(name):
            return path, name
    return None


def ancestors(sources: Sources, path: str, name: str) -> list[tuple[str, str]]:
    """Return a class of upstream's and its bases of upstream's, nearest first."""
    module = sources.module(path)
    found = [(path, name)]
    for node in module.definitions.get(name, []) if module else []:
        for base in node.bases if isinstance(node, ast.ClassDef) else []:
            target = definition_of(sources, path.removesuffix(".py"), ast.unparse(base))
            module_of = sources.module(target[0]) if target else None
            if target and module_of is not None and target[1] in module_of.definitions:
                found += [each for each in ancestors(sources, *target) if each not in found]
    return found


def _used_members(
    where: str,
    nodes: list[ast.ClassDef],
    bases: list[tuple[str, str]],
    pristine: Sources,
    problems: list[str],
) -> Iterator[str]:
    """Yield upstream's members that a subclass overrides, or uses through ``self`` or ``super``.

    A member that neither has is a problem: upstream may have renamed it.
    """
    parts = [part for node in nodes for part in ast.walk(node)]
    own = {item.name for node in nodes for item in node.body if isinstance(item, Definition)}
    own |= {name.removeprefix("self.") for part in parts for name in bound_names(part)}
    used: dict[str, bool] = {}
    for part in parts:
        if isinstance(part, ast.Attribute):
            value = part.value
            is_super = isinstance(value, ast.Call) and ast.unparse(value.func) == "super"
            if is_super or (isinstance(value, ast.Name) and value.id == "self"):
                used[part.attr] = used.get(part.attr, False) or is_super
    lineage = [each for base in bases for each in ancestors(pristine, *base)]
    yield from (f"{path}::{owner}" for path, owner in lineage)
    for name in sorted(own | set(used)) if lineage else ():
        for path, owner in lineage:
            module = pristine.module(path)
            if module is not None and module.parts(f"{owner}.{name}"):
                yield f"{path}::{owner}.{name}"
                break
        else:
            if used.get(name) or (name in used and name not in own):
                problems.append(
                    f"{where}: {nodes[0].name} uses {name}, which upstream does not have"
                )
