"""Modules of the store import downwards only, and Megatron is imported by the adapters alone."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core.optimizer.nvme_state_store import errors

PACKAGE = Path(errors.__file__).parent

RANKS = [
    {"errors", "formats"},
    {"system_calls", "memory", "page_cache", "filesystems"},
    {"config", "layout"},
    {"budgets", "placement"},
    {"descriptors", "pinned"},
    {"state_file", "rank_directory"},
    {"io_request", "direct_io"},
    {"io_engine"},
    {"homes", "staging"},
    {"encoding", "fingerprint", "agreement"},
    {"optimizer_state"},
    {"bucket_optimizer"},
    {"report", "progress"},
    {"timeline", "metrics"},
    {"pipeline"},
    {"working_set"},
    {"checkpoint"},
    {"model_shards", "resident"},
    {"casting"},
    {"bucket_work"},
    {"store"},
    {"plan", "probe"},
    {"commands"},
    {"__main__"},
]
"""As the package's docstring has them: each imports from the ranks before its own."""
PLAN_RANKS = [
    {"architecture", "machine", "rates"},
    {"megatron_names"},
    {"megatron_words", "hf"},
    {"megatron", "model"},
    {"ranks"},
    {"splits", "memory"},
    {"step_time"},
    {"choices"},
    {"advice", "figure"},
    {"text", "arguments"},
    {"command"},
]
"""Those of the package `plan`, as its docstring has them."""
LEAVES = {"deferral"}
"""Imports nothing of the store."""
ADAPTERS = {
    *("streamed_optimizer", "distributed_optimizer", "float16_optimizer", "layer_wise_optimizer"),
    *("chained_optimizer", "quantised_params", "checkpoint_hooks", "arguments"),
}
"""May import everything, Megatron too."""
WITHOUT_TORCH = {
    *(
        "errors",
        "formats",
        "config",
        "layout",
        "budgets",
        "placement",
        "report",
        "progress",
        "metrics",
    ),
    *("system_calls", "memory", "page_cache", "filesystems", "descriptors", "state_file"),
    *("rank_directory", "io_request", "io_engine", "direct_io", "checkpoint"),
    *("plan", "probe", "commands", "__main__", "arguments"),
}
"""Standard library only: argument parsing and tools do not pay for torch."""


def imports(name: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (level, module, names) of every import statement, also inside functions.

    Args:
        name: of a module; one of a package below is ``package.module``.
    """
    path = PACKAGE.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, []


def siblings(name: str, level: int = 1) -> set[str]:
    """Return the modules that a module imports from its own package, or from the one above."""
    found = set()
    for at, module, names in imports(name):
        if at == level:
            found |= {module.split(".")[0]} if module else set(names)
    return found


MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
PACKAGES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
OF_PLAN = sorted(path.stem for path in PACKAGE.glob("plan/*.py") if path.stem != "__init__")
ALL = [*MODULES, *(f"plan.{name}" for name in OF_PLAN)]


def test_every_module_has_a_rank() -> None:
    """A new module must say where it belongs, and has one place."""
    ranked = [name for names in (*RANKS, LEAVES, ADAPTERS) for name in names]
    assert sorted(ranked) == sorted([*MODULES, *PACKAGES])
    assert PACKAGES == ["plan"], "another package needs ranks of its own"
    assert sorted(name for names in PLAN_RANKS for name in names) == OF_PLAN


def documentation(name: str) -> str:
    """Return the docstring of a package; the store's own has no name."""
    found = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "ranks"), [("", RANKS), ("plan", PLAN_RANKS)])
def test_the_docstring_of_a_package_lists_the_modules_in_this_order(
    name: str, ranks: list[set[str]]
) -> None:
    """Each once, a rank's beside each other."""
    rows = re.findall(r"^    (\w.*?)(?:  |$)", documentation(name), re.MULTILINE)
    listed = [module for row in rows for module in re.split(r", ?", row) if module]

    expected = [names.copy() for names in ranks]
    for module in listed:
        expected[0].remove(module)
        if not expected[0]:
            del expected[0]
    assert not expected


def test_the_docstring_names_those_without_a_rank_below() -> None:
    text = documentation("")
    below = set(re.findall(r"\w+", text[text.index("Beside them") :]))
    assert below & set(MODULES) == LEAVES | ADAPTERS


@pytest.mark.parametrize("name", sorted(set().union(*RANKS) - set(PACKAGES)))
def test_a_module_imports_from_the_ranks_above_only(name: str) -> None:
    """No cycle, and nobody knows its users."""
    (rank,) = (number for number, names in enumerate(RANKS) if name in names)
    assert siblings(name) <= set().union(*RANKS[:rank])


@pytest.mark.parametrize("name", sorted(set().union(*PLAN_RANKS)))
def test_a_module_of_plan_imports_from_the_ranks_above_only(name: str) -> None:
    """Of its own package, and of the store what ranks above plan."""
    (rank,) = (number for number, names in enumerate(PLAN_RANKS) if name in names)
    assert siblings(f"plan.{name}") <= set().union(*PLAN_RANKS[:rank])
    (above,) = (number for number, names in enumerate(RANKS) if "plan" in names)
    assert siblings(f"plan.{name}", level=2) <= set().union(*RANKS[:above])


@pytest.mark.parametrize("name", sorted(set(ALL) - ADAPTERS))
def test_only_adapters_import_megatron(name: str) -> None:
    """The store works for whoever has tensors and process groups."""
    for level, module, _ in imports(name):
        assert level <= 1 + name.count("."), f"{name} imports from above the package"
        assert level or not module.startswith("megatron"), f"{name} imports {module}"


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_a_leaf_imports_nothing_of_the_store(name: str) -> None:
    """A hook of upstream's pays only for it."""
    assert siblings(name) == set()


@pytest.mark.parametrize("name", sorted({*WITHOUT_TORCH, *(set(ALL) - set(MODULES))} - {"plan"}))
def test_a_module_without_tensors_needs_the_standard_library_alone(name: str) -> None:
    """And modules like it."""
    depth = 1 + name.count(".")
    for level, module, _ in imports(name):
        assert level or module.split(".")[0] in sys.stdlib_module_names, module
    assert siblings(name, depth) <= WITHOUT_TORCH


@pytest.mark.parametrize("name", ["__init__", "plan"])
def test_a_package_itself_imports_nothing(name: str) -> None:
    """So its docstring promises."""
    assert list(imports(name)) == []
