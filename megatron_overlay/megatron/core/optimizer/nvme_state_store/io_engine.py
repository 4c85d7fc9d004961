"""Reads and writes of state files with tickets: what was submitted can be waited for.

The rules are in `io_request`: [Note: In flight], [Note: After] and [Note: Errors].

[Note: No deadlock]
What a request comes after is waited for by the engine's threads, which serve the requests of one
kind in order of submission. One that has to wait holds up those of its kind behind it. It is no
deadlock: a ticket exists only after its submission, so what a request comes after was submitted
earlier. Of all requests that are not done take the one submitted first. What it comes after is
done, and no thread is busy with an earlier one; so it moves. This needs (both asserted) that chunks
enter the queues in order of submission, so one thread submits at a time; and that no thread of the
engine submits. It also needs that an event ends by itself, not by way of a request that is
submitted later: nothing can assert that.

Alternatives considered: memory maps (write-back is out of our hands, an I/O error is a SIGBUS);
io_uring (often refused in containers); libaio (asynchronous with direct I/O only).
"""

from __future__ import annotations

import abc
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from .errors import StateStoreError
from .io_request import IoCounters, Operation, Request, Span, Ticket, Waitable, assert_compatible
from .state_file import StateFile

logger = logging.getLogger(__name__)

DEFAULT_CHUNK_BYTES = 8 << 20
"""A multiple of 4096, or no chunk but the first would be aligned for direct I/O."""
DEFAULT_NUM_READERS = DEFAULT_NUM_WRITERS = 4
"""Measured on a virtual disk: 2 to 16 make no difference; on tmpfs: 4 move twice what one does."""
_THREAD_NAME = "nvme-state-store"


def _discard(requests: list[_Submitted], request: _Submitted) -> bool:
    """Remove ``request`` if it is there; return whether it was."""
    try:
        requests.remove(request)
    except ValueError:
        return False
    return True


class _Submitted(Request):
    """A request of an engine of this module, and its ticket."""

    def __init__(
        self,
        engine: _Engine,
        operation: Operation,
        file: StateFile,
        offset: int,
        view: memoryview,
        after: Sequence[Waitable],
    ) -> None:
        super().__init__(operation, file, offset, view, after)
        self.chunks: list[Future[None]] = []
        self.has_failed = False  # its chunks that have not begun need not
        self.engine = engine
        self.begin = self.end = 0.0
        self._has_begun = False
        self._begins = threading.Lock()

    @property
    def span(self) -> Span | None:
        """See `Ticket.span`."""
        if not self.is_done() or self.outcome() is not None:
            return None
        return Span(self.begin, self.end)

    def is_done(self) -> bool:
        """See `Ticket.is_done`."""
        return all(chunk.done() for chunk in self.chunks)

    def wait(self) -> None:
        """See `Ticket.wait`."""
        self.engine.check_process()
        error = self.outcome()
        self.engine.forget(self)
        if error is not None:
            raise error
        self.engine.check_open()

    def outcome(self) -> BaseException | None:
        """Block until no chunk is running; return the error at the lowest offset."""
        first: BaseException | None = None
        for chunk in self.chunks:
            try:
                error = chunk.exception()
            except CancelledError:
                error = StateStoreError(f"{self}: the I/O engine was closed before it was done")
            first = first or error
        return first

    def begin_after(self) -> None:
        """Block until what it comes after is done. Each chunk calls it before it moves.

        Raises:
            Exception: that has failed; only one chunk raises it, and `has_failed` tells the others.
        """
        with self._begins:
            if self._has_begun or self.has_failed:
                return
            try:
                for each in self.after:
                    if isinstance(each, _Submitted):
                        # Not its wait, after which drain would not tell its error any more.
                        error = each.outcome()
                        if error is not None:
                            raise error
                    else:
                        each.wait()
            except BaseException:
                self.has_failed = True
                raise
            self._has_begun = True
            self.begin = time.monotonic()


class _Engine(abc.ABC):
    """What both engines share: what is in flight, the chunks of a request, and the counters."""

    def __init__(self, chunk_bytes: int) -> None:
        if chunk_bytes <= 0:
            raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._submission = threading.Lock()
        self._in_flight: list[_Submitted] = []
        self._failed: list[_Submitted] = []
        """In flight no more, since a request after them was waited for; their errors are told by
        `drain`."""
        self._counters = IoCounters()
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def counters(self) -> IoCounters:
        """See `IoEngine.counters`."""
        with self._lock:
            return self._counters

    def read(self, file: StateFile, offset: int, buffer: memoryview, *after: Waitable) -> Ticket:
        """See `IoEngine.read`."""
        return self._submit(_Submitted(self, "read", file, offset, buffer, after))

    def write(self, file: StateFile, offset: int, buffer: memoryview, *after: Waitable) -> Ticket:
        """See `IoEngine.write`."""
        return self._submit(_Submitted(self, "write", file, offset, buffer, after))

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
        """Take a request whose outcome was told out of those in flight, and its predecessors."""
        # None of them moves any more, whatever their engine and outcome.
        predecessors = [one for one in request.predecessors() if isinstance(one, _Submitted)]
        for one in predecessors:
            one.engine._pass_over(one)
        with self._lock:
            _discard(self._in_flight, request)
            _discard(self._failed, request)
        request.let_go()

    def _pass_over(self, request: _Submitted) -> None:
        has_failed = request.outcome() is not None
        with self._lock:
            if _discard(self._in_flight, request) and has_failed:
                self._failed.append(request)
        request.let_go()

    def _submit(self, request: _Submitted) -> Ticket:
        self.check_process()
        self.check_open()
        is_alone = self._submission.acquire(blocking=False)
        assert is_alone, f"{request} was submitted while another one is: one thread at a time"
        try:
            with self._lock:
                assert_compatible(request, list(self._in_flight))
                self._in_flight.append(request)
            # An empty request has a chunk, too: it waits for what it comes after.
            for start in range(0, max(request.nbytes, 1), self._chunk_bytes):
                request.chunks.append(self._run(self._move_chunk, request, start))
        finally:
            self._submission.release()
        return request

    def _settle_all(self) -> list[BaseException]:
        with self._lock:
            requests = sorted([*self._failed, *self._in_flight], key=lambda one: one.number)
        errors = [request.outcome() for request in requests]
        for request in requests:
            self.forget(request)
        return [error for error in errors if error is not None]

    def _move_chunk(self, request: _Submitted, start: int) -> None:
        request.begin_after()
        if request.has_failed:
            return
        view = request.buffer[start : start + self._chunk_bytes]
        began = time.monotonic()
        try:
            if request.operation == "read":
                request.file.read_into(request.offset + start, view)
            else:
                request.file.write_from(request.offset + start, view)
        except BaseException:
            request.has_failed = True
            raise
        ended = time.monotonic()
        seconds = ended - began
        moved = (
            IoCounters(bytes_read=view.nbytes, read_seconds=seconds)
            if request.operation == "read"
            else IoCounters(bytes_written=view.nbytes, write_seconds=seconds)
        )
        with self._lock:
            self._counters += moved
            request.end = max(request.end, ended)

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
    """Performs reads in one pool of threads and writes in another, each in order of submission.

    So a read never queues behind writes. A request spreads over all threads of its pool. At exit
    the interpreter finishes what was submitted before it calls atexit functions.

    Args:
        num_readers: Reads at the same time.
        num_writers: Writes at the same time.
        chunk_bytes: Largest transfer in one call to the file, in bytes.
    """

    def __init__(
        self,
        num_readers: int = DEFAULT_NUM_READERS,
        num_writers: int = DEFAULT_NUM_WRITERS,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        if num_readers <= 0 or num_writers <= 0:
            raise ValueError(
                f"num_readers {num_readers} and num_writers {num_writers} must be positive"
            )
        super().__init__(chunk_bytes)
        self._pools: dict[Operation, ThreadPoolExecutor] = {
            "read": ThreadPoolExecutor(num_readers, f"{_THREAD_NAME}-read"),
            "write": ThreadPoolExecutor(num_writers, f"{_THREAD_NAME}-write"),
        }

    def _submit(self, request: _Submitted) -> Ticket:
        name = threading.current_thread().name
        assert not name.startswith(_THREAD_NAME), f"{request} was submitted by {name}"
        return super()._submit(request)

    def _run(
        self, move: Callable[[_Submitted, int], None], request: _Submitted, start: int
    ) -> Future[None]:
        return self._pools[request.operation].submit(move, request, start)

    def _stop(self) -> None:
        # Cancelled everywhere first: one that runs may wait for one of the other pool.
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools.values():
            pool.shutdown(wait=True)
