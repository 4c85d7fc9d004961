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
    times = StepTimes()
    failed: Exception | None = None
    for bucket in layout.buckets:
        if failed is None:
            try:
                _bring(bucket, file, engine, host, device, times)
                stages.check(bucket, device)
            except Exception as error:
                failed = error
        failed = stages.meet(bucket, failed)
        if failed is None:
            try:
                start = device.mark()
                stages.update(bucket, device)
                stages.publish(bucket, device)
                times.update += device.seconds_between(start, device.mark())
                _take_away(bucket, file, engine, host, device, times)
            except Exception as error:
                failed = error
    if failed is not None:
        raise failed
    return times


def _bring(
    bucket: Bucket,
    file: StateFile,
    engine: IoEngine,
    host: HostSlot,
    device: DeviceSlot,
    times: StepTimes,
) -> None:
    """Read and upload a bucket."""
    start = time.monotonic()
    engine.read(file, bucket.offset, host.extent(bucket)).wait()
    times.read_wait += time.monotonic() - start
    begun = device.mark()
    device.upload(bucket, host)
    times.upload += device.seconds_between(begun, device.mark())


def _take_away(
    bucket: Bucket,
    file: StateFile,
    engine: IoEngine,
    host: HostSlot,
    device: DeviceSlot,
    times: StepTimes,
) -> None:
    """Download and write a bucket."""
    begun = device.mark()
    device.download(bucket, host)
    times.download += device.seconds_between(begun, device.mark())
    start = time.monotonic()
    engine.write(file, bucket.offset, host.extent(bucket)).wait()
    times.write_wait += time.monotonic() - start
