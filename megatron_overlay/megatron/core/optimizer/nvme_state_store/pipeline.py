"""The order of one step: read, upload, update, publish, download, write.

[Note: Step timeline]
Each verb works on another bucket at the same time; b is a bucket of the disk tier:

    readers   read b+2  | read b+3   | read b+4
    upload    upload b+1 | upload b+2 | ...
    caller's  update b, publish b | update b+1, publish b+1 | ...
    download               download b | download b+1 | ...
    writers                            write b | write b+1 | ...

The caller's thread submits all of it, in walk order, and blocks only to wait for a read. A bucket
of the host tier is uploaded from where it lives and downloaded to there; one of the device tier is
updated where it lives. Reads of the next step's first buckets begin as soon as host slots are free,
and the last buckets are written while training goes on.

| what | ends with | waited for by | what it protects |
|---|---|---|---|
| read into a host slot | its ticket | the caller, before the upload | the slot has its bytes |
| upload | event, upload stream | the caller's stream | the device slot has its bytes |
| update, publish | event, caller's stream | the download stream | the bucket is finished |
| download | event, download stream | the writer's thread | the host slot has the new bytes |
| | | the upload stream, next use of the slot | the device slot is free |
| write of a bucket | its ticket | the reader's thread, next read into it | the host slot is free |
| | | the reader's thread, next read of the bucket | the disk has the new bytes |

A bucket whose host slot is its own for good (there are as many slots as buckets of the disk tier)
is not read again; the caller waits for its last write before it is downloaded into once more.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.cuda import nvtx

from .errors import StateStoreError
from .homes import Homes
from .io_request import Ticket
from .layout import MAIN, Bucket
from .placement import Tier
from .report import StepReport
from .staging import Download, ResidentBucket, Staging, Upload
from .timeline import StepTimes

Stage = Callable[[Bucket, ResidentBucket], None]
"""Something that is done to a bucket while it is resident, in order of the caller's stream."""
Meeting = Callable[[Bucket, Exception | None], Exception | None]
"""Takes this rank's error to the ranks that the update of a bucket communicates with, and returns
an error to all of them if any has one. Without such ranks it returns its argument."""


class HostMemory(Protocol):
    """Pinned memory: see `PinnedBytes`."""

    @property
    def tensor(self) -> torch.Tensor:
        """All of it, uint8."""
        ...

    def view(self, start: int, stop: int) -> memoryview:
        """Return some of it, for the disk."""
        ...


@dataclass(frozen=True)
class Stages:
    """What a step does to each bucket between its upload and its download.

    Attributes:
        meet: called once for every bucket, whatever failed.
        update: changes main params and state in place; may communicate.
        publish: copies main params to the model.
    """

    meet: Meeting
    update: Stage
    publish: Stage


@dataclass
class _HostSlot:
    """Pinned memory of one bucket of the disk tier.

    Attributes:
        memory: uint8.
        view: the same bytes, for the disk.
        read: the read that filled it, if that was not followed by a write.
        write: the last write out of it.
    """

    memory: torch.Tensor
    view: memoryview
    read: Ticket | None = None
    write: Ticket | None = None


