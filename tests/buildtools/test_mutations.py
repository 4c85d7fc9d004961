"""Every tripwire and every reader of the real record trips on a mutated upstream, by its name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import pytest

from buildtools.census import readers
from buildtools.check import RECORD
from buildtools.evidence import evidence_of_lean, evidence_of_reader
from buildtools.paths import PATCHES
from buildtools.project import project_recipe
from buildtools.record import Entry, read_record
from buildtools.statements import Hook, first_line, mentions, statements
from buildtools.symbols import Function, Module, Sources, split_symbol
from buildtools.watch import Watch
from tests.buildtools import mutants

ENTRIES = read_record(PATCHES / RECORD)
SYMBOLS = [entry for (kind, _), entry in ENTRIES.items() if kind == "symbol"]
READERS = [entry for (kind, _), entry in ENTRIES.items() if kind == "reader"]


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch(project_recipe("index", offline=False), PATCHES / RECORD)


def _module(watch: Watch, path: str) -> Module:
    module = watch.pristine.module(path)
    assert module is not None
    return module


def _only(path: str, content: bytes) -> Sources:
    """The mutated file alone: the others are as they were."""
    return Sources({path: content})


def _of_symbol(watch: Watch, name: str, path: str, content: bytes) -> str | None:
    found = evidence_of_lean(watch.leans[name], _only(path, content))
    return found.fingerprint if found else None


def test_the_record_holds_for_what_is_pinned(watch: Watch) -> None:
    """So that every difference below is the mutation's."""
    assert watch.findings(watch.pristine) == []
    assert len(SYMBOLS) > 60
    assert len(READERS) > 100


@pytest.mark.parametrize(
    "entry", [each for each in SYMBOLS if "@" not in each.name], ids=lambda entry: entry.name
)
def test_a_symbol_that_is_leaned_on_trips(entry: Entry, watch: Watch) -> None:
    path, qualname = split_symbol(entry.name)
    module = _module(watch, path)
    tried = 0
    for title, mutate in mutants.SYMBOL_MUTATIONS.items():
        mutant = mutate(module, qualname)
        if mutant is not None:
            tried += 1
            print_ = _of_symbol(watch, entry.name, path, mutant)
            assert print_ != entry.fingerprint, title
            if module.definitions.get(qualname):
                assert (print_ is None) == (title == "gone"), title
    assert tried >= (4 if mutants.order_swapped(module, qualname) else 1)


@pytest.mark.parametrize(
    "entry",
    [each for each in SYMBOLS if "@" in each.name and ".py" in each.name],
    ids=lambda entry: entry.name.partition("@")[0],
)
def test_what_stands_around_a_hook_trips(entry: Entry, watch: Watch) -> None:
    """A statement in its place, the names it reads, the order of those it must stand between."""
    path, qualname = split_symbol(entry.name.partition("@")[0])
    module = _module(watch, path)
    hooks = watch.leans[entry.name].hooks
    names = [name for name in entry.name.partition("@")[2].split(",") if name]
    tripping = {
        mutant
        for mutant in _without_one(module, qualname, hooks, names)
        if _of_symbol(watch, entry.name, path, mutant) != entry.fingerprint
    }
    assert len(tripping) >= 2 * len(hooks) + bool(names), "a neighbour may go unnoticed"
    assert gone_is_noticed(watch, entry, module, path, qualname)
    node = module.parts(qualname)[0]
    if isinstance(node, Function):
        early = mutants.insert_before(module.content, node.body[0], "if mutated: return None")
        assert early is not None
        assert _of_symbol(watch, entry.name, path, early) != entry.fingerprint, "an early return"
    if isinstance(node, ast.ClassDef):
        wrapped = mutants.insert_before(module.content, node, "@mutated")
        assert wrapped is not None
        assert _of_symbol(watch, entry.name, path, wrapped) != entry.fingerprint, "a decorator"


