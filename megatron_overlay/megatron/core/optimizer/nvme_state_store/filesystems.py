"""Which filesystem holds a path, and what is known of its kind."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"))
_LAYERED = frozenset(("overlay", "aufs", "unionfs", "fuse.fuse-overlayfs"))
_LOCAL = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "vfat", "exfat", "ntfs3")
)
_SHARED_BY_HOST = frozenset(("9p", "virtiofs", "vboxsf", "fuse.gcsfuse", "fuse.s3fs"))


def boot_id() -> str:
    """Return what tells this boot of this kernel from all others; containers share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def filesystem_type(path: Path) -> str:
    """Return the type of the filesystem that holds an absolute path without symlinks.

    As /proc/self/mountinfo calls it; ``unknown`` where that cannot be read.
    """
    best, found = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split()[4])
            # Of two mounts on one point the later one is on top.
            if path.is_relative_to(point) and len(point) >= len(best):
                best, found = point, right.split()[0]
    return found


def warning_about(kind: str) -> str:
    """Say what is wrong with a type of filesystem as a place for optimizer state; '' if nothing."""
    if kind in _IN_MEMORY:
        return f"{kind} is memory, not a disk: what is stored there is taken from the host's RAM"
    if kind in _LAYERED:
        return (
            f"{kind} is a container's own layer: often slow, small, and shared with the container "
            "runtime; mount a local disk into the container"
        )
    if kind in _SHARED_BY_HOST:
        return f"{kind} goes through another program: expect little of its speed; mount a disk"
    if kind in _LOCAL:
        return ""
    return (
        f"{kind} is not known as a local disk's filesystem: if it is a network's, all nodes share "
        "its bandwidth, and leftovers of a dead node are not removed"
    )


def free_bytes(path: Path) -> int:
    """Return how many bytes a user without privileges may still write there.

    Raises:
        OSError: the filesystem does not tell.
    """
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize
