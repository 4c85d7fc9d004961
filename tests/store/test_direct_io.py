"""Direct I/O is found by doing it; without it, `auto` is loud and `direct` refuses."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store.direct_io import choose_io, probe_direct_io

from buildtools.paths import WORK
from tests.store.failing_file import FailingLayer, missing_ability, small_tmpfs


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty directory on a real disk with direct I/O."""
    WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as scratch:
        reason = probe_direct_io(Path(scratch))
        if reason:
            missing_ability(f"no direct I/O: {reason}")
        yield Path(scratch)


@pytest.fixture
def layer() -> FailingLayer:
    return FailingLayer()


def test_it_is_used_where_it_works_and_leaves_nothing(disk: Path, layer: FailingLayer) -> None:
    assert probe_direct_io(disk, layer) == ""

    assert not list(disk.iterdir())
    assert layer.count["close"] == layer.count["open"] == 2
    assert choose_io("auto", disk) == choose_io("direct", disk) == (True, "")


def test_buffered_is_not_probed(tmp_path: Path) -> None:
    layer = FailingLayer()

    assert choose_io("buffered", tmp_path, layer) == (False, "")
    assert not layer.count


@pytest.mark.parametrize(
    ("call", "nth", "number"),
    [
        ("open", 2, errno.EINVAL),
        ("pwrite", 1, errno.EINVAL),
        ("pwrite", 3, errno.EINVAL),
        ("preadv", 1, errno.EINVAL),
        ("preadv", 3, errno.EIO),
        ("fdatasync", 1, errno.EIO),
    ],
)
def test_a_refusal_at_any_step_is_a_reason(
    call: str, nth: int, number: int, disk: Path, layer: FailingLayer
) -> None:
    layer.fail(call, number, nth=nth)

    reason = probe_direct_io(disk, layer)

    assert os.strerror(number) in reason
    operation = {"open": "open", "pwrite": "write", "preadv": "read", "fdatasync": "sync"}[call]
    assert f"{operation} failed" in reason
    assert not list(disk.iterdir())
    assert layer.count["close"] == layer.count["open"] - (call == "open")


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_other_bytes_are_a_reason(call: str, nth: int, disk: Path, layer: FailingLayer) -> None:
    """A flipped bit in any of the three transfers."""
    if call == "pwrite":
        layer.on(call, write_flipped, nth=nth)
    else:
        layer.corrupt(call, 100, nth=nth)

    assert "other bytes were read" in probe_direct_io(disk, layer)
    assert not list(disk.iterdir())


def write_flipped(real: Any, arguments: Any) -> Any:
    """In the caller's memory, since a copy would not be aligned."""
    fd, buffer, offset = arguments
    buffer[100] ^= 1
    moved = real(fd, buffer, offset)
    buffer[100] ^= 1
    return moved


def test_a_page_cache_that_keeps_old_bytes_is_a_reason(disk: Path, layer: FailingLayer) -> None:
    """The buffered read after the fourth direct write gets what was there before."""
    old: list[bytes] = []

    def remember(real: Any, arguments: Any) -> Any:
        moved = real(*arguments)
        old.append(bytes(arguments[1][0]))
        return moved

    def repeat(real: Any, arguments: Any) -> int:
        arguments[1][0][:] = old[0]
        return len(old[0])

    layer.on("preadv", remember, nth=4)
    layer.on("preadv", repeat, nth=5)

    assert "left old bytes in the page cache" in probe_direct_io(disk, layer)


def test_a_direct_read_that_misses_dirty_pages_is_a_reason(disk: Path, layer: FailingLayer) -> None:
    layer.omit("pwrite", result=4094, nth=5)

    assert "missed what was in the page cache" in probe_direct_io(disk, layer)


def test_what_is_left_of_the_probe_is_no_reason(disk: Path, layer: FailingLayer) -> None:
    layer.fail("unlink", errno.EIO)

    assert probe_direct_io(disk, layer) == ""
    for left in disk.iterdir():
        left.unlink()


def test_a_full_filesystem_is_named(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small") as small:
        assert "4194304 bytes free" in probe_direct_io(small)


def test_auto_falls_back_with_a_warning_that_names_place_and_reason(
    disk: Path, layer: FailingLayer
) -> None:
    layer.fail("open", errno.EINVAL, nth=2)

    is_direct, warning = choose_io("auto", disk, layer)

    assert not is_direct
    assert warning.startswith(f"NO DIRECT I/O in {disk}: ")
    assert os.strerror(errno.EINVAL) in warning
    assert "page cache" in warning


def test_direct_insists(disk: Path, layer: FailingLayer) -> None:
    layer.fail("open", errno.EINVAL, nth=2)

    with pytest.raises(ValueError, match="--stream-optimizer-state-io direct: ") as caught:
        choose_io("direct", disk, layer)
    assert f"does not work in {disk}" in str(caught.value)
    assert os.strerror(errno.EINVAL) in str(caught.value)
    assert "use auto or buffered, or another directory" in str(caught.value)


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    mode: Any = "mmap"
    with pytest.raises(ValueError, match="mmap: expected auto, direct or buffered"):
        choose_io(mode, tmp_path)
