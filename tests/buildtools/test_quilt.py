"""The series is a quilt series: plain quilt gives the same tree, without fuzz."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from buildtools.objects import entries_below, tree_id
from buildtools.paths import PATCHES
from buildtools.project import project_recipe
from buildtools.upstream import fetch


def test_quilt_applies_the_series_without_fuzz(tmp_path: Path) -> None:
    if shutil.which("quilt") is None:
        if os.environ.get("CI"):
            pytest.fail("quilt is not installed; .ci/run must install it")
        pytest.skip("quilt is not installed (Debian: apt-get install quilt)")
    recipe = project_recipe("index", offline=False)
    tree = tmp_path / "tree"
    fetch(recipe.pin, recipe.source, tree, recipe.cache, recipe.download)

    done = subprocess.run(
        ["quilt", "--quiltrc=-", "push", "-a", "--fuzz=0"],
        cwd=tree,
        env=os.environ | {"QUILT_PATCHES": str(PATCHES), "QUILT_PC": str(tmp_path / "pc")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "fuzz" not in done.stdout and "offset" not in done.stdout
    assert tree_id(entries_below(tree)) == recipe.pin.lock.patched
