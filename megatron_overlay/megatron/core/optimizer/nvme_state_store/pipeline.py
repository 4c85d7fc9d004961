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
    update: Stage,
    publish: Stage,
) -> StepTimes:
    """Stream every bucket once through the device.

    Args:
        layout: the buckets, walked in order.
        file: where they live.
        engine: does the reads and writes.
        host: the host slot.
        device: the device slot.
        update: changes main params and moments in place.
        publish: copies main params to the model.

    Returns:
        Where the time went.

    Raises:
        StateFileError: a read or write failed; the buckets before it are updated, it is not.
    """
    times = StepTimes()
    for bucket in layout.buckets:
        extent = host.extent(bucket)
        start = time.monotonic()
        engine.read(file, bucket.offset, extent).wait()
        times.read_wait += time.monotonic() - start
        begun = device.mark()
        device.upload(bucket, host)
        uploaded = device.mark()
        update(bucket, device)
        publish(bucket, device)
        updated = device.mark()
        device.download(bucket, host)
        downloaded = device.mark()
        start = time.monotonic()
        engine.write(file, bucket.offset, extent).wait()
        times.write_wait += time.monotonic() - start
        times.upload += device.seconds_between(begun, uploaded)
        times.update += device.seconds_between(uploaded, updated)
        times.download += device.seconds_between(updated, downloaded)
    return times
