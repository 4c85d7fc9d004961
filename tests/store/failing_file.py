"""Files that fail on demand, an engine driven by hand, small filesystems, and small processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from megatron.core.optimizer.nvme_state_store import errors
from megatron.core.optimizer.nvme_state_store.errors import StateStoreError
from megatron.core.optimizer.nvme_state_store.io_request import (
    IoCounters,
    Operation,
    Request,
    Span,
    Waitable,
    assert_compatible,
)
from megatron.core.optimizer.nvme_state_store.state_file import StateFile
from megatron.core.optimizer.nvme_state_store.system_calls import OS_LAYER, Layer

PATIENCE_S = 60.0
"""How long something that must happen may take before a test fails, in seconds."""

Action = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
"""Called with the real system call and its arguments; returns what the call returns."""


@dataclass
class Gate:
    """Holds a system call: set ``is_open`` to let it go on."""

    is_open: threading.Event = field(default_factory=threading.Event)
    is_reached: threading.Event = field(default_factory=threading.Event)

    def pass_through(self) -> None:
        self.is_reached.set()
        assert self.is_open.wait(PATIENCE_S), "nobody opened the gate"


class FailingLayer:
    """The real system calls, except for the n-th ones that a test chose (counted from 1)."""

    def __init__(self, inner: Layer = OS_LAYER) -> None:
        self.inner = inner
        self.count: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._actions: dict[tuple[str, int], Action] = {}

    def on(self, call: str, action: Action, nth: int = 1, times: int = 1) -> None:
        """Replace calls ``nth`` to ``nth + times - 1`` of those that are still to come."""
        for number in range(nth, nth + times):
            self._actions[call, self.count[call] + number] = action

    def fail(self, call: str, errno: int, nth: int = 1, times: int = 1) -> None:
        """Do nothing and report ``errno``."""
        self.cut(call, 0, errno, nth, times)

    def shorten(self, call: str, nbytes: int, nth: int = 1, times: int = 1) -> None:
        """Move no more than ``nbytes`` and say so."""
        self.on(call, lambda real, a: real(*_first(a, nbytes)) if nbytes else 0, nth, times)

    def cut(self, call: str, nbytes: int, errno: int, nth: int = 1, times: int = 1) -> None:
        """Move ``nbytes``, then report ``errno``."""

        def action(real: Callable[..., Any], arguments: tuple[Any, ...]) -> NoReturn:
            if nbytes:
                real(*_first(arguments, nbytes))
            raise OSError(errno, os.strerror(errno))

        self.on(call, action, nth, times)

    def corrupt(self, call: str, position: int, nth: int = 1) -> None:
        """Move all bytes, the one at ``position`` of the buffer with a flipped bit."""

        def action(real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
            fd, buffer, offset = arguments
            if call == "preadv":
                moved = real(*arguments)
                buffer[0][position] ^= 1
                return moved
            changed = bytearray(buffer)
            changed[position] ^= 1
            return real(fd, memoryview(changed), offset)

        self.on(call, action, nth)

    def omit(self, call: str, result: Any = None, nth: int = 1, times: int = 1) -> None:
        """Do nothing and report success."""
        self.on(call, lambda real, arguments: result, nth, times)

    def delay(self, call: str, nth: int = 1) -> Gate:
        """Wait until the test opens the gate, then do it."""
        gate = Gate()

        def action(real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
            gate.pass_through()
            return real(*arguments)

        self.on(call, action, nth)
        return gate

    def __getattr__(self, call: str) -> Callable[..., Any]:
        real = getattr(self.inner, call)

        def counted(*arguments: Any) -> Any:
            with self._lock:
                self.count[call] += 1
                action = self._actions.pop((call, self.count[call]), None)
            return real(*arguments) if action is None else action(real, arguments)

        return counted


def _first(arguments: tuple[Any, ...], nbytes: int) -> tuple[Any, ...]:
    fd, buffer, offset = arguments
    if isinstance(buffer, list):
        return fd, [buffer[0][:nbytes]], offset
    return fd, buffer[:nbytes], offset


class HandTicket(Request):
    """A request that is performed when the test says so."""

    def __init__(self, engine: HandEngine, operation: Operation, *where: Any) -> None:
        super().__init__(operation, *where)
        self.error: BaseException | None = None
        self.span: Span | None = None
        self._is_done = False
        self._engine = engine

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self

    def __repr__(self) -> str:
        return str(self)

    def is_done(self) -> bool:
        return self._is_done

    def perform(self) -> None:
        """Move the bytes, if what it comes after has not failed; an error waits in the ticket."""
        assert not self._is_done, f"{self} was completed before"
        try:
            self._await_predecessor()
            begin = time.monotonic()
            if self.operation == "read":
                self.file.read_into(self.offset, self.buffer)
            else:
                self.file.write_from(self.offset, self.buffer)
            self.span = Span(begin, time.monotonic())
        except RuntimeError as error:  # a StateStoreError, or what CUDA raises
            self.error = error
        self._is_done = True

    def _await_predecessor(self) -> None:
        for each in self.after:
            if not isinstance(each, HandTicket):
                each.wait()
                continue
            assert each.is_done(), f"{self} was performed before the {each} is done"
            if each.error is not None:
                raise each.error

    def fail(self, error: BaseException) -> None:
        """End with ``error``, no byte moved."""
        assert not self._is_done, f"{self} was completed before"
        self._is_done, self.error = True, error

    def wait(self) -> None:
        self._engine.log.append(f"wait {self}")
        if not self._is_done:
            self._engine.on_wait(self)
        assert self._is_done, f"waited for a {self}, which the test has not completed"
        self._engine.forget(self)
        if self.error is not None:
            raise self.error
        if self._engine.is_closed:
            raise StateStoreError("the I/O engine is closed")


class HandEngine:
    """An `IoEngine` whose requests the test performs one by one, in any order.

    A request is not performed before what it comes after: that fails the test.

    Args:
        on_wait: Called with a ticket that is waited for but not done; may `perform` or `fail` it
            or others. Without it such a wait, which would block for ever, fails the test.
    """

    def __init__(self, on_wait: Callable[[HandTicket], None] = lambda ticket: None) -> None:
        self.on_wait = on_wait
        self.in_flight: list[HandTicket] = []
        self.failed: list[HandTicket] = []
        self.log: list[str] = []
        self.is_closed = False
        self.counters = IoCounters()

    @property
    def pending(self) -> list[HandTicket]:
        """Tickets of requests that are not performed yet, in order of submission."""
        return [ticket for ticket in self.in_flight if not ticket.is_done()]

    def read(
        self, file: StateFile, offset: int, buffer: memoryview, *after: Waitable
    ) -> HandTicket:
        return self._submit(HandTicket(self, "read", file, offset, buffer, after))

    def write(
        self, file: StateFile, offset: int, buffer: memoryview, *after: Waitable
    ) -> HandTicket:
        return self._submit(HandTicket(self, "write", file, offset, buffer, after))

    def _submit(self, ticket: HandTicket) -> HandTicket:
        if self.is_closed:
            raise StateStoreError("the I/O engine is closed")
        assert_compatible(ticket, list(self.in_flight))
        self.log.append(f"submit {ticket}")
        self.in_flight.append(ticket)
        return ticket

    def forget(self, ticket: HandTicket) -> None:
        """Take a ticket that was waited for, and its predecessors, out of those in flight."""
        for one in list(ticket.predecessors()):
            if one in self.in_flight:
                assert isinstance(one, HandTicket)
                self.in_flight.remove(one)
                self.failed += [one] if one.error is not None else []
            one.let_go()
        for tickets in (self.in_flight, self.failed):
            if ticket in tickets:
                tickets.remove(ticket)
        ticket.let_go()

    def drain(self) -> None:
        failures = []
        for ticket in sorted([*self.failed, *self.in_flight], key=lambda one: one.number):
            try:
                ticket.wait()
            except RuntimeError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        self.is_closed = True
        for ticket in self.pending:
            ticket.fail(StateStoreError(f"{ticket}: the I/O engine was closed before it was done"))


def missing_ability(reason: str) -> NoReturn:
    """Skip the test; in CI, where every ability must be there, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must be able to run this: {reason}")
    pytest.skip(reason)


