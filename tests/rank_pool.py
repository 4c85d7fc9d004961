"""A pool of distributed ranks: runs many cases, each on fresh processes, without fresh imports.

    with RankPool() as pool:
        losses = pool.run(train, world_size=2, steps=5)     # list, one result for each rank

`run` calls a module-level function with the same keyword arguments on every rank. Ranks are forked
from a server that has installed the emulated device and imported Megatron (`tests.rank_process`),
so a case pays neither for imports nor for what earlier cases left behind, and a rank that dies of
SIGSEGV takes nothing with it.

Megatron is the one that `import megatron.core` finds in this process: the server inherits
`sys.path` and the environment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.processes import reserved_ports
from tests import rank_process
from tests.rank_process import Outcome, Rank

# multiprocessing has no public way to ask for these two or to end them.
_FORK_SERVER: Any = forkserver._forkserver
_RESOURCE_TRACKER: Any = resource_tracker._resource_tracker

# Environment of the fork server. One thread: see [Note: Forking after torch was imported].
SERVER_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCHDYNAMO_DISABLE": "1",
}

OF_DEVICE = {
    rank_process.EMULATED: {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
    rank_process.CUDA: {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # asks without initializing
}

# After the first failure the others get this long to report theirs, then they are killed.
_GRACE_S = 1.0
# A rank that is asked for its stack gets this long to write it.
_STACK_S = 5.0
# A rank that has sent its result gets this long to exit.
_EXIT_S = 10.0
_TAIL_CHARS = 4000
_KILLED = "killed because another rank failed"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank ended, if it did not return."""

    rank: int
    reason: str
    traceback: str
    output: str

    def __str__(self) -> str:
        parts = [f"---- rank {self.rank}: {self.reason}"]
        if self.traceback:
            parts.append(self.traceback.rstrip())
        if self.output:
            parts.append(f"-- last output of rank {self.rank}:\n{self.output.rstrip()}")
        return "\n".join(parts)


class RanksFailed(RuntimeError):
    """At least one rank did not return; the message tells about every such rank."""

    def __init__(self, case: str, world_size: int, failures: list[RankFailure]) -> None:
        self.failures = failures
        super().__init__(
            f"{case}: {len(failures)} of {world_size} ranks failed\n"
            + "\n".join(str(failure) for failure in failures)
        )


@dataclass(slots=True)
class _Running:
    """One started rank, seen from the pool."""

    rank: Rank
    process: BaseProcess
    channel: connection.Connection
    outcome: Outcome | None = None
    reason: str = ""

    @property
    def is_done(self) -> bool:
        return self.outcome is not None or bool(self.reason)

    @property
    def has_failed(self) -> bool:
        return bool(self.reason) or (self.outcome is not None and bool(self.outcome.traceback))

    def collect(self) -> None:
        """Take the outcome, or the reason of the death; call when either may be there."""
        if self.is_done:
            return
        if self.channel.poll():
            try:
                self.outcome = pickle.loads(self.channel.recv_bytes())
                return
            except EOFError:
                pass  # died; the exit code tells how
        if connection.wait([self.process.sentinel], timeout=5.0):
            self.process.join()
            self.reason = _describe_exit(self.process.exitcode)

    def end(self) -> None:
        """Let a rank that returned exit by itself; kill any other, and what a rank left behind."""
        if self.outcome is not None:
            self.process.join(_EXIT_S)
        pid = self.process.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # the rank's session, see `rank_process._isolate`
            if self.process.is_alive():
                self.process.kill()
        self.process.join()
        self.channel.close()

    def output(self) -> str:
        """Return all that the rank wrote to stdout and stderr."""
        return self.rank.log.read_text(errors="replace") if self.rank.log.exists() else ""

    def failure(self) -> RankFailure:
        """Describe the failure."""
        text = "" if self.outcome is None else self.outcome.traceback
        last_line = text.rstrip().rsplit("\n", 1)[-1]
        reason = self.reason or f"raised {last_line}"
        return RankFailure(self.rank.rank, reason, text, self.output()[-_TAIL_CHARS:])


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"exited with code {code} before it returned"


