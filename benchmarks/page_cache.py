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
import sys
import time
from pathlib import Path

from megatron.core.optimizer.nvme_state_store.io_engine import SyncEngine
from megatron.core.optimizer.nvme_state_store.layout import make_layout
from megatron.core.optimizer.nvme_state_store.state_file import StateFile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory import memory_group


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
        file = StateFile.create(args.directory / f"page-cache-{os.getpid()}", layout.nbytes)
        try:
            for _ in range(args.steps):
                start = time.monotonic()
                for bucket in layout.buckets:
                    extent = slot[: bucket.nbytes]
                    engine.read(file, bucket.offset, extent).wait()
                    engine.write(file, bucket.offset, extent).wait()
                seconds.append(round(time.monotonic() - start, 2))
            held = {f"{kind}_mb": n // 10**6 for kind, n in group.held().items()}
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