def _without_one(
    module: Module, qualname: str, hooks: list[Hook], names: list[str]
) -> Iterator[bytes]:
    """Yield the file without one of the statements next to the hooks, or that names ``names``."""
    next_to = {line for hook in hooks for place in hook.places for line in place.shown.splitlines()}
    for definition in module.parts(qualname):
        named = [each.node for each in mentions(definition, names)]
        for statement in statements(definition):
            node = statement.node
            if node in named or first_line(node).splitlines()[0] in next_to:
                mutant = mutants.without(module.content, node)
                if mutant is not None:
                    yield mutant


def gone_is_noticed(watch: Watch, entry: Entry, module: Module, path: str, qualname: str) -> bool:
    mutant = mutants.gone(module, qualname)
    return mutant is None or _of_symbol(watch, entry.name, path, mutant) is None


@pytest.mark.parametrize("entry", [each for each in SYMBOLS if ".toml" in each.name])
def test_a_key_of_the_build_configuration_trips(entry: Entry, watch: Watch) -> None:
    path, keys = entry.name.split("@")
    text = watch.pristine[path].decode()
    edits = {
        "build-system": ("setuptools", "setuptoolz"),
        "tool.setuptools": ("[tool.setuptools.packages.find]\n", "[tool.setuptools.other]\n"),
        "project.license": ('license = { text = "Apache 2.0" }', 'license = { text = "other" }'),
        "project.license-files": ("[project]\n", '[project]\nlicense-files = ["x"]\n'),
        "project.classifiers": ("License :: OSI Approved", "License :: Other"),
        "project.dependencies": ('"packaging>=24.2"]', '"packaging>=25"]'),
        "project.requires-python": ('requires-python = ">=3.12"', 'requires-python = ">=3.13"'),
    }
    for key in keys.split(","):
        old, new = edits[key]
        assert old in text, key
        mutant = text.replace(old, new).encode()
        assert _of_symbol(watch, entry.name, path, mutant) != entry.fingerprint, key


@functools.cache
def _readers_of(path: str, content: bytes) -> dict[str, str]:
    found = readers(_only(path, content))
    return {name: evidence_of_reader(reader).fingerprint for name, reader in found.items()}


@pytest.mark.parametrize("entry", READERS, ids=lambda entry: entry.name)
def test_a_changed_reader_trips(entry: Entry, watch: Watch) -> None:
    """One that reads more, and one that lost a condition it is under."""
    path, _ = split_symbol(entry.name)
    module = _module(watch, path)
    reader = readers(_only(path, module.content))[entry.name]
    nodes = [statement.node for statement in reader.statements]
    mutant = mutants.reads_more(module, nodes)
    assert mutant is not None
    assert _readers_of(path, mutant).get(entry.name) != entry.fingerprint
    for mutant in list(mutants.guards_removed(module, nodes))[:2]:
        assert _readers_of(path, mutant).get(entry.name) != entry.fingerprint, "guard removed"


@pytest.mark.parametrize("path", sorted({split_symbol(entry.name)[0] for entry in READERS}))
def test_a_new_reader_is_found_with_file_and_line(path: str, watch: Watch) -> None:
    module = _module(watch, path)
    mutant = module.content + mutants.NEW_READER.encode()
    found = readers(_only(path, mutant))
    new = set(found) - {entry.name for entry in READERS}
    assert new == {f"{path}::mutated_reader"}
    line = found[f"{path}::mutated_reader"].line
    assert "optimizer.param_groups" in mutant.decode().splitlines()[line - 1]


def test_a_new_reader_in_a_new_file_is_found(watch: Watch) -> None:
    path = "megatron/core/new_feature.py"
    found = watch.findings(Sources({**watch.pristine, path: mutants.NEW_READER.encode()}))
    (finding,) = found
    assert (finding.kind, finding.what) == ("reader", "new")
    assert finding.where == f"{path}:4"
    assert finding.name == f"{path}::mutated_reader"