class RankPool:
    """Runs cases on ranks that are forked from one preloaded server.

    One pool at a time for a process, since multiprocessing has one fork server for a process.
    Thread: the creator's.
    """

    def __init__(self, timeout_s: float = 120.0, device: str = rank_process.EMULATED) -> None:
        """Start the server; its imports go on in the background.

        Args:
            timeout_s: how long a case may take, unless `run` says otherwise.
            device: what ranks run on, `rank_process.EMULATED` or `rank_process.CUDA`.

        Raises:
            RuntimeError: if this process has a fork server already.
        """
        if _FORK_SERVER._forkserver_pid is not None:
            raise RuntimeError("this process has a fork server already; close the other pool")
        self._owns_tracker = _RESOURCE_TRACKER._pid is None
        self._timeout_s = timeout_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([rank_process.__name__])
        self._logs = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._is_open = True
        self.outputs: list[str] = []
        # main() of the fork server ignores the sys.path it is given (CPython 3.12.1).
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        told = {**OF_DEVICE[device], rank_process.PRELOAD_MARK: device}
        with _environment(SERVER_ENVIRONMENT, PYTHONPATH=path, **told):
            forkserver.ensure_running()

    def run(
        self,
        case: Callable[..., Any],
        world_size: int = 1,
        *,
        timeout_s: float | None = None,
        environment: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `case(**kwargs)` on every rank of a new world; blocks until all are gone.

        Afterwards `outputs` holds what each rank wrote to stdout and stderr.

        Args:
            case: a module-level function; its result must be picklable plain data.
            world_size: number of ranks.
            timeout_s: after this long all ranks are killed.
            environment: variables that the ranks get in addition.
            **kwargs: passed to `case`.

        Returns:
            The result of each rank, in order.

        Raises:
            RanksFailed: if a rank raised, exited, died, or did not return in time.
        """
        if not self._is_open:
            raise RuntimeError("the pool is closed")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        call = pickle.dumps((case, kwargs))
        logs = Path(tempfile.mkdtemp(dir=self._logs))
        running: list[_Running] = []
        with reserved_ports() as port:
            try:
                for index in range(world_size):
                    log = logs / f"rank{index}.log"
                    rank = Rank(index, world_size, port, timeout_s, log, environment or {})
                    running.append(self._start(rank, call))
                _wait(running, time.monotonic() + timeout_s)
            finally:
                for each in running:
                    each.end()
                self.outputs = [each.output() for each in running]
        failures = [each.failure() for each in running if each.has_failed]
        failures.sort(key=lambda failure: failure.reason == _KILLED)  # causes first
        if failures:
            raise RanksFailed(case.__name__, world_size, failures)
        return [pickle.loads(each.outcome.result) for each in running if each.outcome is not None]

    def _start(self, rank: Rank, call: bytes) -> _Running:
        receiving, sending = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=rank_process.run_rank,
            args=(rank, sending, call),
            name=f"rank{rank.rank}",
        )
        process.start()
        sending.close()
        return _Running(rank, process, receiving)

    def close(self) -> None:
        """End the server and remove the logs; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        _FORK_SERVER._stop()
        if self._owns_tracker:
            _RESOURCE_TRACKER._stop()
        shutil.rmtree(self._logs, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _wait(running: list[_Running], deadline: float) -> None:
    """Collect outcomes until all ranks are done, one has failed, or time is up."""
    has_failed = False
    while True:
        pending = [each for each in running if not each.is_done]
        if not pending:
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        ready = connection.wait(
            [handle for each in pending for handle in (each.channel, each.process.sentinel)],
            timeout=left_s,
        )
        for each in pending:
            if each.channel in ready or each.process.sentinel in ready:
                each.collect()
        if not has_failed and any(each.has_failed for each in running):
            has_failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    _dump_stacks(pending)
    for each in pending:
        each.reason = _KILLED if has_failed else "timed out"


def _dump_stacks(pending: list[_Running]) -> None:
    """Let ranks write their Python stacks into their logs, to show where they hung."""
    written = [_log_size(each) for each in pending]
    for each in pending:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.process.pid or 0, signal.SIGUSR1)
    end = time.monotonic() + _STACK_S  # a busy machine takes its time
    while time.monotonic() < end and any(
        each.process.is_alive() and _log_size(each) == size
        for each, size in zip(pending, written, strict=True)
    ):
        time.sleep(0.05)
    time.sleep(0.2)


def _log_size(running: _Running) -> int:
    log = running.rank.log
    return log.stat().st_size if log.exists() else 0


@contextlib.contextmanager
def _environment(variables: dict[str, str], **more: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(variables, **more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
