"""Streams state through the page cache under a memory limit: does the kernel take it back?

    python benchmarks/page_cache.py DIRECTORY --limit-mb 600 [--numel 250000000] [--steps 3]

Walks a state file of main params and two moments as a step does, without a device, inside a memory
cgroup of its own (root is needed). Prints one JSON line: seconds of each step, and what the group
holds at the end. Anonymous memory is this process; file memory is the state that is cached.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.core.optimizer.nvme_state_store.io_engine import SyncEngine
from megatron.core.optimizer.nvme_state_store.layout import make_layout
from megatron.core.optimizer.nvme_state_store.state_file import StateFile

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Group:
    """A memory cgroup, and what its files are called in this version of the interface."""

    path: Path
    limit: str
    anonymous: str
    file: str

    def stat(self) -> dict[str, int]:
        """Return megabytes by kind."""
        rows = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return {
            "anonymous_mb": int(rows[self.anonymous]) // 10**6,
            "file_mb": int(rows[self.file]) // 10**6,
        }


@contextmanager
def memory_group(limit_nbytes: int) -> Iterator[Group]:
    """Put this process into a new group with a limit, and back at the end."""
    name = f"page-cache-benchmark-{os.getpid()}"
    if (ROOT / "memory").is_dir():
        parent = ROOT / "memory"
        group = Group(parent / name, "memory.limit_in_bytes", "rss", "cache")
    else:
        parent = ROOT
        group = Group(parent / name, "memory.max", "anon", "file")
    group.path.mkdir()
    try:
        (group.path / group.limit).write_text(str(limit_nbytes))
        (group.path / "cgroup.procs").write_text(str(os.getpid()))
        yield group
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.path.rmdir()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit-mb", type=int, required=True)
    parser.add_argument("--numel", type=int, default=250_000_000)
    parser.add_argument("--bucket-numel", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    layout = make_layout([args.numel], args.bucket_numel, ("exp_avg", "exp_avg_sq"))
    engine = SyncEngine()
    seconds = []
    with memory_group(args.limit_mb * 10**6) as group:
        slot = memoryview(bytearray(layout.slot_nbytes))
        file = StateFile.create(args.directory / f"page-cache-{os.getpid()}", layout.file_nbytes)
        try:
            for _ in range(args.steps):
                start = time.monotonic()
                for bucket in layout.buckets:
                    extent = slot[: bucket.nbytes]
                    engine.read(file, bucket.offset, extent).wait()
                    engine.write(file, bucket.offset, extent).wait()
                seconds.append(round(time.monotonic() - start, 2))
            held = group.stat()
        finally:
            file.remove()
    result = {
        "limit_mb": args.limit_mb,
        "state_mb": layout.nbytes // 10**6,
        "step_s": seconds,
        **held,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
