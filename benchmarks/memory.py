"""What a process holds, on the host and on the device, and a memory cgroup of its own."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class NoMemoryGroupError(RuntimeError):
    """This machine lets us make no memory cgroup; the message says why."""


@dataclass(frozen=True)
class _Interface:
    """What the files of a version of the interface are called."""

    limit: str
    usage: str
    peak: str
    events: str
    anonymous: str
    file: str


_VERSION_1 = _Interface(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.failcnt",
    "rss",
    "cache",
)
_VERSION_2 = _Interface(
    "memory.max", "memory.current", "memory.peak", "memory.events", "anon", "file"
)


def stat_rows(text: str) -> dict[str, int]:
    """Return the rows ``NAME NUMBER`` of a file of a cgroup."""
    return {row[0]: int(row[1]) for row in map(str.split, text.splitlines()) if len(row) == 2}


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup."""

    path: Path
    interface: _Interface

    def set_limit(self, nbytes: int) -> None:
        """Limit what the group may hold, page cache counted."""
        (self.path / self.interface.limit).write_text(str(nbytes))

    def held(self) -> dict[str, int]:
        """Return bytes of ``anonymous`` and ``file`` memory that the group holds now."""
        rows = stat_rows((self.path / "memory.stat").read_text())
        return {
            "anonymous": rows[self.interface.anonymous],
            "file": rows[self.interface.file],
        }

    def summary(self) -> dict[str, int | str]:
        """Return what it holds, limit and peak in bytes, and how often the limit was met."""
        found: dict[str, int | str] = {"path": str(self.path), **self.held()}
        for name in ("limit", "usage", "peak"):
            file = self.path / getattr(self.interface, name)
            if file.exists():  # memory.peak came with Linux 5.19
                found[name] = int(file.read_text())
        events = (self.path / self.interface.events).read_text()
        found |= stat_rows(events) or {"failcnt": int(events)}
        return found


@contextmanager
def memory_group(limit_nbytes: int, root: Path = ROOT) -> Iterator[MemoryGroup]:
    """Put this process into a new group with a limit, and back at the end.

    Raises:
        NoMemoryGroupError: it cannot be made.
    """
    name = f"state-store-benchmark-{os.getpid()}"
    is_first = (root / "memory").is_dir()
    parent = root / "memory" if is_first else root
    group = MemoryGroup(parent / name, _VERSION_1 if is_first else _VERSION_2)
    if not is_first:
        with contextlib.suppress(OSError):  # on already, or not ours to turn on: seen below
            (parent / "cgroup.subtree_control").write_text("+memory")
    try:
        group.path.mkdir()
    except OSError as error:
        raise NoMemoryGroupError(f"no memory cgroup can be made below {parent}: {error}") from error
    try:
        try:
            if not (group.path / group.interface.limit).exists():
                raise OSError("the memory controller is not on for it")
            group.set_limit(limit_nbytes)
            (group.path / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise NoMemoryGroupError(f"memory cgroup {group.path}: {error}") from error
        yield group
    finally:
        with contextlib.suppress(OSError):
            (parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            group.path.rmdir()


def kibibyte_rows(path: str) -> dict[str, int]:
    """Return the rows `NAME: NUMBER kB` of a file in /proc, in bytes."""
    rows = (line.split() for line in Path(path).read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def memory_stat() -> Path | None:
    """Return `memory.stat` of this process's cgroup, of version 1 or 2, if there is one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("memory", ""):
            mount = ROOT / controllers
            for directory in (mount / group.lstrip("/"), mount):  # a container may see but the last
                if (directory / "memory.stat").exists():
                    return directory / "memory.stat"
    return None


def host_memory() -> tuple[int, int, str]:
    """Return the bytes of anonymous memory and of page cache, and where these numbers are from."""
    stat = memory_stat()
    if stat is None:
        anonymous = kibibyte_rows("/proc/self/status")["RssAnon"]
        cached = kibibyte_rows("/proc/meminfo")["Cached"]
        return anonymous, cached, "RssAnon of /proc/self/status, Cached of /proc/meminfo"
    rows = stat_rows(stat.read_text())
    names = ("anon", "file") if "anon" in rows else ("total_rss", "total_cache")
    return rows[names[0]], rows[names[1]], f"{' and '.join(names)} of {stat}"


def transferred() -> dict[str, int]:
    """Return the bytes that system calls of this process have read and written so far.

    The kernel counts them, on any filesystem, direct or buffered: no engine has a say in it.
    """
    rows = stat_rows(Path("/proc/self/io").read_text().replace(":", ""))
    return {"read": rows["rchar"], "written": rows["wchar"]}


def wait_for_quiet(quiet_s: float = 0.3, timeout_s: float = 60.0) -> float:
    """Block until this process has moved next to nothing for a while: reads ahead are done.

    Returns:
        When it was last seen to move anything, by `time.monotonic`.
    """
    begin = last = time.monotonic()
    before = sum(transferred().values())
    while time.monotonic() < begin + timeout_s:
        time.sleep(min(quiet_s, 0.02))
        now = sum(transferred().values())
        if now - before >= 1 << 20:  # reading the count is a transfer, too
            before, last = now, time.monotonic()
        elif time.monotonic() >= last + quiet_s:
            return last
    raise TimeoutError(f"reads and writes go on after {timeout_s} s without a step")


def fill(nbytes: int) -> tuple[int, int]:
    """Use so much memory and give it back; return the machine's MemTotal before and after.

    Some virtual machines are given memory as they use it: what sizes itself from MemTotal or
    MemAvailable sees too little until then.
    """
    before = kibibyte_rows("/proc/meminfo")["MemTotal"]
    zeros = bytes(64 << 20)
    with mmap.mmap(-1, nbytes) as memory:
        for start in range(0, nbytes, len(zeros)):
            stop = min(start + len(zeros), nbytes)
            memory[start:stop] = zeros[: stop - start]
    return before, kibibyte_rows("/proc/meminfo")["MemTotal"]


def fill_beforehand(gigabytes: float) -> None:
    """Call `fill` in a process of its own, not in this one, which lives on; say what it changed."""
    with ProcessPoolExecutor(1) as pool:
        before, after = pool.submit(fill, int(gigabytes * 1e9)).result()
    print(f"MemTotal {before / 1e9:.1f} GB, then {after / 1e9:.1f} GB", file=sys.stderr)


class DeviceSampler:
    """Samples bytes allocated on the device from a thread, while it is entered.

    Attributes:
        samples: (seconds by `time.monotonic`, bytes).
    """

    def __init__(self, every_s: float = 0.005) -> None:
        self.samples: list[tuple[float, int]] = []
        self._every_s = every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> DeviceSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        import torch

        while True:
            self.samples.append((time.monotonic(), torch.cuda.memory_allocated()))
            if self._end.wait(self._every_s):
                return
