"""What a directory is worth as a place for optimizer state, found by using it like a store.

    python -m megatron.core.optimizer.nvme_state_store probe /scratch /nvme1 --gb 8

For each directory: its filesystem and free space, whether a private directory can be made and
locked there, whether real blocks can be reserved, whether direct I/O works, and how fast an I/O
engine reads, writes, and does both at once. Like a start of the store it removes what dead runs of
this user have left in the directory; unlike it, it does not make one that is missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .direct_io import probe_direct_io
from .errors import StateStoreError
from .filesystems import filesystem_type, free_bytes, warning_about
from .io_engine import DEFAULT_CHUNK_BYTES, DEFAULT_NUM_READERS, ThreadEngine
from .io_request import IoEngine, Ticket
from .memory import page_aligned
from .rank_directory import RankDirectory
from .state_file import StateFile

DESCRIPTION = "Try directories as places for optimizer state, and measure their bandwidth."
DEFAULT_GB = 4.0
_SLOTS = 4
"""Buffers that are read into in turn; a read waits for the one before it in its buffer."""


@dataclass
class Report:
    """What was found out about a directory.

    Attributes:
        directory: As it was given.
        error: Why it cannot be used; '' if it can.
        filesystem: Its type.
        free_gb: Space for users without privileges, in 10^9 bytes.
        no_direct_io: Why direct I/O does not work, or was not tried; '' if it works.
        read_gb_per_s: Reading alone, in 10^9 bytes a second.
        write_gb_per_s: Overwriting alone, until it is on the device.
        mixed_gb_per_s: Reads and writes at the same time, added up.
        warnings: What should make one think twice.
    """

    directory: str
    error: str = ""
    filesystem: str = "unknown"
    free_gb: float = 0.0
    no_direct_io: str = ""
    read_gb_per_s: float = 0.0
    write_gb_per_s: float = 0.0
    mixed_gb_per_s: float = 0.0
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.directory}: {self.filesystem}, {self.free_gb:.1f} GB free"]
        if self.error:
            lines.append(f"CANNOT BE USED: {self.error}")
        else:
            mode = "direct I/O" if not self.no_direct_io else "BUFFERED I/O"
            lines += [
                f"{mode}: read {self.read_gb_per_s:.2f} GB/s, "
                f"write {self.write_gb_per_s:.2f} GB/s, mixed {self.mixed_gb_per_s:.2f} GB/s",
                *(f"warning: {text}" for text in self.warnings),
            ]
        return "\n    ".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument(
        "--gb", type=_positive(float), default=DEFAULT_GB, help="size of the file (%(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=_positive(int),
        default=DEFAULT_NUM_READERS,
        help="readers, and as many writers (%(default)s)",
    )
    parser.add_argument(
        "--chunk-mb",
        type=_positive(int),
        default=DEFAULT_CHUNK_BYTES >> 20,
        help="size of one transfer in MiB (%(default)s)",
    )
    parser.add_argument(
        "--buffered", action="store_true", help="measure the page cache although direct I/O works"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list of all reports")


def _positive[Number: (int, float)](kind: type[Number]) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value

    parse.__name__ = f"positive {kind.__name__}"  # in argparse's messages
    return parse


def run(arguments: argparse.Namespace) -> int:
    """Print a report of each directory; return 1 if one of them cannot be used, else 0."""
    reports = []
    for directory in arguments.directories:
        report = probe(
            directory,
            arguments.gb,
            arguments.threads,
            arguments.chunk_mb << 20,
            is_buffered=arguments.buffered,
        )
        reports.append(report)
        if not arguments.json:
            sys.stdout.write(f"{report}\n")
            sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(report) for report in reports], indent=2) + "\n")
    return int(any(report.error for report in reports))


def probe(
    directory: Path, gb: float, num_threads: int, chunk_bytes: int, *, is_buffered: bool = False
) -> Report:
    """Find out about one directory; its troubles are in the report.

    Args:
        directory: Must exist: made on the way to an unmounted disk, it would be another disk's.
        gb: Size of the file that is written and read, in 10^9 bytes.
        num_threads: Readers, and as many writers.
        chunk_bytes: Size of one transfer.
        is_buffered: Go through the page cache although direct I/O works.
    """
    report = Report(str(directory))
    if not directory.exists():
        report.error = f"{directory}: no such directory; is the disk mounted?"
        return report
    try:
        with RankDirectory.acquire(directory, "probe") as private:
            report.filesystem = filesystem_type(private.path)
            report.free_gb = free_bytes(private.path) / 1e9
            not_wanted = "--buffered was given" if is_buffered else ""
            report.no_direct_io = not_wanted or probe_direct_io(private.path)
            nbytes = -(-int(gb * 1e9) // (2 * chunk_bytes)) * 2 * chunk_bytes
            path = private.path / "state.bin"
            with StateFile.create(path, nbytes, is_direct=not report.no_direct_io) as file:
                engine = ThreadEngine(num_threads, num_threads, chunk_bytes)
                try:
                    _measure(report, file, engine, chunk_bytes * num_threads)
                finally:
                    engine.close()
    except (StateStoreError, OSError) as error:
        report.error = str(error)
        return report
    if warning_about(report.filesystem):
        report.warnings.append(warning_about(report.filesystem))
    if report.no_direct_io:
        report.warnings.append(
            f"no direct I/O ({report.no_direct_io}); the numbers include the page cache, which was "
            "dropped before each: do not compare them with a disk's"
        )
    return report


def _measure(report: Report, file: StateFile, engine: IoEngine, request_bytes: int) -> None:
    whole, nothing = range(file.nbytes), range(0)
    first, second = range(file.nbytes // 2), range(file.nbytes // 2, file.nbytes)
    load = _Load(file, engine, request_bytes)
    # First once unmeasured: reserved blocks that were never written take a filesystem longer.
    load.seconds(whole, nothing)
    report.write_gb_per_s = file.nbytes / load.seconds(whole, nothing) / 1e9
    report.read_gb_per_s = file.nbytes / load.seconds(nothing, whole) / 1e9
    if file.is_direct and file.resident_bytes() > file.nbytes // 2:
        report.warnings.append(
            "the filesystem accepts direct I/O, but keeps the bytes in memory all the same"
        )
    report.mixed_gb_per_s = file.nbytes / load.seconds(second, first) / 1e9


class _Load:
    """Reads and writes of ranges of a file, in requests of one size."""

    def __init__(self, file: StateFile, engine: IoEngine, request_bytes: int) -> None:
        self._file = file
        self._engine = engine
        self._nbytes = request_bytes
        self._written = page_aligned(request_bytes)
        # What can be compressed would tell nothing.
        self._written[:] = secrets.token_bytes(request_bytes)
        self._slots = [page_aligned(request_bytes) for _ in range(_SLOTS)]

    def seconds(self, write: range, read: range) -> float:
        """Write some bytes and read others at once; return how long it took."""
        self._file.drop_page_cache()
        begin = time.monotonic()
        users: list[list[Ticket]] = [[] for _ in range(_SLOTS)]
        starts = (range(part.start, part.stop, self._nbytes) for part in (write, read))
        for number, (target, source) in enumerate(itertools.zip_longest(*starts)):
            if target is not None:
                part = self._written[: write.stop - target]
                self._engine.write(self._file, target, part)
            if source is not None:
                slot = number % _SLOTS
                part = self._slots[slot][: read.stop - source]
                users[slot] = [self._engine.read(self._file, source, part, *users[slot])]
        self._engine.drain()
        self._file.sync()
        return time.monotonic() - begin
