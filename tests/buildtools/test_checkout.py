"""The doctor says whether an intact build is this checkout's, where there is a checkout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildtools.checkout import Checkout, compared
from buildtools.console import BuildError
from buildtools.doctor import Report, Verdict, inspect_wheel
from buildtools.image import pack_tool
from buildtools.paths import OVERLAY, PATCHES, UPSTREAM_TOML
from tests.buildtools.command import build_py, run
from tests.buildtools.installation import Installation, another_build
from tests.buildtools.toy import write_files

OLD_TREE = "0" * 40


def _older(manifest: dict[str, Any]) -> None:
    """Make a manifest that of an older build of the same version: one patch less, one other."""
    manifest["trees"]["assembled"] = OLD_TREE
    names = list(manifest["series"])
    del manifest["series"][names[-1]]
    manifest["series"][names[0]] = "0" * 64
    manifest["overlay"]["megatron/core/gone.py"] = "0" * 40


@pytest.fixture
def here() -> Checkout:
    return Checkout.read(UPSTREAM_TOML, PATCHES, OVERLAY)


@pytest.fixture
def older(wheel: Path, tmp_path: Path) -> Path:
    return another_build(wheel, tmp_path / "older", _older)


def test_an_older_installation_of_the_same_version_is_loud(
    tmp_path: Path, older: Path, build_python: Path, here: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    installation = Installation(tmp_path / "env")
    installation.install(older, build_python)
    assert installation.verdict()[0] is Verdict.VERIFIED, "it is intact"

    done = build_py("doctor", "--installed", "--python", installation.python)

    assert done.returncode == 6, done.stdout + done.stderr
    assert "VERIFIED" not in done.stdout
    names = list(here.series)
    for part in (
        "ANOTHER BUILD: all ",
        f"found     {here.label}, tree {OLD_TREE}\n",
        f"checkout  {here.label}, tree {here.tree} ",
        f"patches   differ: {names[0]}\n",
        f"patches   only here: {names[-1]}\n",
        "overlay   only found: gone.py\n",
        f"build.py wheel, then {installation.python} -m pip install --no-deps --force-reinstall",
    ):
        assert part in done.stdout


def test_a_verifier_without_a_checkout_says_what_it_can(
    tmp_path: Path, older: Path, build_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    installation = Installation(tmp_path / "env")
    installation.install(older, build_python)
    pack_tool(tmp_path / "megatron-nvme")

    done = run(installation.python, str(tmp_path / "megatron-nvme"), "doctor")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nVERIFIED: all " in done.stdout


def test_a_wheel_is_compared_too(older: Path, wheel: Path) -> None:
    same, other = build_py("doctor", str(wheel)), build_py("doctor", str(older))

    assert same.returncode == 0
    assert same.stdout.splitlines()[-1].endswith("as built, and it is this checkout's build")
    assert other.returncode == 6
    assert "ANOTHER BUILD" in other.stdout and "build.py wheel" in other.stdout


@pytest.mark.parametrize(
    "change",
    [
        lambda here: replace(here, tree=OLD_TREE),
        lambda here: replace(here, overlay=here.overlay | {"megatron/core/new.py": "0" * 40}),
    ],
    ids=["another_lock", "overlay_changed_since_the_lock"],
)
def test_what_counts_is_the_lock_and_the_overlay(
    wheel: Path, here: Checkout, change: Callable[[Checkout], Checkout]
) -> None:
    found = inspect_wheel(wheel)

    assert compared(found, here, "do").verdict is Verdict.VERIFIED
    assert compared(found, change(here), "do").verdict is Verdict.ANOTHER_BUILD


def test_a_checkout_that_cannot_be_read_vouches_for_nothing(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        Checkout.read(tmp_path / "none.toml", PATCHES, OVERLAY)

    report = compared(inspect_wheel(wheel), caught.value, "do")

    assert report.verdict is Verdict.ANOTHER_BUILD
    assert report.lines[-1].startswith("NOT COMPARED: all ")
    assert "cannot read the pin" in report.lines[-1]


def test_a_series_without_its_patches_cannot_be_read(tmp_path: Path) -> None:
    write_files(tmp_path, {"series": "0001-a.patch\n"})

    with pytest.raises(BuildError, match="cannot read the series"):
        Checkout.read(UPSTREAM_TOML, tmp_path, OVERLAY)


def test_many_differences_are_a_line(wheel: Path, here: Checkout) -> None:
    found = inspect_wheel(wheel)
    bare = replace(here, tree=OLD_TREE, series={}, overlay={})

    lines = compared(found, bare, "do").lines

    (line,) = [line for line in lines if line.startswith("  overlay   only found: ")]
    assert line.endswith(f", and {len(here.overlay) - 6} more")


def test_what_is_not_intact_keeps_its_verdict(here: Checkout) -> None:
    damaged = Report(Verdict.DAMAGED, ["DAMAGED: x"])

    assert compared(damaged, here, "do") is damaged


def test_an_image_of_another_build_is_warned_of(older: Path, tmp_path: Path) -> None:
    """`image --wheel` takes what it is given: somebody chose it, but may not know what it is."""
    write_files(tmp_path / "bin", {"docker": f"#!{sys.executable}\nimport sys\n"
                "sys.exit(sys.argv[1] != 'version')\n"})  # fmt: skip
    (tmp_path / "bin" / "docker").chmod(0o755)

    done = build_py("image", "--engine", "docker", "--dry-run", "--wheel", str(older),
                    PATH=str(tmp_path / "bin"))  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert f"warning: --wheel {older}:" in done.stderr
    assert "ANOTHER BUILD" in done.stderr and "leave out --wheel" in done.stderr