class Pipeline:
    """Brings buckets to the device and takes them away; outlives the steps.

    Thread: the caller's, with its current stream.

    Args:
        homes: where the buckets live.
        staging: the device slots.
        host: pinned memory of the host slots.
        num_slots: how many of these there are.
    """

    def __init__(self, homes: Homes, staging: Staging, host: HostMemory, num_slots: int) -> None:
        self._homes = homes
        self._staging = staging
        self._buckets = homes.layout.buckets
        self._on_disk = [self._buckets[index] for index in homes.placement.indices(Tier.DISK)]
        # An upload waits for the last download out of its device slot alone. Downloads follow each
        # other, so that covers the one that took the bucket home, unless slots outnumber buckets.
        num_away = len(self._buckets) - len(homes.placement.indices(Tier.DEVICE))
        assert staging.num_slots <= max(num_away, 1), "or an upload may overtake a download"
        size = homes.layout.slot_nbytes
        starts = [index * size for index in range(num_slots)]
        self._host_slots = [
            _HostSlot(host.tensor[start : start + size], host.view(start, start + size))
            for start in starts
        ]
        self._free = deque(self._host_slots)
        self._next_read = 0
        self._slots: dict[int, _HostSlot] = {}
        self._writes: dict[int, Ticket] = {}
        self._uploads: dict[int, Upload] = {}
        self._expect_step()

    # ------------------------------------------------------------------------------------ one step

    def begin_step(self) -> None:
        """Begin the first reads and uploads that are not under way yet."""
        self._times.begin()
        self.read_ahead()
        self._upload_ahead()

    def bring(self, bucket: Bucket) -> ResidentBucket:
        """Return a bucket, whose upload the caller's stream then waits for.

        Raises:
            StateFileError: it could not be read, or could not be written before.
        """
        if self._homes.place(bucket).tier is Tier.DEVICE:
            self._upload_ahead()
            return self._staging.keep(bucket, self._homes.on_device(bucket))
        if bucket.index not in self._uploads:
            self._upload(bucket)
        upload = self._uploads[bucket.index]
        self._staging.await_upload(upload)
        self._upload_ahead()
        return upload.resident

    def process(self, bucket: Bucket, resident: ResidentBucket, stages: Stages) -> None:
        """Update and publish a bucket that was brought."""
        begin = self._staging.mark()
        with nvtx.range(f"update bucket {bucket.index}"):
            stages.update(bucket, resident)
        updated = self._staging.mark()
        with nvtx.range(f"publish bucket {bucket.index}"):
            stages.publish(bucket, resident)
        self._times.add("update", bucket, begin, updated)
        self._times.add("publish", bucket, updated, self._staging.mark())

    def take_away(self, bucket: Bucket) -> None:
        """Let a bucket go home, when the caller's stream has done what it was given so far."""
        tier = self._homes.place(bucket).tier
        if tier is Tier.DEVICE:
            return
        slot = self._slots[bucket.index] if tier is Tier.DISK else None
        memory = self._homes.pinned(bucket) if slot is None else slot.memory
        with nvtx.range(f"download bucket {bucket.index}"):
            download = self._staging.download(
                self._uploads.pop(bucket.index), memory[: bucket.nbytes]
            )
        self._times.add("download", bucket, download.begin, download.end)
        self._report.bytes_downloaded += bucket.nbytes
        if slot is None:
            return
        self._write(bucket, slot, bucket.nbytes, download)
        self._times.add_ticket("write", bucket, self._writes[bucket.index])
        self._report.bytes_written += bucket.nbytes
        if len(self._host_slots) < len(self._on_disk):
            del self._slots[bucket.index]
            self._free.append(slot)
            self.read_ahead()

    def end_step(self) -> StepReport:
        """Wait until every bucket is published; downloads and writes may go on.

        The next step's first uploads begin: their bytes will not change before it.

        Returns:
            What the step did.
        """
        report, times = self._report, self._times
        self._expect_step()
        self._upload_ahead()
        times.finish(report)
        return report

    def _expect_step(self) -> None:
        self._report = StepReport(buckets=len(self._buckets))
        self._times = StepTimes(self._staging)
        self._next_upload = 0

    def read_ahead(self) -> None:
        """Begin reads of the next buckets of the walk, as far as there are host slots.

        After the last bucket of a step come the first ones of the next step.
        """
        while self._free and len(self._slots) < len(self._on_disk):
            bucket = self._on_disk[self._next_read]
            self._next_read = (self._next_read + 1) % len(self._on_disk)
            slot = self._free.popleft()
            self._slots[bucket.index] = slot
            self._read(bucket, slot, bucket.nbytes)

    def _upload_ahead(self) -> None:
        """Begin uploads of the next buckets of this step, as far as that needs no waiting."""
        while self._next_upload < len(self._buckets):
            bucket = self._buckets[self._next_upload]
            if self._homes.place(bucket).tier is Tier.DEVICE:
                self._next_upload += 1
                continue
            is_there = all(ticket.is_done() for ticket in self._tickets(bucket))
            if len(self._uploads) >= self._staging.num_slots or not is_there:
                return
            if self._homes.place(bucket).tier is Tier.DISK and bucket.index not in self._slots:
                return
            self._upload(bucket)

    def _upload(self, bucket: Bucket) -> None:
        if self._homes.place(bucket).tier is Tier.HOST:
            memory = self._homes.pinned(bucket)
        else:
            slot = self._slots[bucket.index]
            start = time.monotonic()
            if slot.read is not None:
                with nvtx.range(f"read-wait bucket {bucket.index}"):
                    slot.read.wait()
                self._times.add_ticket("read", bucket, slot.read)
                self._report.bytes_read += bucket.nbytes
            read = time.monotonic()
            if bucket.index in self._writes:
                self._writes[bucket.index].wait()
                del self._writes[bucket.index]  # not before: `drain` must find one that failed
            self._report.read_wait += read - start
            self._report.write_wait += time.monotonic() - read
            memory = slot.memory
        with nvtx.range(f"upload bucket {bucket.index}"):
            upload = self._staging.upload(bucket, memory[: bucket.nbytes])
        self._uploads[bucket.index] = upload
        self._next_upload = bucket.index + 1
        self._times.add("upload", bucket, upload.begin, upload.end)
        self._report.bytes_uploaded += bucket.nbytes

    def _tickets(self, bucket: Bucket) -> list[Ticket]:
        """Return what must be done before the bucket's host slot may be used."""
        slot = self._slots.get(bucket.index)
        both = (None if slot is None else slot.read, self._writes.get(bucket.index))
        return [each for each in both if each is not None]

    def _read(self, bucket: Bucket, slot: _HostSlot, nbytes: int) -> Ticket:
        """Begin to read the first bytes of a bucket, when slot and bucket have been written."""
        volume = self._homes.volume(bucket)
        before = (slot.write, self._writes.get(bucket.index))
        slot.read = volume.engine.read(
            volume.file,
            self._homes.place(bucket).offset,
            slot.view[:nbytes],
            *(each for each in before if each is not None),
        )
        return slot.read

    def _write(self, bucket: Bucket, slot: _HostSlot, nbytes: int, download: Download) -> None:
        """Begin to write the first bytes of a bucket, when they have been downloaded."""
        volume = self._homes.volume(bucket)
        slot.read = None
        slot.write = self._writes[bucket.index] = volume.engine.write(
            volume.file,
            self._homes.place(bucket).offset,
            slot.view[:nbytes],
            download,
        )

    # ---------------------------------------------------------------------------- between two steps

    def drain(self) -> None:
        """Wait until every bucket is at home; reads ahead may go on.

        Raises:
            StateFileError: a write has failed: the first one, in walk order; also at every later
            call, until `forget`.
        """
        self._staging.synchronize()
        failed: StateStoreError | None = None
        for index in sorted(self._writes):
            try:
                self._writes[index].wait()
                del self._writes[index]  # one that failed stays: the bytes at home are lost
            except StateStoreError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def forget(self) -> None:
        """Wait until nothing is under way, and forget what was read and what has failed.

        After this the bytes at home may be replaced.
        """
        self._staging.synchronize()
        for volume in self._homes.open_volumes():
            with contextlib.suppress(StateStoreError):
                volume.engine.drain()
        self._uploads.clear()
        self._writes.clear()
        self._slots.clear()
        self._next_read = 0
        self._expect_step()
        for slot in self._host_slots:
            slot.read = slot.write = None
        self._free = deque(self._host_slots)

    def write_main(self, bucket: Bucket, fill: Stage) -> int:
        """Replace the main params of a bucket at home; to be used after `forget`.

        Args:
            bucket: which one.
            fill: makes the stored main params, in order of the caller's stream.

        Returns:
            Bytes of its stored main params.

        Raises:
            StateFileError: the write before in the same host slot has failed.
        """
        nbytes = bucket.starts[MAIN + 1]
        tier = self._homes.place(bucket).tier
        if tier is Tier.DEVICE:
            fill(bucket, self._staging.keep(bucket, self._homes.on_device(bucket)))
            return nbytes
        upload = self._staging.lend(bucket)
        fill(bucket, upload.resident)
        if tier is Tier.HOST:
            self._staging.download(upload, self._homes.pinned(bucket)[:nbytes])
            return nbytes
        slot = self._host_slots[0]
        self._host_slots.append(self._host_slots.pop(0))
        if slot.write is not None:
            slot.write.wait()
        self._write(bucket, slot, nbytes, self._staging.download(upload, slot.memory[:nbytes]))
        return nbytes

    def look_at(self, bucket: Bucket, look: Stage, nbytes: int) -> None:
        """Show the first bytes of a bucket's extent; to be used after `forget`.

        Raises:
            StateFileError: they could not be read.
        """
        tier = self._homes.place(bucket).tier
        if tier is Tier.DEVICE:
            look(bucket, self._staging.keep(bucket, self._homes.on_device(bucket)))
            return
        if tier is Tier.HOST:
            memory = self._homes.pinned(bucket)
        else:
            slot = self._host_slots[0]
            self._read(bucket, slot, nbytes).wait()
            memory = slot.memory
        upload = self._staging.upload(bucket, memory[:nbytes])
        self._staging.await_upload(upload)
        look(bucket, upload.resident)
        self._staging.synchronize()  # the memory is used again


def run_step(pipeline: Pipeline, buckets: Sequence[Bucket], stages: Stages) -> StepReport:
    """Stream every bucket once through the device.

    After an error nothing is done any more, but every meeting is still held: ranks that have not
    failed wait there.

    Args:
        pipeline: moves the buckets; a step was begun.
        buckets: all of them, in walk order.
        stages: what is done to each.

    Returns:
        What the step did.

    Raises:
        StateFileError: a read or an earlier write failed; the buckets before it are updated.
        StateStoreError: a rank that an update communicates with failed.
    """
    failed: Exception | None = None
    for bucket in buckets:
        resident: ResidentBucket | None = None
        if failed is None:
            try:
                resident = pipeline.bring(bucket)
            except Exception as error:
                failed = error
        failed = stages.meet(bucket, failed)
        if failed is None and resident is not None:
            try:
                pipeline.process(bucket, resident, stages)
                pipeline.take_away(bucket)
            except Exception as error:
                failed = error
    if failed is not None:
        raise failed
    return pipeline.end_step()
