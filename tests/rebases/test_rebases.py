"""The series moved to other releases with `build.py rebase`, and what comes out trains as stock.

A directory beside this file holds what somebody had to decide on that release: for each patch that
conflicts, the patch as it has to be there. Its README.md is the log of how that was found.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from buildtools.apply import ENGINES
from buildtools.git import Git
from buildtools.patchfile import parse_patch
from buildtools.paths import PATCHES, ROOT, UPSTREAM_TOML, cache_dir
from buildtools.pin import read_pin
from buildtools.project import downloader, new_release_downloader, project_recipe
from buildtools.rebase import Finished, Rebase
from buildtools.releases import Shop
from buildtools.report import ADAPTED, REPLACED, UNCHANGED, Report
from buildtools.series import load_patches, parse_header
from buildtools.tree import assemble
from buildtools.workspace import Workspace
from tests.megatron_site import make_site, run_pytest

HERE = Path(__file__).parent

PARITY = "tests/patched/test_streaming_parity.py"
RESUMED = f"{PARITY}::test_streamed_run_equals_the_stock_run[dp2-one-bucket]"
HEADERS = [parse_header(patch.message) for patch in load_patches(PATCHES)]
NODES = [
    *(
        f"{PARITY}::test_streamed_run_equals_the_stock_run[{name}]"
        for name in ("tp2", "pp2", "overlapped", "fp16-overflow", "adam-replicated", "muon")
    ),
    RESUMED,
    f"{PARITY}::test_params_norm_is_that_of_the_stock_run[ep2-dp4]",
    *(header.trailers["Guard-Test"] for header in HEADERS if header.trailers["Reason"] == "hook"),
]
"""Parity and resume for kinds of parallelism and of optimizers, and the guard of every hook."""

_NORM = "0010-training-take-the-norm-of-streamed-main-params.patch: "
ATTENTION = {
    # There is no _get_param_data yet: its lines stand twice in the function that later calls it.
    "0.18.2": [
        f"{_NORM}megatron/training/utils/common_utils.py: a hunk of _get_param_data now lies in "
        "calc_params_l2_norm",
        f"{_NORM}the resolution left out +"
        f"{' ' * 20}# A streamed main param is on disk: one element, its norm, stands for it.",
        f"{_NORM}the resolution left out +"
        f"{' ' * 20}return getattr(param.main_param, 'nvme_l2_norm', param.main_param), True",
        f"{_NORM}the resolution left out +"
        f"{' ' * 12}return getattr(param.main_param, 'nvme_l2_norm', param.main_param), False",
    ],
    "0.19.0": [],
}
"""Release -> what the report of the rebase asks somebody to look at."""


@dataclass(frozen=True)
class Rebased:
    """The series on another release.

    Attributes:
        report: what became of each patch.
        tree: the assembled tree.
        epoch: time stamp for a wheel of it.
    """

    report: Report
    tree: Path
    epoch: int


def resolutions_of(version: str) -> dict[str, bytes]:
    """Return the recorded decisions: name of a patch -> the patch as it is on that release."""
    return {path.name: path.read_bytes() for path in (HERE / version).glob("*.patch")}


def rebase(version: str, resolutions: Mapping[str, bytes], clone: Path) -> Rebased:
    """Move the series to a release in the new directory ``clone``, as a user does in a clone.

    Where the rebase stops, the files in conflict are put back to what they are without the patch,
    and the recorded patch is applied to them.
    """
    clone.mkdir()
    shutil.copytree(PATCHES, clone / "patches")
    shutil.copyfile(UPSTREAM_TOML, clone / "upstream.toml")
    recipe = project_recipe("index", offline=False)
    workspace = Workspace(recipe, clone / "upstream.toml", clone / "patches", ROOT, clone / "work")
    this = Rebase(workspace)
    shop = Shop(cache_dir(), downloader(offline=False), new_release_downloader(offline=False))
    stops = []
    now = this.begin(version, shop, None)
    while not isinstance(now, Finished):
        stops.append(now.patch.name)
        resolution = parse_patch(now.patch.name, resolutions[now.patch.name])
        git = Git(now.tree)
        git.run("reset", "--quiet", "--hard")
        git.run("apply", "--index", "-", stdin=resolution.diff)
        now = this.go_on(None, None)
    assert sorted(stops) == sorted(resolutions), "a recorded patch is of no use, or there is none"
    assert now.report is not None
    moved = replace(
        recipe, pin=read_pin(workspace.pin_file), patches=load_patches(clone / "patches")
    )
    assemble(moved, ENGINES["git"](), clone / "tree", locked=False)
    return Rebased(now.report, clone / "tree", moved.pin.epoch)


@pytest.fixture(scope="module")
def rebased(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rebased]:
    """Move the series to a release with the recorded decisions, once."""

    @functools.cache
    def rebase_once(version: str) -> Rebased:
        base = tmp_path_factory.mktemp(version)
        return rebase(version, resolutions_of(version), base / "clone")

    return rebase_once


@pytest.fixture(scope="module")
def site(
    rebased: Callable[[str], Rebased], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Build and install the wheel of the rebased series, once."""

    @functools.cache
    def make_once(version: str) -> Path:
        moved = rebased(version)
        return make_site(moved.tree, tmp_path_factory.mktemp(f"site-{version}"), moved.epoch)

    return make_once


