"""Ranks of one node that share a disk: does what they move together stay what the disk can?

    python benchmarks/shared_disk.py DIRECTORY [--ranks 1,2,4,8] [--gb 4] [--seconds 6] [--rounds 2]

Each rank is a process that walks its own state file as a step does, with the store's engine and
its default threads, and without a device: four slots, reads ahead, writes behind. Before and after
them the limit is measured with plain threads, as many bytes read as written. Prints a table of
GB/s, all ranks together, as part of that limit; and of the slowest rank as part of its fair share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron.core.optimizer.nvme_state_store.io_engine import ThreadEngine
from megatron.core.optimizer.nvme_state_store.io_request import Ticket
from megatron.core.optimizer.nvme_state_store.memory import page_aligned
from megatron.core.optimizer.nvme_state_store.state_file import StateFile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.raw_disk import SETTLE_S, DiskProbe
from benchmarks.tables import markdown

BUCKET_BYTES = 64 << 20
SLOTS = 4


def walk(directory: Path, nbytes: int, seconds: float, barrier: Any, channel: Connection) -> None:
    """Be one rank: stream a file until time is up; send the bytes that moved in it."""
    buckets = max(nbytes // BUCKET_BYTES, SLOTS)
    path = directory / f"shared-disk-{os.getpid()}"
    file = StateFile.create(path, buckets * BUCKET_BYTES, is_direct=True)
    engine = ThreadEngine()
    try:
        slots = [page_aligned(BUCKET_BYTES) for _ in range(SLOTS)]
        for slot in slots:  # all pages are there; and a disk that drops zeros would shine
            slot[:] = os.urandom(BUCKET_BYTES)
        for bucket in range(buckets):  # a read of space that was never written costs nothing
            engine.write(file, bucket * BUCKET_BYTES, slots[0]).wait()
        barrier.wait()
        begin, begun = engine.counters, time.monotonic()
        settled, end = begun + SETTLE_S, begun + SETTLE_S + seconds
        written: list[Ticket | None] = [None] * SLOTS
        for turn in range(1 << 30):
            place, offset = turn % SLOTS, turn % buckets * BUCKET_BYTES
            before = written[place]
            if before is not None:
                before.wait()
            now = time.monotonic()
            if begun < settled <= now:  # in full swing, as at the end
                begin, begun = engine.counters, now
            if now > end:
                break
            read = engine.read(file, offset, slots[place])
            written[place] = engine.write(file, offset, slots[place], read)
        moved, took = engine.counters - begin, time.monotonic() - begun
        engine.drain()
        channel.send((moved.bytes_read + moved.bytes_written) / took / 1e9)
    finally:
        engine.close()
        file.remove()


def rates(directory: Path, ranks: int, gigabytes: float, seconds: float) -> list[float]:
    """Return the GB/s of each rank, while all of them stream."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(ranks)
    running = []
    for _ in range(ranks):
        receiving, sending = context.Pipe(duplex=False)
        share = int(gigabytes * 1e9 / ranks)
        process = context.Process(target=walk, args=(directory, share, seconds, barrier, sending))
        process.start()
        sending.close()
        running.append((process, receiving))
    found = []
    try:
        for _, receiving in running:
            found.append(float(receiving.recv()))
    except EOFError:
        raise SystemExit("a rank ended without a result; what it said is above") from None
    finally:
        if len(found) < ranks:
            barrier.abort()
        for process, _ in running:
            process.join()
    return found


def limit(args: argparse.Namespace) -> float:
    """Return what plain threads move, as many bytes read as written, in GB/s."""
    with DiskProbe([args.directory], int(args.gb * 1e9)) as probe:
        balanced = probe.measure(args.seconds, ["balanced"]).balanced
    assert balanced is not None, "it was measured"
    return balanced


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", default="1,2,4,8", help="how many, separated by commas")
    parser.add_argument("--gb", type=float, default=4.0, help="of all ranks' files together")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    rows = []
    for _ in range(args.rounds):
        before = limit(args)
        for ranks in map(int, args.ranks.split(",")):
            found = rates(args.directory, ranks, args.gb, args.seconds)
            after = limit(args)
            most = (before + after) / 2
            fair = min(found) * ranks / sum(found)
            numbers = (sum(found), before, after, sum(found) / most, fair)
            rows.append([str(ranks), *(f"{number:.2f}" for number in numbers)])
            before = after
    columns = ("ranks", "GB/s together", "limit before", "after", "of the limit")
    print(markdown((*columns, "slowest rank of its share"), rows))


if __name__ == "__main__":
    main()
