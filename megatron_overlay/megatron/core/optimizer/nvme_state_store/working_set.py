"""What moves the state of a store: homes, slots and the pipeline between them, made together."""

from __future__ import annotations

import logging

import torch

from .budgets import Budgets
from .config import GB, MIN_HOST_SLOTS, NUM_DEVICE_SLOTS, StoreConfig
from .formats import FP32
from .homes import Homes
from .layout import MAIN, Layout
from .pinned import PinnedBytes
from .pipeline import Pipeline
from .placement import Tier, place_buckets
from .staging import Staging

logger = logging.getLogger(__name__)


def max_host_slot_nbytes(config: StoreConfig, layout: Layout) -> int:
    """Return what the host slots of a store take at most, whatever its budgets are, in bytes."""
    return _num_host_slots(config, layout, len(layout.buckets)) * layout.slot_nbytes


def _num_host_slots(config: StoreConfig, layout: Layout, num_on_disk: int) -> int:
    wanted = config.ahead_bytes // max(layout.slot_nbytes, 1)
    return min(num_on_disk, max(MIN_HOST_SLOTS, wanted))


class WorkingSet:
    """The homes of all buckets, the slots through which they pass, and the pipeline.

    Args:
        config: validated settings.
        layout: the buckets.
        budgets: memory for those that do not go to disk.
        name: begins the names of the private directories.
        device: where the model is.

    Attributes:
        homes: where the buckets are between two steps.
        staging: the device slots.

    Raises:
        StateStoreError: disk space or pinned memory could not be had; nothing is left of it.
        ValueError: the configured kind of I/O is not to be had.
    """

    def __init__(
        self, config: StoreConfig, layout: Layout, budgets: Budgets, name: str, device: torch.device
    ) -> None:
        placement = place_buckets(layout, budgets.device, budgets.host, len(config.directories))
        self.homes = Homes(config, layout, placement, name, device)
        num_away = len(placement.places) - len(placement.indices(Tier.DEVICE))
        self.staging = Staging(layout, device, min(NUM_DEVICE_SLOTS, num_away))
        self._num_host_slots = _num_host_slots(config, layout, len(placement.indices(Tier.DISK)))
        self._config = config
        self._layout = layout
        self._host: PinnedBytes | None = None
        self._pipeline: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; pins the host slots, if they are not.

        Raises:
            StateStoreError: that is refused.
        """
        if self._pipeline is None:
            self._host = PinnedBytes(self._num_host_slots * self._layout.slot_nbytes)
            self._pipeline = Pipeline(self.homes, self.staging, self._host, self._num_host_slots)
        return self._pipeline

    def drain(self) -> None:
        """Wait until every bucket is at home; pins nothing for that.

        Raises:
            StateFileError: a write has failed.
        """
        if self._pipeline is not None:
            self._pipeline.drain()

    def release_slots(self, *, host: bool) -> None:
        """Give the memory of the slots back until the next use; all must be at home.

        Args:
            host: also of the host slots.
        """
        if self._pipeline is not None:
            self._pipeline.forget()
        self.staging.release()
        if host and self._host is not None:
            self._pipeline = None
            self._host.release()
            self._host = None

    def close(self) -> None:
        """Remove the files and give all memory back, when nothing is under way any more.

        Raises:
            StateStoreError: something could not be given back; all else was.
        """
        try:
            self.release_slots(host=True)
        finally:
            self.homes.close()

    def log(self) -> None:
        """Say what runs: tiers, formats, kind of I/O and slots that are really in use."""
        stored = dict(zip(self._layout.segments, self._layout.formats, strict=True))
        del stored[self._layout.segments[MAIN]]
        exact = [key for key, format in stored.items() if format == FP32]
        moments = self._config.moment_dtype if stored else "none"
        if exact and moments != FP32.name:
            moments += f" but fp32 {', '.join(exact)}"
        volumes = list(self.homes.open_volumes())
        logger.info(
            "NVMe optimizer state store: %d buckets, %.3f GB disk, %.3f GB host, %.3f GB device at "
            "%s (main %s, moments %s, io %s)",
            len(self._layout.buckets),
            self.homes.placement.disk_nbytes / GB,
            self.homes.placement.host_nbytes / GB,
            self.homes.placement.device_nbytes / GB,
            ", ".join(str(volume.directory.path) for volume in volumes) or "no directory",
            self._config.main_storage,
            moments,
            self.homes.io,
        )
        logger.info(
            "NVMe optimizer state slots: %d of %.3f GB on the device, %d in pinned host memory "
            "(engine %s)",
            self.staging.num_slots,
            self._layout.slot_nbytes / GB,
            self._num_host_slots,
            self._config.engine,
        )
