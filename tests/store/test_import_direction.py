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
    {"store"},
    {"plan_architecture"},
    {"plan_hf", "plan_megatron", "plan_model"},
    {"plan_ranks"},
    {"plan_memory"},
    {"plan_time"},
    {"plan_choices"},
    {"plan_text", "plan_figure"},
    {"plan", "probe"},
    {"__main__"},
]
"""As the package's docstring has them: each imports from the ranks before its own."""
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
    *("plan_architecture", "plan_hf", "plan_megatron", "plan_model", "plan_ranks", "plan_memory"),
    *("plan_time", "plan_choices", "plan_text", "plan_figure", "plan"),
    *("probe", "__main__", "arguments"),
}
"""Standard library only: argument parsing and tools do not pay for torch."""


def imports(name: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (level, module, names) of every import statement, also inside functions."""
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, []


def siblings(name: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    found = set()
    for level, module, names in imports(name):
        if level == 1:
            found |= {module.split(".")[0]} if module else set(names)
    return found


MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def test_every_module_has_a_rank() -> None:
    """A new module must say where it belongs, and has one place."""
    ranked = [name for names in (*RANKS, LEAVES, ADAPTERS) for name in names]
    assert sorted(ranked) == MODULES


def test_the_docstring_of_the_package_lists_the_modules_in_this_order() -> None:
    """Each once, a rank's beside each other; those without a rank are named below."""
    documentation = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text()))
    assert documentation is not None
    rows = re.findall(r"^    (\w.*?)(?:  |$)", documentation, re.MULTILINE)
    listed = [name for row in rows for name in re.split(r", ?", row) if name]

    expected = [names.copy() for names in RANKS]
    for name in listed:
        expected[0].remove(name)
        if not expected[0]:
            del expected[0]
    assert not expected
    below = set(re.findall(r"\w+", documentation[documentation.index("Beside them") :]))
    assert below & set(MODULES) == LEAVES | ADAPTERS


@pytest.mark.parametrize("name", sorted(set().union(*RANKS)))
def test_a_module_imports_from_the_ranks_above_only(name: str) -> None:
    """No cycle, and nobody knows its users."""
    (rank,) = (number for number, names in enumerate(RANKS) if name in names)
    assert siblings(name) <= set().union(*RANKS[:rank])


@pytest.mark.parametrize("name", sorted(set(MODULES) - ADAPTERS))
def test_only_adapters_import_megatron(name: str) -> None:
    """The store works for whoever has tensors and process groups."""
    for level, module, _ in imports(name):
        assert level <= 1, f"{name} imports from above the package"
        assert not module.startswith("megatron"), f"{name} imports {module}"


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_a_leaf_imports_nothing_of_the_store(name: str) -> None:
    """A hook of upstream's pays only for it."""
    assert siblings(name) == set()


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_a_module_without_tensors_needs_the_standard_library_alone(name: str) -> None:
    """And modules like it."""
    for level, module, _ in imports(name):
        assert level == 1 or module.split(".")[0] in sys.stdlib_module_names, module
    assert siblings(name) <= WITHOUT_TORCH


def test_the_package_itself_imports_nothing() -> None:
    """So its docstring promises."""
    assert list(imports("__init__")) == []
