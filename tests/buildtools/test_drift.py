"""`check --tree`, `drift` and `ci/drift`: what another upstream would break, by name."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from buildtools.paths import PATCHES, ROOT, cache_dir
from buildtools.project import project_recipe
from buildtools.series import load_patches
from buildtools.upstream import cached_sdist, fetch
from tests.buildtools.command import build_py, run

NUM_PATCHES = len(load_patches(PATCHES))
INFO = "megatron/core/package_info.py"
DATASETS = "megatron/core/datasets/utils.py"
NORM = "megatron/training/utils/common_utils.py"
MIMO = "megatron/core/models/mimo/optimizer.py"
OPTIMIZER = "megatron/core/optimizer/optimizer.py"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the pinned release."""
    recipe = project_recipe("index", offline=False)
    tree = tmp_path_factory.mktemp("pristine") / "tree"
    fetch(recipe.pin, recipe.source, tree, recipe.cache, recipe.download)
    return tree


@pytest.fixture
def upstream(pristine: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes another upstream: (path, old text, new text), ..."""

    def make(*edits: tuple[str, str, str]) -> Path:
        tree = shutil.copytree(pristine, tmp_path / "upstream")
        for path, old, new in edits:
            text = (tree / path).read_text()
            assert old in text, (path, old)
            (tree / path).write_text(text.replace(old, new, 1))
        return tree

    return make


def test_the_pinned_tree_passes(pristine: Path) -> None:
    done = build_py("check", "--tree", str(pristine))

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| 0.19.2 (pinned) | {NUM_PATCHES} unchanged | - | - | - | - | no |" in done.stdout


def test_a_cosmetic_edit_trips_the_blob_alone(upstream: Callable[..., Path]) -> None:
    tree = upstream((DATASETS, "def compile_helpers():", "# a comment\ndef compile_helpers():"))

    done = build_py("check", "--tree", str(tree))
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("|")]
    assert done.returncode == 1
    assert len(lines) == 1, done.stdout
    assert lines[0].startswith(f"{DATASETS}: cosmetic: blob ")


def test_every_kind_of_drift_is_named(upstream: Callable[..., Path]) -> None:
    """A body changed, a symbol gone, a new reader, a conflict, a taken place."""
    store = "megatron/core/optimizer/nvme_state_store/store.py"
    tree = upstream(
        (OPTIMIZER, "    def _split_state_dict(", "    def _divide_state_dict("),
        (NORM, "def calc_params_l2_norm(", "def calc_params_norm("),
        (NORM, "return param.main_param, True", "return param.main_param.float(), True"),
        (MIMO, "def get_mimo", "def peek(p):\n    return p.main_param\n\n\ndef get_mimo"),
    )
    (tree / store).parent.mkdir()
    (tree / store).write_text("x = 1\n")

    done = build_py("check", "--tree", str(tree))
    assert done.returncode == 1
    for expected in (
        "0010-training-take-the-norm-of-streamed-main-params.patch: conflict",
        f"symbol gone: {OPTIMIZER}::ChainedOptimizer._split_state_dict",
        f"symbol gone: {NORM}::calc_params_l2_norm",
        f"symbol changed: {NORM}::_get_param_data",
        f"reader of main params or optimizer state new: {MIMO}::peek",
        f"{store}",
        "leaned on by: 0007, megatron/core/optimizer/nvme_state_store/chained_optimizer.py",
        "| 1 collisions | yes |",
    ):
        assert expected in done.stdout, done.stdout[-3000:]
    assert f"{MIMO}:{_line(tree / MIMO, 'return p.main_param')}: reader" in done.stdout


def _line(path: Path, text: str) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--tree", "/no/such/tree"], "expected a version like"),
        (["drift", "--latest", "--offline"], "leave out --offline"),
        (["drift", "--against", "0.19.0", "--report", "x.txt"], "--report x.txt"),
        (["drift", "--against", "0.0.7", "--offline"], "0.0.7 is not in [releases]"),
    ],
)
def test_what_cannot_be_looked_at_is_an_error(arguments: list[str], message: str) -> None:
    done = build_py(*arguments)

    assert done.returncode == 1
    assert message in done.stderr


@pytest.fixture
def index(tmp_path: Path, pristine: Path) -> Callable[..., dict[str, str]]:
    """Return a function that publishes releases on an index of our own: version=edits, ..."""

    def publish(**releases: list[tuple[str, str, str]]) -> dict[str, str]:
        recipe = project_recipe("index", offline=False)
        simple = tmp_path / "simple" / "megatron-core"
        simple.mkdir(parents=True)
        cache = tmp_path / "cache"
        pinned = cached_sdist(recipe.pin, recipe.cache, recipe.download)
        kept = cache / pinned.relative_to(cache_dir())
        kept.parent.mkdir(parents=True)
        shutil.copyfile(pinned, kept)
        shutil.copyfile(pinned, simple / pinned.name)
        for underscored, edits in releases.items():
            version = underscored.removeprefix("v").replace("_", ".")
            _write_sdist(pristine, tmp_path / version, version, edits, simple)
        links = "".join(f'<a href="{path.name}">x</a>\n' for path in simple.glob("*.tar.gz"))
        (simple / "index.html").write_text(f"<html><body>{links}</body></html>")
        return {
            "PIP_INDEX_URL": (tmp_path / "simple").as_uri(),
            "PIP_CONFIG_FILE": os.devnull,
            "MEGATRON_NVME_CACHE": str(cache),
        }

    return publish


def _write_sdist(
    pristine: Path, work: Path, version: str, edits: list[tuple[str, str, str]], out: Path
) -> None:
    top = f"megatron_core-{version}"
    tree = shutil.copytree(pristine, work / top)
    _, minor, patch = version.split(".")
    for path, old, new in [
        (INFO, "MINOR = 19", f"MINOR = {minor}"),
        (INFO, "PATCH = 2", f"PATCH = {patch}"),
        *edits,
    ]:
        text = (tree / path).read_text()
        assert old in text, (path, old)
        (tree / path).write_text(text.replace(old, new, 1))
    metadata = f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n"
    (tree / "PKG-INFO").write_text(metadata)
    with tarfile.open(out / f"{top}.tar.gz", "w:gz") as tar:
        tar.add(tree, top)


def test_the_newest_release_is_found_and_needs_no_work(
    index: Callable[..., dict[str, str]],
) -> None:
    environment = index(v0_19_3=[], v0_9_9=[])

    done = run(str(ROOT / "ci" / "drift"), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| 0.19.3 | {NUM_PATCHES} unchanged | 1 changed | - | - | - | no |" in done.stdout


def test_a_release_that_needs_work_fails_ci(index: Callable[..., dict[str, str]]) -> None:
    environment = index(
        v0_20_0=[(OPTIMIZER, "    def _split_state_dict(", "    def _divide_state_dict(")]
    )

    done = run(str(ROOT / "ci" / "drift"), **environment)
    assert done.returncode == 1
    assert f"symbol gone: {OPTIMIZER}::ChainedOptimizer._split_state_dict" in done.stdout
    assert "| 0.20.0 |" in done.stdout


def test_the_table_in_the_documentation_is_what_drift_says(tmp_path: Path) -> None:
    versions = ["0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2"]
    report = tmp_path / "drift.json"

    done = build_py("drift", "--against", *versions, "--report", str(report))
    assert done.returncode == 1, done.stderr
    rows = {row["version"]: row for row in json.loads(report.read_text())}
    assert [row["needs_work"] for row in rows.values()] == [True, True, True, False, False]
    for row in _table(done.stdout):
        assert row in (ROOT / "docs" / "rebasing.md").read_text(), "the table there is stale"


def _table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| 0.")]
