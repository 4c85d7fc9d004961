"""The order of one step: read, upload, update, publish, download, write.

[Note: Step timeline]
One host slot and one device slot, so a bucket is finished before the next one starts:

    disk     read 0 |                                       | write 0 | read 1 | ...
    device          | upload 0 | update 0 | publish 0 | download 0    |

| event | recorded by | waited for by | what it protects |
|---|---|---|---|
| read ticket | io engine | `run_step` before upload | the host slot's bytes are the disk's |
| current stream | upload, update, publish | in order on the stream | the device slot |
| stream synchronized | `DeviceSlot.download` | itself | the host slot before write |
| write ticket | io engine | `run_step` before the next read | the host slot is free again |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .io_engine import IoEngine
from .layout import Bucket, Layout
from .staging import DeviceSlot, HostSlot
from .state_file import StateFile

Stage = Callable[[Bucket, DeviceSlot], None]
"""Something that is done to a bucket while it is resident."""
Meeting = Callable[[Bucket, Exception | None], Exception | None]
"""Takes this rank's error to the ranks that the update of a bucket communicates with, and returns
an error to all of them if any has one. Without such ranks it returns its argument."""


@dataclass(frozen=True)
class Stages:
    """What a step does to each bucket between its upload and its download.

    Attributes:
        check: raises if the bucket must not be updated.
        meet: called once for every bucket, whatever failed.
        update: changes main params and state in place; may communicate.
        publish: copies main params to the model.
    """

    check: Stage
    meet: Meeting
    update: Stage
    publish: Stage


@dataclass
class StepTimes:
    """Seconds a step spent: waiting for the disk, and on the device (update with publish)."""

    read_wait: float = 0.0
    upload: float = 0.0
    update: float = 0.0
    download: float = 0.0
    write_wait: float = 0.0

    def __str__(self) -> str:
        return (
            f"read-wait {self.read_wait:.3f}s upload {self.upload:.3f}s update {self.update:.3f}s "
            f"download {self.download:.3f}s write-wait {self.write_wait:.3f}s"
        )


def run_step(
    layout: Layout,
    file: StateFile,
    engine: IoEngine,
    host: HostSlot,
    device: DeviceSlot,
    stages: Stages,
) -> StepTimes:
    """Stream every bucket once through the device.

    After an error nothing is done any more, but every meeting is still held: ranks that have not
    failed wait there.

    Args:
        layout: the buckets, walked in order.
        file: where they live.
        engine: does the reads and writes.
        host: the host slot.
        device: the device slot.
        stages: what is done to each bucket.

    Returns:
        Where the time went.

    Raises:
        StateFileError: a read or write failed; the buckets before it are updated, it is not.
        StateStoreError: a rank that an update communicates with failed.
    """
    walk = _Walk(file, engine, host, device)
    failed: Exception | None = None
    for bucket in layout.buckets:
        if failed is None:
            try:
                walk.bring(bucket)
                stages.check(bucket, device)
            except Exception as error:
                failed = error
        failed = stages.meet(bucket, failed)
        if failed is None:
            try:
                walk.mark()
                stages.update(bucket, device)
                stages.publish(bucket, device)
                walk.take_away(bucket)
            except Exception as error:
                failed = error
    if failed is not None:
        raise failed
    return walk.times


class _Walk:
    """Moves buckets to the device and back, and knows how long that took.

    Marks of the device's time are read when a bucket has been downloaded: reading one waits for it.
    """

    def __init__(
        self, file: StateFile, engine: IoEngine, host: HostSlot, device: DeviceSlot
    ) -> None:
        self.times = StepTimes()
        self._file = file
        self._engine = engine
        self._host = host
        self._device = device
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Record where the device is."""
        self._marks.append(self._device.mark())

    def bring(self, bucket: Bucket) -> None:
        """Read and upload a bucket."""
        self._marks.clear()
        start = time.monotonic()
        self._engine.read(self._file, bucket.offset, self._host.extent(bucket)).wait()
        self.times.read_wait += time.monotonic() - start
        self.mark()
        self._device.upload(bucket, self._host)
        self.mark()

    def take_away(self, bucket: Bucket) -> None:
        """Download and write a bucket, whose update was begun with a `mark`."""
        self.mark()
        self._device.download(bucket, self._host)
        self.mark()
        begun, uploaded, checked, updated, downloaded = self._marks
        start = time.monotonic()
        self._engine.write(self._file, bucket.offset, self._host.extent(bucket)).wait()
        self.times.write_wait += time.monotonic() - start
        self.times.upload += self._device.seconds_between(begun, uploaded)
        self.times.update += self._device.seconds_between(checked, updated)
        self.times.download += self._device.seconds_between(updated, downloaded)