@contextlib.contextmanager
def mounted(where: Path, *arguments: str) -> Iterator[Path]:
    """Mount with these arguments of ``mount`` at ``where``, which is made."""
    if os.geteuid() != 0:
        missing_ability("only root can mount a small filesystem")
    where.mkdir()
    command = ["mount", *arguments, str(where)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        missing_ability(f"{' '.join(command)}: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def small_tmpfs(where: Path, options: str = "size=4m") -> contextlib.AbstractContextManager[Path]:
    """A filesystem in memory, of 4 MiB unless ``options`` say otherwise."""
    return mounted(where, "-t", "tmpfs", "-o", f"mode=0700,{options}", "tmpfs")


def start_process(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start Python on ``script``, which finds the store's modules in ``nvme_state_store``.

    They come without Megatron and without site-packages: a start takes 50 ms, not 6 s, and these
    modules are known to need the standard library alone.
    """
    package = str(Path(errors.__file__).parent)
    preamble = (
        "import os, sys, types\n"
        "from pathlib import Path\n"
        "sys.modules['nvme_state_store'] = types.ModuleType('nvme_state_store')\n"
        f"sys.modules['nvme_state_store'].__path__ = [{package!r}]\n"
        "from nvme_state_store.rank_directory import RankDirectory\n"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", preamble + script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
