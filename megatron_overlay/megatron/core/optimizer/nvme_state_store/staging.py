"""Slots: the reusable buffers through which buckets pass, and the copies between them.

Peak memory is a formula of the layout (invariant 9):

    pinned host   `slot_nbytes`                    bytes, for the lifetime of the store
    device        4 * sum of `slot_numels`         bytes, during a step, refresh or load
                  + 3 * `slot_numels[MAIN]`        during a load, to compare with the model; if it
                                                   has quantised params, 16 times, and one of these
                                                   dequantised, that also in a refresh
                  + 12 * `PIECE_NUMEL` (50 MB)     for the fingerprints
                  + what the inner optimizer allocates for one bucket (torch's AdamW: 4 *
                  `slot_numels[MAIN]`; Transformer Engine's FusedAdam: nothing; Muon: a few times
                  the largest matrix; what makes its state itself, that state once more in the
                  first step)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .layout import Bucket, Layout


class HostSlot:
    """Pinned memory that mirrors a bucket's extent in the file, byte for byte.

    Args:
        layout: sizes the slot by its largest bucket.
    """

    def __init__(self, layout: Layout) -> None:
        # At least a byte: pinning an empty tensor is refused by some drivers. Zeros: padding is
        # written to disk, too.
        self._bytes = torch.zeros(max(layout.slot_nbytes, 1), dtype=torch.uint8, pin_memory=True)

    def extent(self, bucket: Bucket) -> memoryview:
        """Return the bytes of the whole bucket, for the disk."""
        return memoryview(self._bytes.numpy())[: bucket.nbytes]

    def segment_bytes(self, bucket: Bucket, index: int) -> memoryview:
        """Return the bytes of one segment, with its padding, for the disk."""
        where = slice(bucket.starts[index], bucket.starts[index + 1])
        return memoryview(self._bytes.numpy())[where]

    def segment(self, bucket: Bucket, index: int) -> torch.Tensor:
        """Return one segment as FP32 elements, shape (bucket.numels[index],)."""
        flat = self._bytes[bucket.starts[index] : bucket.starts[index + 1]].view(torch.float32)
        return flat[: bucket.numels[index]]


class DeviceSlot:
    """One bucket's segments on the device.

    Args:
        layout: sizes the slot by its largest bucket.
        device: where the model is.

    Attributes:
        segments: their names, in the order of the layout.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.segments = layout.segments
        self._tensors = [
            torch.zeros(numel, dtype=torch.float32, device=device) for numel in layout.slot_numels
        ]

    def segment(self, bucket: Bucket, index: int) -> torch.Tensor:
        """Return one segment, shape (bucket.numels[index],), FP32."""
        return self._tensors[index][: bucket.numels[index]]

    def upload(self, bucket: Bucket, host: HostSlot) -> None:
        """Copy the bucket from the host slot, in order of the current stream."""
        for index in range(len(self.segments)):
            self.segment(bucket, index).copy_(host.segment(bucket, index), non_blocking=True)

    def download(self, bucket: Bucket, host: HostSlot) -> None:
        """Copy the bucket into the host slot and wait until it has arrived."""
        for index in range(len(self.segments)):
            host.segment(bucket, index).copy_(self.segment(bucket, index), non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def mark(self) -> torch.cuda.Event:
        """Record a point in the current stream's time."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the device's seconds between two marks; waits for the second."""
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000


@contextmanager
def device_slot(layout: Layout, device: torch.device) -> Iterator[DeviceSlot]:
    """Lend a device slot; its memory goes back to the caching allocator afterwards."""
    slot = DeviceSlot(layout, device)
    try:
        yield slot
    finally:
        # Also after an error, whose traceback would keep the memory alive.
        slot._tensors.clear()