@pytest.mark.parametrize("version", ATTENTION)
def test_only_the_recorded_patches_need_a_decision(
    version: str, rebased: Callable[[str], Rebased]
) -> None:
    report = rebased(version).report

    by_hand = [patch.name for patch in report.patches if patch.fate == ADAPTED]
    assert sorted(by_hand) == sorted(resolutions_of(version))
    assert set(report.counts) <= {UNCHANGED, REPLACED, ADAPTED}
    assert report.attention == ATTENTION[version]


def results(nodes: list[str], site: Path, scratch: Path) -> tuple[dict[str, str], str]:
    """Run tests against a site: (node id -> "passed" or what went wrong, end of the output)."""
    session = run_pytest(nodes, scratch, site=site)
    found = {}
    for case in session.cases:
        path = case.get("classname", "").replace(".", "/") + ".py"
        problems = [problem.text or problem.tag for problem in case]
        found[f"{path}::{case.get('name')}"] = problems[0] if problems else "passed"
    return found, session.output


def imported_from(site: Path) -> str:
    """Return where Python finds Megatron with the site in front."""
    code = "import importlib.util as u; print(u.find_spec('megatron.core').origin)"
    environment = {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    return done.stdout.decode()


@pytest.mark.parametrize("version", ATTENTION)
def test_the_rebased_series_trains_as_stock(
    version: str, site: Callable[[str], Path], tmp_path: Path
) -> None:
    """Streamed is stock, bit for bit, on that release too, and each hook has its effect."""
    where = site(version)
    assert list(where.glob(f"megatron_core-{version}+nvme.*.dist-info"))
    assert imported_from(where).startswith(str(where))

    found, output = results(NODES, where, tmp_path)

    assert {node: result for node, result in found.items() if result != "passed"} == {}, output
    assert {node.partition("[")[0] for node in found} == {node.partition("[")[0] for node in NODES}
    assert len(found) >= len(NODES)


def test_a_resolution_without_the_load_hook_is_found(
    site: Callable[[str], Path], tmp_path: Path
) -> None:
    """A conflict resolved wrong: the hunk of `load_checkpoint` is forgotten."""
    resolutions = resolutions_of("0.18.2")
    name = "0008-checkpointing-save-and-load-streamed-optimizer-state.patch"
    head, mark, tail = resolutions[name].rpartition(b"@@ -")
    assert b"load_streamed_state" in tail and b"save_streamed_state" in head and mark
    wrong = rebase("0.18.2", resolutions | {name: head}, tmp_path / "clone")
    lost = "checkpoint_hooks.load_streamed_state(optimizer, checkpoint_name)"
    assert any(
        line.startswith(f"{name}: the resolution left out +") and line.endswith(lost)
        for line in wrong.report.attention
    )
    broken = shutil.copytree(site("0.18.2"), tmp_path / "site")
    checkpointing = Path("megatron", "training", "checkpointing.py")
    shutil.copyfile(wrong.tree / checkpointing, broken / checkpointing)

    found, output = results([RESUMED], broken, tmp_path)

    (result,) = found.values()
    assert "the state here 0: it was not loaded" in result, output
