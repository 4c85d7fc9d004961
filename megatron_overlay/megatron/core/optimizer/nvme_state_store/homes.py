"""The memory and the files in which the buckets of a store live between two steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from .config import StoreConfig
from .direct_io import IoMode, choose_io
from .errors import StateFileError, StateStoreError
from .io_engine import SyncEngine, ThreadEngine
from .io_request import IoCounters, IoEngine
from .layout import ALIGN_BYTES, Bucket, Layout
from .pinned import PinnedBytes
from .placement import Place, Placement, Tier
from .rank_directory import RankDirectory
from .state_file import StateFile

logger = logging.getLogger(__name__)


@dataclass
class Volume:
    """One of the directories over which the disk tier is striped.

    Attributes:
        directory: this store's own, below the one that was configured.
        file: its buckets.
        engine: its threads: a slow disk does not hold up the others.
        is_direct: transfers bypass the page cache.
    """

    directory: RankDirectory
    file: StateFile
    engine: IoEngine
    is_direct: bool


class Homes:
    """Where the buckets live: reserved at construction, for the whole run.

    Args:
        config: directories, engine and kind of I/O.
        layout: the buckets.
        placement: the tier of each.
        name: begins the names of the private directories.
        device: where the device tier is.

    Raises:
        StateStoreError: disk space or pinned memory could not be had; nothing is left of it.
        ValueError: the configured kind of I/O is not to be had.
    """

    def __init__(
        self,
        config: StoreConfig,
        layout: Layout,
        placement: Placement,
        name: str,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.placement = placement
        self.volumes: list[Volume | None] = []
        self._pinned: PinnedBytes | None = None
        self.device_bytes = torch.zeros(placement.device_nbytes, dtype=torch.uint8, device=device)
        try:
            self._pinned = PinnedBytes(placement.host_nbytes)
            for base, nbytes in zip(config.directories, placement.volume_nbytes, strict=True):
                self.volumes.append(_open_volume(config, base, name, nbytes) if nbytes else None)
        except BaseException:
            with contextlib.suppress(StateStoreError):  # the first error counts
                self.close()
            raise

    @property
    def counters(self) -> IoCounters:
        """Bytes that requests of the engines have moved, and the seconds that took."""
        return sum((each.engine.counters for each in self.open_volumes()), IoCounters())

    @property
    def io(self) -> str:
        """How the disk tier is read and written: direct, buffered, both or none."""
        kinds = {"direct" if each.is_direct else "buffered" for each in self.open_volumes()}
        return " and ".join(sorted(kinds)) or "none"

    def place(self, bucket: Bucket) -> Place:
        """Return where a bucket lives."""
        return self.placement.places[bucket.index]

    def pinned(self, bucket: Bucket) -> torch.Tensor:
        """Return the extent of a bucket of the host tier, uint8."""
        assert self._pinned is not None, "closed"
        start = self.place(bucket).offset
        return self._pinned.tensor[start : start + bucket.nbytes]

    def on_device(self, bucket: Bucket) -> torch.Tensor:
        """Return the extent of a bucket of the device tier, uint8."""
        start = self.place(bucket).offset
        return self.device_bytes[start : start + bucket.nbytes]

    def volume(self, bucket: Bucket) -> Volume:
        """Return where a bucket of the disk tier is; its offset there is its place's."""
        volume = self.volumes[self.place(bucket).volume]
        assert volume is not None, "it has buckets"
        return volume

    def read_into(self, bucket: Bucket, start: int, view: memoryview) -> None:
        """Copy bytes of a bucket's extent, from byte ``start`` on; the store is idle meanwhile.

        Raises:
            StateFileError: they could not be read.
        """
        place = self.place(bucket)
        if place.tier is Tier.DISK:
            self.volume(bucket).file.read_into(place.offset + start, view)
        else:
            target = torch.frombuffer(view, dtype=torch.uint8)
            target.copy_(self._in_memory(bucket)[start : start + view.nbytes])

    def write_from(self, bucket: Bucket, start: int, view: memoryview) -> None:
        """Replace bytes of a bucket's extent, from byte ``start`` on; the store is idle meanwhile.

        Raises:
            StateFileError: they could not be written.
        """
        place = self.place(bucket)
        if place.tier is Tier.DISK:
            self.volume(bucket).file.write_from(place.offset + start, view)
        else:
            source = torch.frombuffer(view, dtype=torch.uint8)
            self._in_memory(bucket)[start : start + view.nbytes].copy_(source)

    def _in_memory(self, bucket: Bucket) -> torch.Tensor:
        is_host = self.place(bucket).tier is Tier.HOST
        return self.pinned(bucket) if is_host else self.on_device(bucket)

    def settle(self) -> None:
        """Sync the files to disk, and let the page cache forget them.

        Raises:
            StateFileError: bytes may be lost.
        """
        for volume in self.open_volumes():
            volume.file.sync()
            volume.file.drop_page_cache()

    def cached_nbytes(self) -> int | None:
        """Return how many bytes of the files the page cache holds; None if I/O bypasses it."""
        if all(each.is_direct for each in self.open_volumes()):
            return None
        return sum(each.file.resident_bytes() for each in self.open_volumes())

    def replace_files(self) -> None:
        """Go on with new files after a failure: one that could not be synced stays unusable.

        Raises:
            StateFileError: the space could not be had again.
        """
        for volume in self.open_volumes():
            old = volume.file
            with contextlib.suppress(StateFileError):
                old.remove()
            old.path.parent.mkdir(mode=0o700, exist_ok=True)  # somebody may have cleaned up
            volume.file = StateFile.create(old.path, old.nbytes, is_direct=volume.is_direct)

    def close(self) -> None:
        """Remove the files and give the memory back, when nothing uses it any more.

        Raises:
            StateStoreError: something could not be given back; all else was.
        """
        with contextlib.ExitStack() as stack:  # which goes on after an error
            if self._pinned is not None:
                stack.callback(self._pinned.release)
            for volume in self.open_volumes():
                stack.callback(volume.directory.release)
                stack.callback(volume.file.close)
                stack.callback(volume.engine.close)
            self.volumes = []
            self._pinned = None
            self.device_bytes = self.device_bytes.new_empty(0)

    def open_volumes(self) -> Iterator[Volume]:
        """Yield those of the directories that hold buckets."""
        return (each for each in self.volumes if each is not None)


def _open_volume(config: StoreConfig, base: Path, name: str, nbytes: int) -> Volume:
    assert config.chunk_bytes % ALIGN_BYTES == 0, "validated"
    directory = RankDirectory.acquire(base, name)
    try:
        is_direct, warning = choose_io(cast("IoMode", config.io), directory.path)
        if warning:
            logger.warning("%s", warning)
        engine: IoEngine = (
            SyncEngine(config.chunk_bytes)
            if config.engine == "sync"
            else ThreadEngine(chunk_bytes=config.chunk_bytes)
        )
        file = StateFile.create(directory.path / "state.bin", nbytes, is_direct=is_direct)
    except BaseException:
        directory.release()
        raise
    return Volume(directory, file, engine, is_direct)
