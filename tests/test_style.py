"""The code keeps its own rules: ruff, mypy --strict, and which module may import what."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from buildtools.paths import ROOT

BUILDTOOLS = [
    {"console"},
    {"paths", "interpreter"},
    {"objects", "transaction"},
    {"archive", "git", "patchfile", "pin", "dropped", "series", "record", "report"},
    {"apply", "overlay", "upstream", "history", "replay", "symbols", "statements", "placement"},
    {"tree", "releases", "edition", "upstreamdiff", "carry"},
    {
        "environments",
        "containers",
        "manifest",
        "notice",
        "workspace",
        "edittree",
        "leans",
        "tokens",
        "census",
    },
    {"authoring", "rebasestate", "rebaseend", "rebase", "evidence", "tripwires", "watch"},
    {"check", "doctor", "checkout", "bake", "drift", "status", "wheel"},
    {"project", "image"},
    {"seriesverbs"},
    {"verbs"},
]
"""Modules of buildtools by rank: each imports from its own rank or those before it."""


@pytest.mark.parametrize(
    "command",
    [["ruff", "check"], ["ruff", "format", "--check", "--diff"], ["mypy"]],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_tool_is_content(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_buildtools_import_downwards_only() -> None:
    rank = {name: number for number, names in enumerate(BUILDTOOLS) for name in names}
    found = {path.stem for path in (ROOT / "buildtools").glob("*.py")} - {"__init__"}
    assert found == set(rank), "every module of buildtools has a rank"
    for name in found:
        module = ast.parse((ROOT / "buildtools" / f"{name}.py").read_text())
        for node in ast.walk(module):
            module_name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            package, _, imported_from = module_name.partition(".")
            if package != "buildtools" or not isinstance(node, ast.ImportFrom):
                continue
            for imported in [imported_from] if imported_from else [a.name for a in node.names]:
                assert rank[imported] <= rank[name], f"{name} imports {imported}"


def test_the_build_needs_only_the_standard_library() -> None:
    for path in [ROOT / "build.py", *(ROOT / "buildtools").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                top = module.split(".")[0]
                assert top in sys.stdlib_module_names or top == "buildtools", (path, module)
