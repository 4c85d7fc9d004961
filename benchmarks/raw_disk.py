"""What a directory's disk gives to plain threads: reads, writes, and both in one window.

Nothing of the store is used: `os.preadv` and `os.pwrite` of aligned memory, with direct I/O where
the filesystem has it. Files are preallocated and written before, since a first write into reserved
blocks costs more and a read of them costs nothing. The memory is walked over, as a step walks over
its slots: what stays in the processor's cache is copied faster than any step can.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from benchmarks.transfers import Transfer, gigabytes_per_second

CHUNK_BYTES = 8 << 20
ALIGN_BYTES = 4096
MEMORY_BYTES = 1 << 30
"""Of all threads together; larger than a processor's cache, if the files are."""
SETTLE_S = 0.3
"""How long threads run before the window in which they count begins."""
PATTERNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "read": (("read",),),
    "write": (("write",),),
    "mixed": (("read",), ("write",)),
    "balanced": (("read", "write"), ("write", "read")),
}
"""What thread number N repeats: the entry of number N modulo their count. In ``balanced`` each
thread alternates, so that as many bytes are read as written, as a step does."""


@dataclass(frozen=True, slots=True)
class DiskLimit:
    """Rates of one directory or several at once, in GB/s (1e9); None was not measured.

    Attributes:
        directories: where.
        is_direct: whether the page cache was bypassed.
        threads: transfers at the same time.
        chunk_bytes: bytes of one transfer.
        file_bytes: bytes of the files, all together.
        read: reads alone.
        write: writes alone.
        mixed: half of the threads read, half write; the total.
        mixed_read: the part of it that was read.
        balanced: every thread alternates; the total.
    """

    directories: tuple[str, ...]
    is_direct: bool
    threads: int
    chunk_bytes: int
    file_bytes: int
    read: float | None
    write: float | None
    mixed: float | None
    mixed_read: float | None
    balanced: float | None


class DiskProbe:
    """Files to measure with, for as long as the object is entered.

    Args:
        directories: one file is made in each; requests go round.
        nbytes: of all files together.
        threads: transfers at the same time; an even number, so that half of them can read.
        chunk_bytes: of one transfer, a multiple of 4096.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        nbytes: int,
        threads: int = 8,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if threads < 2 or threads % 2:
            raise ValueError(f"{threads} threads: half of them read, so give an even number")
        if chunk_bytes <= 0 or chunk_bytes % ALIGN_BYTES:
            raise ValueError(f"chunks of {chunk_bytes} bytes: expected a multiple of {ALIGN_BYTES}")
        self.directories = tuple(directories)
        self.threads = threads
        self.chunk_bytes = chunk_bytes
        self.is_direct = True
        self._chunks = nbytes // chunk_bytes // len(directories)
        if self._chunks < threads:
            raise ValueError(f"{nbytes} bytes are too few for {threads} threads: give more")
        self._files: list[int] = []
        self._paths: list[Path] = []
        self._chunks_of_thread = max(min(MEMORY_BYTES, nbytes) // chunk_bytes // threads, 1)

    def __enter__(self) -> Self:
        try:
            for directory in self.directories:
                path = directory / f"raw-disk-{os.getpid()}"
                self._paths.append(path)
                self._files.append(self._opened(path))
                os.posix_fallocate(self._files[-1], 0, self._chunks * self.chunk_bytes)
            with self._mapped() as memory:
                self._run("write", memory, passes=1)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def measure(self, seconds: float = 4.0, patterns: Sequence[str] = tuple(PATTERNS)) -> DiskLimit:
        """Return the rates of ``patterns``, each over ``seconds``."""
        rates: dict[str, dict[str, float]] = {name: {} for name in PATTERNS}
        with self._mapped() as memory:
            for name in patterns:
                begin = time.monotonic() + SETTLE_S
                transfers = self._run(name, memory, end_s=begin + seconds)
                rates[name] = gigabytes_per_second(transfers, begin, begin + seconds)
        return DiskLimit(
            tuple(str(each) for each in self.directories),
            self.is_direct,
            self.threads,
            self.chunk_bytes,
            self._chunks * self.chunk_bytes * len(self._files),
            read=rates["read"].get("total"),
            write=rates["write"].get("total"),
            mixed=rates["mixed"].get("total"),
            mixed_read=rates["mixed"].get("read"),
            balanced=rates["balanced"].get("total"),
        )

    def _opened(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.is_direct = False  # the file may have been made all the same
            return os.open(path, flags & ~os.O_EXCL, 0o600)

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[list[list[memoryview]]]:
        """Map the chunks of each thread, for as long as it is entered."""
        nbytes = self.threads * self._chunks_of_thread * self.chunk_bytes
        with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            # Small pages are the memory's limit, not the disk's: a third of it on a virtual disk.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            content = os.urandom(self.chunk_bytes)  # or a disk that drops zeros would shine
            with memoryview(memory) as whole, contextlib.ExitStack() as views:
                chunks = []
                for start in range(0, nbytes, self.chunk_bytes):
                    chunk = views.enter_context(whole[start : start + self.chunk_bytes])
                    chunk[:] = content
                    chunks.append(chunk)
                yield [chunks[number :: self.threads] for number in range(self.threads)]

    def _run(
        self,
        pattern: str,
        memory: Sequence[Sequence[memoryview]],
        end_s: float = 0.0,
        passes: int = 0,
    ) -> list[Transfer]:
        """Let all threads transfer until ``end_s``, or so often over all files.

        Each of them has memory of its own, and uses it over and over.
        Readers walk the first half of the files and writers the second if there are both.
        """
        chunks = self._chunks * len(self._files)
        kinds = {kind for kinds in PATTERNS[pattern] for kind in kinds}
        halves = {"read": range(chunks), "write": range(chunks)}
        if len(kinds) > 1:
            halves = {"read": range(chunks // 2), "write": range(chunks // 2, chunks)}
        # The next of an `itertools.count` is one step of the interpreter, so threads share it.
        counters = {kind: itertools.count() for kind in kinds}
        done: list[Transfer] = []
        errors: list[BaseException] = []
        start = threading.Barrier(self.threads)

        def work(number: int) -> None:
            repeat = itertools.cycle(PATTERNS[pattern][number % len(PATTERNS[pattern])])
            views = itertools.cycle(memory[number])
            start.wait()
            try:
                while not errors and (passes or time.monotonic() < end_s):
                    kind = next(repeat)
                    index = next(counters[kind])
                    if passes and index >= passes * chunks:
                        return
                    place = halves[kind][index % len(halves[kind])]
                    self._transfer(kind, place, next(views), done)
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work, args=(each,)) for each in range(self.threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]
        return done

    def _transfer(self, kind: str, index: int, view: memoryview, done: list[Transfer]) -> None:
        file = self._files[index % len(self._files)]
        offset = index // len(self._files) * self.chunk_bytes
        begin = time.monotonic()
        moved = os.preadv(file, [view], offset) if kind == "read" else os.pwrite(file, view, offset)
        done.append(Transfer(kind, begin, time.monotonic(), moved))
        if moved != self.chunk_bytes:
            raise OSError(f"{kind} at {offset}: moved {moved} of {self.chunk_bytes} bytes")

    def _remove(self) -> None:
        for file in self._files:
            os.close(file)
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self._files, self._paths = [], []


def measured_rows(limit: DiskLimit) -> Iterator[tuple[str, float]]:
    """Yield what is measured and GB/s, of what was measured."""
    for name in ("read", "write", "mixed", "balanced"):
        rate = asdict(limit)[name]
        if rate is not None:
            yield f"{' and '.join(limit.directories)}: {name}", rate
