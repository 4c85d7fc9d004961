"""Reads and writes of state files with tickets: what was submitted can be waited for.

[Note: In flight]
A request is in flight from its submission until its `Ticket.wait` or the engine's `drain` returns,
not merely until its bytes have moved. So whether these rules hold does not depend on timing, and
the synchronous engine finds the same mistakes as an asynchronous one. While in flight together:

* No two requests overlap in a file, unless both are reads. A read of bytes that are being written
  may see the old ones, the new ones or a mixture; so wait for the write first.
* No two requests overlap in memory, unless both are writes (which only look at it). A slot is
  not filled again before the write out of it was waited for.

Both are asserted. Requests on different ranges are performed in any order. The file is told by its
object: two `StateFile` objects of one path are beyond this check. So is a read-only buffer.

[Note: Errors]
An error stays in its ticket until `wait` raises it, in every engine, so that the order of raising
does not depend on the engine. What nobody waited for is raised by `drain`: no error is lost. A
wait returns or raises only when nothing touches the request's buffer any more.

Alternatives considered: memory maps (write-back is out of our hands, an I/O error is a SIGBUS);
io_uring (often refused in containers); libaio (asynchronous with direct I/O only).
"""

from __future__ import annotations

import abc
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Literal, Protocol

from .errors import StateStoreError
from .state_file import StateFile

logger = logging.getLogger(__name__)

Operation = Literal["read", "write"]
DEFAULT_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class IoCounters:
    """What an engine has moved since it was made; subtract an earlier value for an interval.

    Attributes:
        bytes_read: Bytes that reads have filled.
        bytes_written: Bytes that writes have handed to the kernel.
        read_seconds: Time inside reads, added up over threads.
        write_seconds: Time inside writes, added up over threads.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0

    def __add__(self, other: IoCounters) -> IoCounters:
        return IoCounters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: IoCounters) -> IoCounters:
        return IoCounters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class Ticket(Protocol):
    """One submitted request."""

    def wait(self) -> None:
        """Block until the bytes have moved and nothing touches the buffer any more.

        May be called again, and by any thread; an error is then raised again.

        Raises:
            StateFileError: they have not; of several failures the one at the lowest offset.
            StateStoreError: the engine is closed.
        """
        ...


class IoEngine(Protocol):
    """What performs requests. Thread: submit, drain and close from one thread at a time."""

    @property
    def counters(self) -> IoCounters:
        """What was moved so far."""
        ...

    def read(self, file: StateFile, offset: int, buffer: memoryview) -> Ticket:
        """Begin to fill ``buffer`` with the bytes at ``offset``.

        Raises:
            ValueError: the range does not lie within the file, or the buffer is unsuited.
            StateStoreError: the engine is closed, or belongs to the parent of this process.
        """
        ...

    def write(self, file: StateFile, offset: int, buffer: memoryview) -> Ticket:
        """Begin to write ``buffer`` at ``offset``; it must not change before the wait.

        Raises:
            ValueError: the range does not lie within the file, or the buffer is unsuited.
            StateStoreError: the engine is closed, or belongs to the parent of this process.
        """
        ...

    def drain(self) -> None:
        """Block until nothing is in flight.

        Raises:
            StateFileError: the first error, in order of submission, that no wait has raised; a
                note says how many more there were.
        """
        ...

    def close(self) -> None:
        """Block until nothing touches a file or buffer, and accept nothing any more.

        Requests that have not begun are cancelled, and all tickets raise from now on: drain first.
        A second call does nothing. Raises nothing; logs errors that nobody has waited for.
        """
        ...


class Request:
    """One read or write: where in which file, and which memory.

    Attributes:
        operation: ``read`` or ``write``.
        file: The file.
        offset: Where in the file it begins, in bytes.
        buffer: Its memory as bytes; empty once it is settled, so that the memory can be freed.
    """

    def __init__(
        self, operation: Operation, file: StateFile, offset: int, buffer: memoryview
    ) -> None:
        if operation == "read" and buffer.readonly:
            raise ValueError(f"{file.path}: cannot read into a read-only buffer")
        self.operation = operation
        self.file = file
        self.offset = offset
        self.buffer = file.check_range(offset, buffer)
        self.nbytes = buffer.nbytes
        self.address = _address(self.buffer)

    def __str__(self) -> str:
        end = self.offset + self.nbytes
        return f"{self.operation} of bytes {self.offset} to {end} of {self.file.path}"

    def conflict(self, other: Request) -> str:
        """Say what forbids ``self`` and ``other`` to be in flight together; empty if nothing."""
        operations = {self.operation, other.operation}
        if self.file is other.file and "write" in operations and self._meets(other, "offset"):
            return "their ranges overlap in the file"
        have_addresses = self.address != 0 and other.address != 0
        if have_addresses and "read" in operations and self._meets(other, "address"):
            return "they use the same memory"
        return ""

    def _meets(self, other: Request, what: Literal["offset", "address"]) -> bool:
        first, second = getattr(self, what), getattr(other, what)
        start, stop = max(first, second), min(first + self.nbytes, second + other.nbytes)
        return bool(start < stop)


def assert_compatible(request: Request, in_flight: list[Request]) -> None:
    """Assert that ``request`` may be in flight together with all of ``in_flight``."""
    for other in in_flight:
        conflict = request.conflict(other)
        assert not conflict, f"{request} while {other} is in flight: {conflict}; wait for it first"


def _address(view: memoryview) -> int:
    if view.readonly or not view.nbytes:
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _Submitted(Request):
    """A request of an engine of this module, and its ticket."""

    def __init__(
        self, engine: _Engine, operation: Operation, file: StateFile, offset: int, view: memoryview
    ) -> None:
        super().__init__(operation, file, offset, view)
        self.chunks: list[Future[None]] = []
        self.has_failed = False  # its chunks that have not begun need not
        self._engine = engine

    def wait(self) -> None:
        """See `Ticket.wait`."""
        self._engine.check_process()
        error = self.settle()
        self._engine.forget(self)
        if error is not None:
            raise error
        self._engine.check_open()

    def settle(self) -> BaseException | None:
        """Block until no chunk is running; return the error at the lowest offset."""
        first: BaseException | None = None
        for chunk in self.chunks:
            try:
                error = chunk.exception()
            except CancelledError:
                error = StateStoreError(f"{self}: the I/O engine was closed before it was done")
            first = first or error
        self.buffer = memoryview(b"")
        return first


class _Engine(abc.ABC):
    """What both engines share: what is in flight, the chunks of a request, and the counters."""

    def __init__(self, chunk_bytes: int) -> None:
        if chunk_bytes <= 0:
            raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._in_flight: list[_Submitted] = []
        self._counters = IoCounters()
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def counters(self) -> IoCounters:
        """See `IoEngine.counters`."""
        with self._lock:
            return self._counters

    def read(self, file: StateFile, offset: int, buffer: memoryview) -> Ticket:
        """See `IoEngine.read`."""
        return self._submit(_Submitted(self, "read", file, offset, buffer))

    def write(self, file: StateFile, offset: int, buffer: memoryview) -> Ticket:
        """See `IoEngine.write`."""
        return self._submit(_Submitted(self, "write", file, offset, buffer))

    def drain(self) -> None:
        """See `IoEngine.drain`."""
        self.check_process()
        errors = self._settle_all()
        if errors:
            if len(errors) > 1:
                errors[0].add_note(f"and {len(errors) - 1} more requests failed")
            raise errors[0]

    def close(self) -> None:
        """See `IoEngine.close`."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self._stop()
        for error in self._settle_all():
            logger.warning("an I/O error that nobody waited for: %s", error)

    def check_open(self) -> None:
        """Raise StateStoreError if requests and waits are not accepted any more."""
        if self._is_closed:
            raise StateStoreError("the I/O engine is closed")

    def check_process(self) -> None:
        """Raise StateStoreError in a forked child: it has no threads, a wait would never end."""
        if os.getpid() != self._pid:
            raise StateStoreError(
                f"the I/O engine belongs to process {self._pid}, not to its child"
            )

    def forget(self, request: _Submitted) -> None:
        """Take a settled request out of those in flight."""
        with self._lock:
            if request in self._in_flight:
                self._in_flight.remove(request)

    def _submit(self, request: _Submitted) -> Ticket:
        self.check_process()
        self.check_open()
        with self._lock:
            assert_compatible(request, list(self._in_flight))
            self._in_flight.append(request)
        for start in range(0, request.nbytes, self._chunk_bytes):
            request.chunks.append(self._run(self._move_chunk, request, start))
        return request

    def _settle_all(self) -> list[BaseException]:
        with self._lock:
            requests = list(self._in_flight)
        errors = [request.settle() for request in requests]
        for request in requests:
            self.forget(request)
        return [error for error in errors if error is not None]

    def _move_chunk(self, request: _Submitted, start: int) -> None:
        if request.has_failed:
            return
        view = request.buffer[start : start + self._chunk_bytes]
        began = time.perf_counter()
        try:
            if request.operation == "read":
                request.file.read_into(request.offset + start, view)
            else:
                request.file.write_from(request.offset + start, view)
        except BaseException:
            request.has_failed = True
            raise
        seconds = time.perf_counter() - began
        moved = (
            IoCounters(bytes_read=view.nbytes, read_seconds=seconds)
            if request.operation == "read"
            else IoCounters(bytes_written=view.nbytes, write_seconds=seconds)
        )
        with self._lock:
            self._counters += moved

    @abc.abstractmethod
    def _run(
        self, move: Callable[[_Submitted, int], None], request: _Submitted, start: int
    ) -> Future[None]:
        """Move the chunk of a request that begins at byte ``start``, now or on a thread."""

    @abc.abstractmethod
    def _stop(self) -> None:
        """Block until no chunk runs or will run."""


class SyncEngine(_Engine):
    """Performs a request when it is submitted: the reference for others, and a debug switch.

    Args:
        chunk_bytes: Largest transfer in one call to the file, in bytes.
    """

    def __init__(self, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        super().__init__(chunk_bytes)

    def _run(
        self, move: Callable[[_Submitted, int], None], request: _Submitted, start: int
    ) -> Future[None]:
        future: Future[None] = Future()
        try:
            move(request, start)
            future.set_result(None)
        except Exception as error:  # every kind waits in the ticket, as with threads
            future.set_exception(error)
        return future

    def _stop(self) -> None:
        """Nothing runs between two requests."""


class ThreadEngine(_Engine):
    """Performs the chunks of requests in a pool of threads, in order of submission.

    A request spreads over all threads; a read submitted behind writes waits for a free one. At exit
    the interpreter finishes what was submitted before it calls atexit functions.

    Args:
        num_threads: Transfers at the same time.
        chunk_bytes: Largest transfer in one call to the file, in bytes.
    """

    def __init__(self, num_threads: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        if num_threads <= 0:
            raise ValueError(f"num_threads must be positive, not {num_threads}")
        super().__init__(chunk_bytes)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="nvme-state-store")

    def _run(
        self, move: Callable[[_Submitted, int], None], request: _Submitted, start: int
    ) -> Future[None]:
        return self._pool.submit(move, request, start)

    def _stop(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
