"""Device slots, and the copies between them and the host on streams of their own.

Peak memory is a formula of the layout and the placement (invariant 9):

    pinned host   host tier + host slots * `slot_nbytes`
    device        device tier, and until `Staging.release`
                  device slots * `slot_nbytes`, plus 4 * `slot_numels` of each segment that is not
                  stored as FP32: the one place where buckets are decoded
                  + 13 MB                          during a load, to compare with the model; if it
                                                   has quantised params, 97 MB, and one of these
                                                   dequantised, that also in a refresh
                  + 138 MB at most                 for pieces of `encoding.PIECE_NUMEL` elements
                                                   with noise; fingerprints take less
                  + what the inner optimizer allocates for one bucket (torch's AdamW: 4 *
                  `slot_numels[MAIN]`; Transformer Engine's FusedAdam: nothing; Muon: a few times
                  the largest matrix; what makes its state itself, that state once more in the
                  first step)

[Note: Streams]
Three streams work at the same time, each on another bucket:

    upload     host to device. Waits for the download out of the same slot.
    caller's   decode, update, publish, encode. Waits for the upload; all else of Megatron's is on
               it, so gradients and model params need no event.
    download   device to host. Waits for the encoding.

The decoded segments exist once: only the caller's stream touches them. Nothing here blocks the
host but `synchronize`, what calls it, and `seconds_between`. Memory of a slot is given back to the
allocator only after that, since the allocator knows the caller's stream alone.
"""

from __future__ import annotations

import weakref

import torch

from .formats import FP32
from .layout import Bucket, Layout


class ResidentBucket:
    """A bucket on the device.

    Attributes:
        segments: names of its segments, in the order of the layout.
        stored: its extent, byte for byte as on the host and on disk, uint8.
    """

    def __init__(
        self,
        layout: Layout,
        bucket: Bucket,
        stored: torch.Tensor,
        decoded: list[torch.Tensor | None],
    ) -> None:
        self.segments = layout.segments
        self.stored = stored[: bucket.nbytes]
        self._decoded = decoded

    def stored_segment(self, bucket: Bucket, index: int) -> torch.Tensor:
        """Return the stored bytes of one segment, with its padding, uint8."""
        return self.stored[bucket.starts[index] : bucket.starts[index + 1]]

    def segment(self, bucket: Bucket, index: int) -> torch.Tensor:
        """Return one segment for the update, shape (bucket.numels[index],), FP32.

        One that is stored as FP32 is updated where it is; else what is here was decoded last, maybe
        of another bucket.
        """
        decoded = self._decoded[index]
        if decoded is None:
            decoded = self.stored_segment(bucket, index).view(torch.float32)
        return decoded[: bucket.numels[index]]


