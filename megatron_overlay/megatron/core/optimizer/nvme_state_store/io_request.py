"""Requests of reads and writes, and what every engine promises about them.

[Note: In flight]
A request is in flight from its submission until its `Ticket.wait`, that of a request that comes
after it, or the engine's `drain` returns, not merely until its bytes have moved. So whether these
rules hold does not depend on timing, and the synchronous engine finds the same mistakes as an
asynchronous one. While in flight together:

* No two requests overlap in a file, unless both are reads. A read of bytes that are being written
  may see the old ones, the new ones or a mixture; so wait for the write first.
* No two requests overlap in memory, unless both are writes (which only look at it). A slot is
  not filled again before the write out of it was waited for.

Both are asserted, except between a request and what it comes after (see below): these two never
move at the same time. Requests on different ranges are performed in any order. The file is told by
its object: two `StateFile` objects of one path are beyond this check. So is a read-only buffer.

[Note: After]
A request may be submitted ``after`` tickets and events of the device. Its bytes begin to move
when that is done; if that fails, they never move and the request fails with the same error. So a
slot can be filled again behind the write out of it, without anybody waiting in between.

[Note: Errors]
An error stays in its ticket until `wait` raises it, in every engine, so that the order of raising
does not depend on the engine. What nobody waited for is raised by `drain`: no error is lost. To
come after a failed request, and to fail with its error, is no wait for it: `drain` still tells. A
wait returns or raises only when nothing touches the request's buffer any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

from .memory import address_of
from .state_file import StateFile

Operation = Literal["read", "write"]
_numbers = itertools.count()


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


@dataclass(frozen=True, slots=True)
class Span:
    """When the bytes of a request moved, by `time.monotonic`, in seconds.

    Attributes:
        begin: Start of its first transfer; what it came after was done by then.
        end: End of its last transfer.
    """

    begin: float
    end: float


class Waitable(Protocol):
    """What a request can come after: a `Ticket`, or an event of the device in a wrapper."""

    def wait(self) -> None:
        """Block until it is done; called at most once a request, by a thread of the engine.

        Raises:
            Exception: it has failed, and so does the request that comes after it.
        """
        ...


class Ticket(Protocol):
    """One submitted request."""

    @property
    def span(self) -> Span | None:
        """When its bytes moved; None before that is over, and for a request that has failed."""
        ...

    def is_done(self) -> bool:
        """Return without blocking whether nothing moves any more; also true if it has failed.

        It tells nothing of errors, and the request stays in flight: still wait for it.
        """
        ...

    def wait(self) -> None:
        """Block until the bytes have moved and nothing touches the buffer any more.

        May be called again, and by any thread; an error is then raised again.

        Raises:
            StateFileError: they have not; of several failures the one at the lowest offset.
            StateStoreError: the engine is closed.
            Exception: what this request came after has failed with this error.
        """
        ...


class IoEngine(Protocol):
    """What performs requests.

    Thread: submit, drain and close from one thread at a time, never from within `Waitable.wait`.
    """

    @property
    def counters(self) -> IoCounters:
        """What was moved so far."""
        ...

    def read(self, file: StateFile, offset: int, buffer: memoryview, *after: Waitable) -> Ticket:
        """Begin to fill ``buffer`` with the bytes at ``offset``.

        Args:
            file: Read at bytes ``offset`` to ``offset + buffer.nbytes``.
            offset: In bytes.
            buffer: Filled.
            *after: No byte moves before these are done. See [Note: After].

        Raises:
            ValueError: the range does not lie within the file, or the buffer is unsuited.
            StateStoreError: the engine is closed, or belongs to the parent of this process.
        """
        ...

    def write(self, file: StateFile, offset: int, buffer: memoryview, *after: Waitable) -> Ticket:
        """Begin to write ``buffer`` at ``offset``; it must not change before the wait.

        Args:
            file: Written at bytes ``offset`` to ``offset + buffer.nbytes``.
            offset: In bytes.
            buffer: Written. What it comes after may still fill it.
            *after: No byte moves before these are done. See [Note: After].

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
            Exception: likewise, of what a request came after.
        """
        ...

    def close(self) -> None:
        """Block until nothing touches a file or buffer, and accept nothing any more.

        Requests that have not begun are cancelled, and all tickets raise from now on: drain first.
        A second call does nothing. Raises nothing; logs errors that nobody has waited for.
        """
        ...


class Request:
    """One read or write: where in which file, and which memory. The engines' tickets are requests.

    Attributes:
        operation: ``read`` or ``write``.
        file: The file.
        offset: Where in the file it begins, in bytes.
        buffer: Its memory as bytes; empty once it is in flight no more, so that the memory can be
            freed.
        after: What it comes after; empty once it is in flight no more.
        number: Counts requests in order of their making.
    """

    def __init__(
        self,
        operation: Operation,
        file: StateFile,
        offset: int,
        buffer: memoryview,
        after: Sequence[Waitable] = (),
    ) -> None:
        if operation == "read" and buffer.readonly:
            raise ValueError(f"{file.path}: cannot read into a read-only buffer")
        self.operation = operation
        self.file = file
        self.offset = offset
        self.buffer = file.check_range(offset, buffer)
        self.after = tuple(after)
        self.number = next(_numbers)
        self.nbytes = buffer.nbytes
        self.address = address_of(self.buffer)

    def __str__(self) -> str:
        end = self.offset + self.nbytes
        return f"{self.operation} of bytes {self.offset} to {end} of {self.file.path}"

    def predecessors(self) -> Iterator[Request]:
        """Yield the requests that it comes after, directly or not, each once."""
        seen: set[int] = set()
        left = list(self.after)
        while left:
            one = left.pop()
            if isinstance(one, Request) and one.number not in seen:
                seen.add(one.number)
                yield one
                left += one.after

    def let_go(self) -> None:
        """Forget memory and predecessors: the request is in flight no more."""
        self.buffer = memoryview(b"")
        self.after = ()

    def conflict(self, other: Request) -> str:
        """Say what forbids ``self`` and ``other`` to move at the same time; empty if nothing."""
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
    """Assert that ``request`` may be in flight with all of ``in_flight`` that it comes not after.

    They were all submitted before it.
    """
    predecessors = list(request.predecessors())
    for other in in_flight:
        if not any(other is one for one in predecessors):
            conflict = request.conflict(other)
            assert not conflict, (
                f"{request} while {other} is in flight: {conflict}; wait for it first, or submit "
                "the request after it"
            )
