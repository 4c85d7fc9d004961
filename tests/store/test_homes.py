"""Buckets live where they were placed, come back byte for byte, and nothing is left at the end."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store import homes as module
from megatron.core.optimizer.nvme_state_store.config import StoreConfig
from megatron.core.optimizer.nvme_state_store.direct_io import probe_direct_io
from megatron.core.optimizer.nvme_state_store.errors import (
    DirectoryError,
    StateFileError,
    StateStoreError,
)
from megatron.core.optimizer.nvme_state_store.filesystems import filesystem_type
from megatron.core.optimizer.nvme_state_store.homes import Homes
from megatron.core.optimizer.nvme_state_store.io_engine import SyncEngine, ThreadEngine
from megatron.core.optimizer.nvme_state_store.layout import ALIGN_BYTES, Bucket, make_layout
from megatron.core.optimizer.nvme_state_store.memory import page_aligned
from megatron.core.optimizer.nvme_state_store.placement import Tier, place_buckets

from tests.store.failing_file import missing_ability

CPU = torch.device("cpu")
LAYOUT = make_layout([10_000], 1024, ("exp_avg", "exp_avg_sq"))
"""Ten buckets of three pages, the last one smaller in elements."""
EXTENT = LAYOUT.slot_nbytes
NAME = "rank00000-optimizer0"


class Runtime:
    """Pins memory in name: what is registered, by address; ``refuses`` is the error it returns."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            self.registered[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    """Two directories, through the page cache."""
    return StoreConfig((tmp_path / "a", tmp_path / "b"), io="buffered")


def require_direct_io(directory: Path) -> None:
    reason = probe_direct_io(directory)
    if reason:
        missing_ability(reason)


def make(config: StoreConfig, on_device: int = 0, on_host: int = 0) -> Homes:
    """Make homes with so many buckets in memory."""
    placement = place_buckets(LAYOUT, on_device * EXTENT, on_host * EXTENT, len(config.directories))
    return Homes(config, LAYOUT, placement, NAME, CPU)


@pytest.fixture
def made(config: StoreConfig) -> Iterator[Homes]:
    """Three buckets on the device, three on the host, four on disk."""
    homes = make(config, 3, 3)
    yield homes
    homes.close()


def content(bucket: Bucket, seed: int = 0) -> bytes:
    return random.Random(100 * seed + bucket.index).randbytes(bucket.nbytes)


def fill(homes: Homes, seed: int = 0) -> None:
    view = page_aligned(EXTENT)
    for bucket in LAYOUT.buckets:
        view[: bucket.nbytes] = content(bucket, seed)
        homes.write_from(bucket, 0, view[: bucket.nbytes])


def read(homes: Homes, bucket: Bucket) -> bytes:
    view = page_aligned(bucket.nbytes)
    homes.read_into(bucket, 0, view)
    return bytes(view)


def left_in(base: Path) -> list[str]:
    """Return what a store has left, but for the lock of all stores, which stays."""
    if not base.exists():
        return []
    return [path.name for path in base.iterdir() if not path.name.startswith(".state-store-")]


# ---------------------------------------------------------------------------------- where they live


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("volumes", [1, 3])
@pytest.mark.parametrize("tiers", [(0, 0), (3, 3), (0, 10), (10, 0), (5, 5)])
def test_every_byte_comes_back_from_every_tier(
    tiers: tuple[int, int], volumes: int, io: str, tmp_path: Path
) -> None:
    """And lies where the placement says, in files too."""
    if io == "direct":
        require_direct_io(tmp_path)
    bases = tuple(tmp_path / str(number) for number in range(volumes))
    homes = make(StoreConfig(bases, io=io), *tiers)
    fill(homes)

    counts = dict.fromkeys(Tier, 0)
    for bucket in LAYOUT.buckets:
        assert read(homes, bucket) == content(bucket)
        place = homes.place(bucket)
        counts[place.tier] += 1
        if place.tier is Tier.DISK:
            path = homes.volume(bucket).file.path
            assert path.is_relative_to(bases[place.volume])
            raw = path.read_bytes()[place.offset : place.offset + bucket.nbytes]
        else:
            find = homes.pinned if place.tier is Tier.HOST else homes.on_device
            raw = find(bucket).numpy().tobytes()
        assert raw == content(bucket)
    assert tuple(counts.values()) == (*tiers, 10 - sum(tiers))
    homes.close()


def test_a_part_of_an_extent_is_read_and_written_alone(made: Homes) -> None:
    """Of every tier; its neighbours stay as they are."""
    fill(made)
    for bucket in LAYOUT.buckets:
        piece = page_aligned(ALIGN_BYTES)
        piece[:] = content(bucket, 1)[:ALIGN_BYTES]
        made.write_from(bucket, ALIGN_BYTES, piece)
    for bucket in LAYOUT.buckets:
        old, new = content(bucket), content(bucket, 1)
        end = 2 * ALIGN_BYTES
        assert read(made, bucket) == old[:ALIGN_BYTES] + new[:ALIGN_BYTES] + old[end:]
        piece = page_aligned(ALIGN_BYTES)
        made.read_into(bucket, end, piece)
        assert bytes(piece) == old[end : end + ALIGN_BYTES]


def test_everything_is_zero_at_first(made: Homes) -> None:
    """Moments start so, and nobody writes them."""
    assert not any(any(read(made, bucket)) for bucket in LAYOUT.buckets)


def test_the_disk_tier_is_striped_over_the_directories(config: StoreConfig) -> None:
    """Each file has real blocks for what it is to hold."""
    homes = make(config, 0, 2)
    sizes = [volume.file.path.stat() for volume in homes.open_volumes()]
    assert [size.st_size for size in sizes] == [4 * EXTENT, 4 * EXTENT]
    assert all(size.st_blocks * 512 >= size.st_size for size in sizes)
    assert [volume.directory.path.name[: len(NAME)] for volume in homes.open_volumes()] == [
        NAME
    ] * 2
    homes.close()


def test_a_directory_without_buckets_is_not_touched(tmp_path: Path) -> None:
    """It may not even be usable on this rank."""
    (tmp_path / "b").write_text("no directory")
    homes = make(StoreConfig((tmp_path / "a", tmp_path / "b"), io="buffered"), 0, 9)
    assert [volume is None for volume in homes.volumes] == [False, True]
    assert homes.io == "buffered"
    homes.close()


def test_without_a_disk_tier_no_directory_is_made(config: StoreConfig) -> None:
    homes = make(config, 4, 6)
    assert (homes.io, list(homes.open_volumes()), homes.cached_nbytes()) == ("none", [], None)
    assert not any(base.exists() for base in config.directories)
    homes.settle()
    homes.replace_files()
    homes.close()


def test_files_are_replaced_in_a_directory_that_somebody_removed(config: StoreConfig) -> None:
    """So that a run can be restored without a new start."""
    homes = make(config)
    for volume in homes.open_volumes():
        shutil.rmtree(volume.directory.path)

    homes.replace_files()

    assert all(volume.file.path.exists() for volume in homes.open_volumes())
    homes.close()


@pytest.mark.parametrize(("engine", "kind"), [("sync", SyncEngine), ("threads", ThreadEngine)])
def test_each_directory_has_an_engine_of_its_own(
    engine: str, kind: type, config: StoreConfig
) -> None:
    """A slow disk holds up no other; the counters are those of all of them."""
    homes = make(replace(config, engine=engine))
    engines = [volume.engine for volume in homes.open_volumes()]
    assert [type(each) for each in engines] == [kind, kind]
    assert engines[0] is not engines[1]
    view = page_aligned(EXTENT)
    for bucket in LAYOUT.buckets[:2]:
        volume = homes.volume(bucket)
        volume.engine.write(volume.file, homes.place(bucket).offset, view[: bucket.nbytes]).wait()
    assert homes.counters.bytes_written == 2 * EXTENT
    homes.close()


# ------------------------------------------------------------------------------------- kinds of I/O


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch, below: Path) -> None:
    """Make the filesystem below a path one that refuses direct I/O."""
    real = os.open

    def refusing(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_DIRECT and Path(path).is_relative_to(below):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refusing)


def test_auto_is_direct_where_that_works(
    tmp_path: Path, config: StoreConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a warning."""
    require_direct_io(tmp_path)
    with caplog.at_level(logging.WARNING, module.__name__):
        homes = make(replace(config, io="auto"))
    assert homes.io == "direct"
    assert all(each.is_direct and each.file.is_direct for each in homes.open_volumes())
    assert homes.cached_nbytes() is None, "nothing is to be said of it"
    assert caplog.messages == []
    homes.close()


