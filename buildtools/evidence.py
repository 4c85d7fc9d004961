"""What a tripwire looks at in a tree: as a fingerprint for the record, and as text for people."""

from __future__ import annotations

import ast
import json
import tomllib
from collections import Counter
from dataclasses import dataclass

from buildtools.census import Reader
from buildtools.leans import Lean
from buildtools.statements import (
    bindings,
    first_line,
    mentions,
    parameter,
    places,
    statements,
)
from buildtools.symbols import Module, Sources, fingerprint, header, split_symbol


@dataclass(frozen=True)
class Evidence:
    """What a tree has of one symbol or reader.

    Attributes:
        fingerprint: changes if anything that counts does.
        shown: source, for a comparison side by side.
        path: file it stands in.
        line: where it starts.
    """

    fingerprint: str
    shown: str
    path: str
    line: int


def evidence_of_lean(lean: Lean, sources: Sources) -> Evidence | None:
    """Return what ``sources`` has of a symbol that is leaned on, or None if it has none of it."""
    symbol, at, names = lean.symbol.partition("@")
    path, qualname = split_symbol(symbol)
    module = sources.module(path)
    if at and module is not None:
        return _part_of(lean, [name for name in names.split(",") if name], module)
    if at and path.endswith(".toml") and path in sources:
        return _keys_of(path, names.split(","), sources[path])
    print_ = sources.fingerprint(symbol)
    if print_ is None:
        return None
    line = module.line(qualname) if module else 1
    return Evidence(print_, sources.source(symbol) or "", path, line)


def _part_of(lean: Lean, names: list[str], module: Module) -> Evidence | None:
    path, qualname = split_symbol(lean.symbol.partition("@")[0])
    definitions = module.parts(qualname)
    if not definitions:
        return None
    texts: list[str] = []
    shown: list[str] = []
    gaps = Counter(place.text for definition in definitions for place in places(definition))
    for hook in lean.hooks:
        for place in hook.places:
            texts.append(f"{gaps[place.text]} times {place.text}")
            times = {0: "is nowhere", 1: "is here"}.get(gaps[place.text], "is in several places")
            shown.append(f"# the place of the hook {times}:\n{place.shown}")
    for definition in definitions:
        if isinstance(definition, ast.ClassDef):
            texts.append(header(definition))
            shown.append(first_line(definition))
        leaving = [
            each
            for each in statements(definition, into_definitions=False)
            if isinstance(each.node, ast.Return)
        ]
        texts += [each.text for each in leaving]
        shown += ["# where it is left:", *(each.shown for each in leaving)] if leaving else []
    reads = sorted({name for hook in lean.hooks for name in hook.reads})
    for definition in definitions:
        for name in reads:
            argument = parameter(definition, name)
            bound = bindings(definition, name)
            if argument or bound:
                texts += [f"{name}: {argument}", *(each.text for each in bound)]
                shown += [f"# where {name}, which the hook reads, comes from:"]
                shown += [f"parameter {name}"] if argument else []
                shown += [each.shown for each in bound]
        if names:
            named = mentions(definition, names)
            texts += [each.text for each in named]
            shown += [f"# statements that name {', '.join(names)}:", *(s.shown for s in named)]
    return Evidence(fingerprint(texts), "\n".join(shown), path, module.line(qualname))


def _keys_of(path: str, keys: list[str], content: bytes) -> Evidence:
    """Return the values of dotted keys of a TOML file; a table stands for all that is in it."""
    document = tomllib.loads(content.decode())
    shown = []
    for dotted in keys:
        value: object = document
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        shown.append(f"{dotted} = {json.dumps(value, indent=1, sort_keys=True)}")
    return Evidence(fingerprint(shown), "\n".join(shown), path, 1)


def evidence_of_reader(reader: Reader) -> Evidence:
    """Return what counts of a reader."""
    return Evidence(
        fingerprint=fingerprint(
            [*reader.touches, *reader.signature, *(each.text for each in reader.statements)]
        ),
        shown="\n".join(each.shown for each in reader.statements),
        path=split_symbol(reader.symbol)[0],
        line=reader.line,
    )
