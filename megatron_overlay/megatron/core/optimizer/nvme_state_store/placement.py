"""Which tier each bucket lives in: pinned to the device or the host by byte budgets, else on disk.

Every step walks all buckets in the same order: the worst case for a cache that keeps what was used
last, and the best one for a fixed split. Buckets of a tier are spread evenly over the walk, so that
the disk has work from the first bucket to the last while the others come and go:

    walk      0  1  2  3  4  5  6  7  8  9
    device                d              d
    host         h  h  h        h  h  h
    disk      D              D                  budgets: 2 buckets of device, 6 of host
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from .layout import Bucket, Layout


class Tier(enum.Enum):
    """Where a bucket is between two steps."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Place:
    """Where one bucket lives.

    Attributes:
        tier: which kind of memory.
        volume: on disk, the index of the directory; else zero.
        offset: its first byte in the memory of that tier, or in the file of that directory.
    """

    tier: Tier
    volume: int
    offset: int


@dataclass(frozen=True)
class Placement:
    """Where the buckets of a layout live.

    Attributes:
        places: of each bucket, in walk order.
        device_nbytes: bytes of all buckets on the device.
        host_nbytes: bytes of all buckets in pinned host memory.
        volume_nbytes: bytes of all buckets in each directory.
    """

    places: tuple[Place, ...]
    device_nbytes: int
    host_nbytes: int
    volume_nbytes: tuple[int, ...]

    @property
    def disk_nbytes(self) -> int:
        """Bytes of all buckets on disk."""
        return sum(self.volume_nbytes)

    def indices(self, tier: Tier) -> list[int]:
        """Return the buckets of a tier, in walk order."""
        return [index for index, place in enumerate(self.places) if place.tier is tier]


def place_buckets(layout: Layout, device_budget: int, host_budget: int, volumes: int) -> Placement:
    """Fill the device's budget, then the host's; stripe the rest over the directories.

    Args:
        layout: whose buckets are placed.
        device_budget: bytes of buckets that may stay on the device; no bucket is cut.
        host_budget: bytes of buckets that may stay in pinned host memory.
        volumes: number of directories.

    Raises:
        ValueError: a budget is negative, or buckets are left and there is no directory.
    """
    if min(device_budget, host_budget) < 0:
        raise ValueError(f"budgets {device_budget} and {host_budget} must not be negative")
    on_device = _spread(layout.buckets, device_budget)
    left = [bucket for bucket in layout.buckets if bucket.index not in on_device]
    on_host = _spread(left, host_budget)
    if len(on_host) < len(left) and volumes < 1:
        raise ValueError("buckets are left for the disk, and there is no directory")
    ends = {Tier.DEVICE: [0], Tier.HOST: [0], Tier.DISK: [0] * volumes}
    places = []
    for bucket in layout.buckets:
        tier = Tier.DISK
        if bucket.index in on_device:
            tier = Tier.DEVICE
        elif bucket.index in on_host:
            tier = Tier.HOST
        used = ends[tier]
        volume = used.index(min(used))
        places.append(Place(tier, volume, used[volume]))
        used[volume] += bucket.nbytes
    return Placement(
        tuple(places), ends[Tier.DEVICE][0], ends[Tier.HOST][0], tuple(ends[Tier.DISK])
    )


def _spread(buckets: Sequence[Bucket], budget: int) -> frozenset[int]:
    """Return the indices of buckets of at most ``budget`` bytes, taken evenly over the walk."""
    total = sum(bucket.nbytes for bucket in buckets)
    if total <= budget:
        return frozenset(bucket.index for bucket in buckets)
    taken: set[int] = set()
    used = seen = 0
    for bucket in buckets:
        seen += bucket.nbytes
        # Taken as soon as the share of the walk so far is due; the sum never exceeds the budget.
        if used + bucket.nbytes <= budget * seen // total:
            taken.add(bucket.index)
            used += bucket.nbytes
    return frozenset(taken)
