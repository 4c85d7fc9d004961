"""The overlay adds files and never hides one; a file the wheel would leave out is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildtools.console import BuildError
from buildtools.overlay import collisions, overlay_files
from tests.buildtools.toy import OPTIMIZER, Toy, write_files


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (OPTIMIZER, f"{OPTIMIZER}: upstream has {OPTIMIZER}"),
        ("megatron/core/Optimizer.py", f"megatron/core/Optimizer.py: upstream has {OPTIMIZER}"),
        (f"{OPTIMIZER}/inner.py", f"{OPTIMIZER}/inner.py: upstream has a file {OPTIMIZER}"),
        ("megatron/core/optimizer/__init__.py", f"would hide upstream's module {OPTIMIZER}"),
        ("megatron/core/empty.py", "upstream has a package of that name, which would hide it"),
    ],
)
def test_a_collision_with_upstream_is_refused(toy: Toy, path: str, message: str) -> None:
    write_files(toy.overlay, {path: "x = 1\n"})

    with pytest.raises(BuildError) as caught:
        toy.assemble()

    assert message in str(caught.value)
    assert not toy.tree.exists()


def test_a_file_in_the_place_of_an_upstream_directory_is_refused(toy: Toy, tmp_path: Path) -> None:
    write_files(tmp_path, {"megatron/core/package.py/inner.py": ""})

    assert collisions(["megatron/core/package.py"], tmp_path) == [
        "megatron/core/package.py: upstream has a directory of that name"
    ]


@pytest.mark.parametrize(
    "path",
    [
        "megatron/core/extra/kernel.cu",
        "megatron/core/extra/table.json",
        "megatron/core/extra/store.py.orig",
        "megatron/legacy/old.py",
        "megatron/new.py",
        "tools/run.py",
        "setup.cfg",
        "licenses/deep/LICENSE",
    ],
)
def test_a_file_that_the_wheel_would_leave_out_is_noticed(toy: Toy, path: str) -> None:
    write_files(toy.overlay, {path: "x\n"})

    with pytest.raises(BuildError, match="the wheel would leave out") as caught:
        toy.assemble()

    assert f"  {path}" in str(caught.value)


def test_a_link_in_the_overlay_is_refused(toy: Toy) -> None:
    (toy.overlay / "megatron/core/extra/link.py").symlink_to("store.py")

    with pytest.raises(BuildError, match=r"link\.py is neither a file nor a directory"):
        toy.assemble()


def test_caches_are_no_part_of_the_overlay(toy: Toy) -> None:
    write_files(toy.overlay, {"megatron/core/extra/__pycache__/store.cpython-312.pyc": "x"})

    assert overlay_files(toy.overlay) == ["megatron/core/extra/store.py"]
    assert toy.assemble() == toy.pin.lock