def test_auto_falls_back_with_a_warning_that_names_the_directory(
    tmp_path: Path,
    config: StoreConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A silent fallback would be a bug (invariant 10); the other disk stays as it is."""
    require_direct_io(tmp_path)
    refuse_direct_io(monkeypatch, tmp_path / "b")
    with caplog.at_level(logging.WARNING, module.__name__):
        homes = make(replace(config, io="auto"))
    assert homes.io == "buffered and direct"
    (message,) = caplog.messages
    assert message.startswith(f"NO DIRECT I/O in {tmp_path / 'b'}")
    fill(homes)
    assert homes.cached_nbytes() is not None, "one of them goes through the page cache"
    assert all(read(homes, bucket) == content(bucket) for bucket in LAYOUT.buckets)
    homes.close()


def test_buffered_is_what_was_asked_for(
    config: StoreConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """So nobody is warned."""
    with caplog.at_level(logging.WARNING, module.__name__):
        homes = make(config)
    assert homes.io == "buffered"
    assert not any(each.is_direct for each in homes.open_volumes())
    assert caplog.messages == []
    homes.close()


def test_direct_io_that_is_not_to_be_had_is_refused(
    tmp_path: Path, config: StoreConfig, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second directory; what was made for the first one is gone."""
    require_direct_io(tmp_path)
    refuse_direct_io(monkeypatch, tmp_path / "b")
    with pytest.raises(ValueError, match=f"direct I/O does not work in {tmp_path / 'b'}"):
        make(replace(config, io="direct"), 0, 2)
    assert left_in(tmp_path / "a") == left_in(tmp_path / "b") == []
    assert runtime.registered == {}


def test_what_is_settled_is_not_in_the_page_cache(tmp_path: Path, made: Homes) -> None:
    """It is on disk, and competes with nothing."""
    if filesystem_type(tmp_path.resolve()) in ("tmpfs", "ramfs"):
        missing_ability("there the page cache is all there is")
    fill(made)
    assert made.cached_nbytes() == made.placement.disk_nbytes
    made.settle()
    assert made.cached_nbytes() == 0
    assert all(read(made, bucket) == content(bucket) for bucket in LAYOUT.buckets)


# ----------------------------------------------------------------------------- failures and the end


def fail_call(monkeypatch: pytest.MonkeyPatch, name: str, number: int, nth: int = 1) -> None:
    """Let the n-th call of a function of ``os`` fail, and those after it succeed."""
    real: Callable[..., Any] = getattr(os, name)
    count = 0

    def failing(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, name, failing)


def test_files_are_replaced_after_a_failure(made: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that could not be synced never can be: what is there may be lost."""
    fill(made)
    paths = [volume.file.path for volume in made.open_volumes()]
    fail_call(monkeypatch, "fdatasync", errno.EIO)
    for _ in range(2):
        with pytest.raises(StateFileError, match="sync failed"):
            made.settle()

    made.replace_files()

    made.settle()
    assert [volume.file.path for volume in made.open_volumes()] == paths
    assert all(os.listdir(path.parent) == ["state.bin"] for path in paths)  # noqa: PTH208
    for bucket in LAYOUT.buckets:
        is_new = made.place(bucket).tier is Tier.DISK
        expected = bytes(bucket.nbytes) if is_new else content(bucket)
        assert read(made, bucket) == expected
    fill(made, 1)
    assert all(read(made, bucket) == content(bucket, 1) for bucket in LAYOUT.buckets)


def test_replaced_files_are_read_and_written_as_the_old_ones(
    tmp_path: Path, config: StoreConfig
) -> None:
    """Directly, if that was so."""
    require_direct_io(tmp_path)
    homes = make(replace(config, io="direct"))
    homes.replace_files()
    assert all(volume.file.is_direct for volume in homes.open_volumes())
    homes.close()


def test_a_file_that_cannot_be_replaced_is_an_error_and_closing_still_works(
    made: Homes, config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may have taken the space meanwhile."""
    fail_call(monkeypatch, "posix_fallocate", errno.ENOSPC, nth=2)
    with pytest.raises(StateFileError, match="No space left"):
        made.replace_files()
    made.close()
    assert [left_in(base) for base in config.directories] == [[], []]


def test_close_leaves_nothing(config: StoreConfig, runtime: Runtime) -> None:
    """No file, no directory, no pinned memory, no thread; a second one has nothing to do."""
    homes = make(config, 3, 3)
    volumes = list(homes.open_volumes())
    (nbytes,) = runtime.registered.values()
    assert nbytes == 3 * EXTENT
    assert [len(left_in(base)) for base in config.directories] == [2, 2], "a directory, its lock"

    homes.close()

    assert [left_in(base) for base in config.directories] == [[], []]
    assert runtime.registered == {}
    assert list(homes.open_volumes()) == []
    for volume in volumes:
        with pytest.raises(StateStoreError, match="engine is closed"):
            volume.engine.read(volume.file, 0, page_aligned(ALIGN_BYTES))
    homes.close()


def test_a_second_directory_that_is_none_leaves_nothing_of_the_first(
    config: StoreConfig, runtime: Runtime
) -> None:
    """Space and pinned memory are given back at once, not at exit."""
    config.directories[1].write_text("in the way")
    with pytest.raises(DirectoryError, match="cannot be used for optimizer state"):
        make(config, 3, 3)
    assert left_in(config.directories[0]) == []
    assert runtime.registered == {}


def test_a_second_directory_without_space_leaves_nothing_of_either(
    config: StoreConfig, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At construction, never in the middle of a run (invariant 7)."""
    fail_call(monkeypatch, "posix_fallocate", errno.ENOSPC, nth=2)
    with pytest.raises(StateFileError, match="No space left"):
        make(config, 3, 3)
    assert all(base.exists() for base in config.directories)
    assert [left_in(base) for base in config.directories] == [[], []]
    assert runtime.registered == {}


def test_pinned_memory_that_is_refused_leaves_no_directory(
    config: StoreConfig, runtime: Runtime
) -> None:
    """It is asked for before the disk, which takes longer."""
    runtime.refuses = 2
    with pytest.raises(StateStoreError, match="cannot pin"):
        make(config, 3, 3)
    assert not any(base.exists() for base in config.directories)
