"""What copies between pinned host memory and the device give: each way, both ways at once.

Nothing of the store is used: `torch.Tensor.copy_` on streams, timed with events on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.transfers import Transfer, common_window, gigabytes_per_second

BLOCK_BYTES = (256 << 20, 512 << 20)


@dataclass(frozen=True, slots=True)
class CopyLimit:
    """Rates in GB/s (1e9): for each, that of the best size of blocks.

    Attributes:
        upload: host to device, alone.
        download: device to host, alone.
        duplex: both at once, the total of a window in which both are always busy.
        duplex_upload: the part of it that was uploaded.
        device: device to device; bytes read and bytes written. None if not measured.
    """

    upload: float
    download: float
    duplex: float
    duplex_upload: float
    device: float | None


def measure_copies(
    block_bytes: Sequence[int] = BLOCK_BYTES, repetitions: int = 12, device: bool = True
) -> CopyLimit:
    """Measure on the current device; needs twice the largest block on host and device."""
    found = [_measure(nbytes, repetitions) for nbytes in block_bytes]
    duplex = max(found, key=lambda each: each.duplex)
    return CopyLimit(
        upload=max(each.upload for each in found),
        download=max(each.download for each in found),
        duplex=duplex.duplex,
        duplex_upload=duplex.duplex_upload,
        device=_device_to_device(2 << 30, repetitions) if device else None,
    )


def _measure(nbytes: int, repetitions: int) -> CopyLimit:
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for host in hosts:
        host.fill_(1)
    upload, download = (devices[0], hosts[0]), (hosts[1], devices[1])
    _timed({"upload": upload, "download": download}, 1)
    one = gigabytes_per_second(*_busy(_timed({"upload": upload}, repetitions)))
    other = gigabytes_per_second(*_busy(_timed({"download": download}, repetitions)))
    both = _timed({"upload": upload, "download": download}, repetitions)
    duplex = gigabytes_per_second(*_busy(both))
    return CopyLimit(one["total"], other["total"], duplex["total"], duplex["upload"], None)


def _busy(transfers: list[Transfer]) -> tuple[list[Transfer], float, float]:
    begin, end = common_window(transfers)
    return transfers, begin, end


def _timed(
    copies: dict[str, tuple[torch.Tensor, torch.Tensor]], repetitions: int
) -> list[Transfer]:
    """Repeat each copy on a stream of its own; return when each began and ended."""
    torch.cuda.synchronize()
    base = _event()
    base.record()
    streams = {kind: torch.cuda.Stream() for kind in copies}  # type: ignore[no-untyped-call]
    marks: dict[str, list[torch.cuda.Event]] = {kind: [] for kind in copies}
    for stream in streams.values():
        stream.wait_event(base)
    for number in range(repetitions + 1):
        for kind, (target, source) in copies.items():
            with torch.cuda.stream(streams[kind]):
                if number:
                    target.copy_(source, non_blocking=True)
                marks[kind].append(_event())
                marks[kind][-1].record()
    torch.cuda.synchronize()
    moments = {kind: [base.elapsed_time(mark) / 1e3 for mark in marks[kind]] for kind in copies}
    return [
        Transfer(kind, begin, end, copies[kind][0].nbytes)
        for kind, times in moments.items()
        for begin, end in itertools.pairwise(times)
    ]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _device_to_device(nbytes: int, repetitions: int) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    _timed({"device": (target, source)}, 1)
    transfers, begin, end = _busy(_timed({"device": (target, source)}, repetitions))
    return 2 * gigabytes_per_second(transfers, begin, end)["total"]