class Staging:
    """The device slots of a store, allocated on first use and kept until `release`.

    Thread: the caller's, with its current stream.

    Args:
        layout: sizes the slots by its largest bucket.
        device: where the model is.
        num_slots: buckets that may be on the device at the same time.
    """

    def __init__(self, layout: Layout, device: torch.device, num_slots: int) -> None:
        self.num_slots = num_slots
        self._layout = layout
        self._device = device
        self._slots: list[torch.Tensor] = []
        self._downloaded: list[torch.cuda.Event | None] = []
        self._decoded: list[torch.Tensor | None] = []
        self._next = 0
        self._upload_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._download_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Whoever forgets this object must not free memory that copies still use.
        weakref.finalize(self, _wait_for, self._upload_stream, self._download_stream)

    def allocate(self) -> None:
        """Take the memory of the slots, if it is not there."""
        if self._decoded:  # every layout has a segment, decoded or not
            return
        layout, device = self._layout, self._device
        self._decoded = [
            None if each == FP32 else torch.zeros(numel, dtype=torch.float32, device=device)
            for each, numel in zip(layout.formats, layout.slot_numels, strict=True)
        ]
        for _ in range(self.num_slots):
            self._slots.append(torch.zeros(layout.slot_nbytes, dtype=torch.uint8, device=device))
        self._downloaded = [None] * self.num_slots
        # Kernels that used this memory before may not have run yet.
        self._upload_stream.wait_stream(torch.cuda.current_stream())

    def release(self) -> None:
        """Give the memory back; a later use takes it again. Waits for the device."""
        self.synchronize()
        # Also after an error, whose traceback would keep the memory alive.
        for each in (*self._slots, *self._decoded):
            if each is not None:
                each.untyped_storage().resize_(0)
        self._slots.clear()
        self._decoded.clear()

    def synchronize(self) -> None:
        """Wait until no copy and no kernel of the caller's stream is under way."""
        self._upload_stream.synchronize()
        torch.cuda.current_stream().synchronize()
        self._download_stream.synchronize()

    def lend(self, bucket: Bucket) -> Upload:
        """Return the next slot for a bucket that the caller's stream is going to fill."""
        self.allocate()
        index, self._next = self._next, (self._next + 1) % self.num_slots
        downloaded = self._downloaded[index]
        if downloaded is not None:
            torch.cuda.current_stream().wait_event(downloaded)
        now = self.mark()
        resident = ResidentBucket(self._layout, bucket, self._slots[index], self._decoded)
        return Upload(resident, index, now, now)

    def upload(self, bucket: Bucket, host: torch.Tensor) -> Upload:
        """Begin to copy a bucket into the next slot, when that one's download has ended.

        Args:
            bucket: which one.
            host: its extent in pinned memory, or the first bytes of it; must not change before the
                copy has ended.
        """
        self.allocate()
        with torch.cuda.stream(self._upload_stream):
            upload = self.lend(bucket)
            upload.resident.stored[: host.numel()].copy_(host, non_blocking=True)
            upload.end = self.mark()
        return upload

    def keep(self, bucket: Bucket, stored: torch.Tensor) -> ResidentBucket:
        """Return a bucket of the device tier, which needs no slot."""
        self.allocate()
        return ResidentBucket(self._layout, bucket, stored, self._decoded)

    def await_upload(self, upload: Upload) -> None:
        """Let the caller's stream wait for an upload."""
        torch.cuda.current_stream().wait_event(upload.end)

    def download(self, upload: Upload, host: torch.Tensor) -> Download:
        """Begin to copy a bucket to the host, after what the caller's stream was given so far.

        Args:
            upload: what brought the bucket.
            host: pinned memory of the extent's size, or for the first bytes of it. What was read or
                written there must have ended.
        """
        ready = self.mark()
        with torch.cuda.stream(self._download_stream):
            self._download_stream.wait_event(ready)
            begin = self.mark()
            host.copy_(upload.resident.stored[: host.numel()], non_blocking=True)
            end = self.mark()
        self._downloaded[upload.slot] = end
        return Download(begin, end, self._device)

    def mark(self) -> torch.cuda.Event:
        """Record a point in the current stream's time."""
        # Blocking: a thread that waits for it must not keep a core busy.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the device's seconds between two marks; waits for both."""
        first.synchronize()
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000


class Upload:
    """A bucket on its way to the device, and then there.

    Attributes:
        resident: the bucket in its slot.
        slot: index of the slot.
        begin: mark of the upload stream.
        end: likewise.
    """

    def __init__(
        self, resident: ResidentBucket, slot: int, begin: torch.cuda.Event, end: torch.cuda.Event
    ) -> None:
        self.resident = resident
        self.slot = slot
        self.begin = begin
        self.end = end


class Download:
    """A bucket on its way to the host.

    Attributes:
        begin: mark of the download stream.
        end: likewise.
    """

    def __init__(
        self, begin: torch.cuda.Event, end: torch.cuda.Event, device: torch.device
    ) -> None:
        self.begin = begin
        self.end = end
        self._device = device

    def wait(self) -> None:
        """Block until the bucket has arrived. Thread: any."""
        # Else a thread's first call would make a context on device 0, on every rank of a node.
        with torch.cuda.device(self._device):
            self.end.synchronize()


def _wait_for(*streams: torch.cuda.Stream) -> None:
    for stream in streams:
        stream.synchronize()
