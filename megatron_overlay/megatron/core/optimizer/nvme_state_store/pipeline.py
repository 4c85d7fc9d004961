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

from collections.abc import Callable

from .io_engine import IoEngine
from .layout import Bucket, Layout
from .staging import DeviceSlot, HostSlot
from .state_file import StateFile

Stage = Callable[[Bucket, DeviceSlot], None]
"""Something that is done to a bucket while it is resident."""


def run_step(
    layout: Layout,
    file: StateFile,
    engine: IoEngine,
    host: HostSlot,
    device: DeviceSlot,
    update: Stage,
    publish: Stage,
) -> None:
    """Stream every bucket once through the device.

    Args:
        layout: the buckets, walked in order.
        file: where they live.
        engine: does the reads and writes.
        host: the host slot.
        device: the device slot.
        update: changes main params and moments in place.
        publish: copies main params to the model.

    Raises:
        StateFileError: a read or write failed; the buckets before it are updated, it is not.
    """
    for bucket in layout.buckets:
        extent = host.extent(bucket)
        engine.read(file, bucket.offset, extent).wait()
        device.upload(bucket, host)
        update(bucket, device)
        publish(bucket, device)
        device.download(bucket, host)
        engine.write(file, bucket.offset, extent).wait()
