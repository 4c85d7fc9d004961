"""Engines move the same bytes, keep errors for who waits, and refuse what cannot be in flight."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store.errors import StateFileError, StateStoreError
from megatron.core.optimizer.nvme_state_store.io_engine import (
    IoCounters,
    IoEngine,
    SyncEngine,
    ThreadEngine,
)
from megatron.core.optimizer.nvme_state_store.state_file import StateFile

from tests.store.failing_file import (
    PATIENCE_S,
    Action,
    FailingLayer,
    Gate,
    HandEngine,
    HandTicket,
)

CHUNK = 1000
SIZE = 20 * CHUNK

Make = Callable[[], Any]


@pytest.fixture(
    params=[
        lambda: SyncEngine(CHUNK),
        lambda: ThreadEngine(1, CHUNK),
        lambda: ThreadEngine(3, CHUNK),
    ],
    ids=["sync", "one thread", "three threads"],
)
def engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    """Each engine that ships, with small chunks."""
    made = request.param()
    yield made
    made.close()


@pytest.fixture(
    params=[lambda: SyncEngine(CHUNK), lambda: ThreadEngine(2, CHUNK), HandEngine],
    ids=["sync", "threads", "by hand"],
)
def strict_engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    """Each engine, also the tests' own: all have the rules of what may be in flight together."""
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[IoEngine]:
    made = ThreadEngine(2, CHUNK)
    yield made
    made.close()


@pytest.fixture
def layer() -> FailingLayer:
    return FailingLayer()


@pytest.fixture
def file(tmp_path: Path, layer: FailingLayer) -> Iterator[StateFile]:
    with StateFile.create(tmp_path / "state.bin", SIZE, layer) as made:
        layer.count.clear()
        yield made


def pattern(nbytes: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray((seed + index) % 251 for index in range(nbytes)))


def empty(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


# Bytes


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 3])
def test_what_was_written_is_read(nbytes: int, engine: Any, file: StateFile) -> None:
    engine.write(file, 17, pattern(nbytes)).wait()
    buffer = empty(nbytes)
    engine.read(file, 17, buffer).wait()

    assert buffer == pattern(nbytes)


def test_many_requests_may_be_in_flight(engine: Any, file: StateFile) -> None:
    for number in range(10):
        engine.write(file, number * 2 * CHUNK, pattern(2 * CHUNK, number))
    engine.drain()
    buffers = [empty(2 * CHUNK) for _ in range(10)]
    tickets = [engine.read(file, n * 2 * CHUNK, buffers[n]) for n in reversed(range(10))]
    for ticket in tickets:
        ticket.wait()

    assert all(buffers[number] == pattern(2 * CHUNK, number) for number in range(10))


def test_a_request_is_moved_in_chunks(engine: Any, file: StateFile, layer: FailingLayer) -> None:
    engine.write(file, 0, pattern(7 * CHUNK + 3)).wait()

    assert layer.count["pwrite"] == 8


def test_bytes_and_seconds_are_counted(engine: Any, file: StateFile) -> None:
    assert engine.counters == IoCounters()
    engine.write(file, 0, pattern(5 * CHUNK)).wait()
    before = engine.counters
    engine.read(file, 0, empty(3 * CHUNK)).wait()
    engine.read(file, 0, empty(1)).wait()

    interval = engine.counters - before
    assert (before.bytes_read, before.bytes_written) == (0, 5 * CHUNK)
    assert (interval.bytes_read, interval.bytes_written) == (3 * CHUNK + 1, 0)
    assert before.write_seconds > 0
    assert interval.read_seconds > 0
    assert interval.write_seconds == before.read_seconds == 0
    assert before + interval == engine.counters


def test_bytes_that_did_not_move_are_not_counted(
    engine: Any, file: StateFile, layer: FailingLayer
) -> None:
    layer.fail("pwrite", errno.EIO)
    with pytest.raises(StateFileError):
        engine.write(file, 0, pattern(CHUNK)).wait()

    assert engine.counters == IoCounters()


# Errors


def test_an_error_waits_in_its_ticket(engine: Any, file: StateFile, layer: FailingLayer) -> None:
    layer.fail("pwrite", errno.EIO)
    failed = engine.write(file, 0, pattern(CHUNK))
    for _ in range(2):
        with pytest.raises(StateFileError) as caught:
            failed.wait()
        assert (caught.value.offset, caught.value.errno) == (0, errno.EIO)

    engine.write(file, CHUNK, pattern(CHUNK)).wait()
    engine.drain()


def test_the_chunk_that_failed_is_named(engine: Any, file: StateFile, layer: FailingLayer) -> None:
    engine.write(file, 0, pattern(CHUNK)).wait()
    os.truncate(file.path, 5 * CHUNK + 10)
    with pytest.raises(StateFileError) as caught:
        engine.read(file, 2 * CHUNK, empty(6 * CHUNK)).wait()

    error = caught.value
    assert (error.offset, error.expected, error.actual) == (5 * CHUNK, CHUNK, 10)


def test_the_rest_of_a_failed_request_is_not_begun(file: StateFile, layer: FailingLayer) -> None:
    for engine in (SyncEngine(CHUNK), ThreadEngine(1, CHUNK)):
        layer.count.clear()
        layer.fail("pwrite", errno.ENOSPC, nth=2)
        with pytest.raises(StateFileError, match="No space left"):
            engine.write(file, 0, pattern(9 * CHUNK)).wait()
        assert layer.count["pwrite"] == 2
        engine.close()


def test_drain_raises_what_nobody_waited_for(
    engine: Any, file: StateFile, layer: FailingLayer
) -> None:
    tickets = []
    for number, code in enumerate([errno.EIO, errno.ENOSPC, errno.EDQUOT]):
        layer.fail("pwrite", code)
        tickets.append(engine.write(file, number * CHUNK, pattern(CHUNK)))
        # One after the other, so that each meets its own fault also with several threads.
        wait_until_moved(layer, number + 1)
    with pytest.raises(StateFileError):
        tickets[0].wait()

    with pytest.raises(StateFileError) as caught:
        engine.drain()

    assert caught.value.errno == errno.ENOSPC
    assert caught.value.__notes__ == ["and 1 more requests failed"]
    engine.drain()
    with pytest.raises(StateFileError, match="quota"):
        tickets[2].wait()


def wait_until_moved(layer: FailingLayer, count: int) -> None:
    while layer.count["pwrite"] < count:
        threading.Event().wait(0.001)


def test_errors_come_in_the_order_of_waiting(file: StateFile, layer: FailingLayer) -> None:
    """Whatever the engine: the caller sees the read's error first if it waits for that first."""
    for engine in (SyncEngine(CHUNK), ThreadEngine(2, CHUNK), HandEngine(HandTicket.perform)):
        layer.count.clear()
        layer.fail("pwrite", errno.ENOSPC)
        layer.fail("preadv", errno.EIO)
        write = engine.write(file, 0, pattern(CHUNK))
        read = engine.read(file, CHUNK, empty(CHUNK))
        with pytest.raises(StateFileError, match="read failed"):
            read.wait()
        with pytest.raises(StateFileError, match="write failed"):
            write.wait()
        engine.close()


def test_a_wait_outlasts_every_chunk_although_one_has_failed(
    threads: Any, file: StateFile, layer: FailingLayer
) -> None:
    """Or the caller would use a buffer that a thread still fills."""
    gate = layer.delay("preadv", nth=1)
    layer.fail("preadv", errno.EIO, nth=2)
    ticket = threads.read(file, 0, empty(2 * CHUNK))
    assert gate.is_reached.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ticket.wait)
        while layer.count["preadv"] < 2:
            threading.Event().wait(0.001)
        assert not waiting.done()
        gate.is_open.set()
        with pytest.raises(StateFileError, match=f"offset {CHUNK}"):
            waiting.result(PATIENCE_S)


def test_of_several_failed_chunks_the_first_in_the_file_is_told(
    threads: Any, file: StateFile, layer: FailingLayer
) -> None:
    gates = [Gate(), Gate()]
    for number, gate in enumerate(gates):
        layer.on("pwrite", failing_behind(gate), nth=number + 1)
    ticket = threads.write(file, 0, pattern(2 * CHUNK))
    for gate in gates:
        assert gate.is_reached.wait(PATIENCE_S)
    for gate in gates:
        gate.is_open.set()

    with pytest.raises(StateFileError, match="at offset 0:"):
        ticket.wait()


def failing_behind(gate: Gate) -> Action:
    def action(real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        gate.pass_through()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return action


def test_mistakes_are_told_at_submission(strict_engine: Any, file: StateFile) -> None:
    with pytest.raises(ValueError, match="do not lie within"):
        strict_engine.write(file, SIZE - 1, pattern(2))
    with pytest.raises(ValueError, match="read-only"):
        strict_engine.read(file, 0, memoryview(b"constant"))
    strict_engine.drain()


# In flight together


def test_ranges_that_overlap_in_the_file_are_refused(strict_engine: Any, file: StateFile) -> None:
    """Whether or not the bytes have moved already: until the wait."""
    strict_engine.write(file, CHUNK, pattern(CHUNK))
    for offset, nbytes in [(CHUNK, CHUNK), (0, CHUNK + 1), (2 * CHUNK - 1, 5), (CHUNK + 5, 1)]:
        with pytest.raises(AssertionError, match="overlap in the file"):
            strict_engine.read(file, offset, empty(nbytes))
        with pytest.raises(AssertionError, match="overlap in the file"):
            strict_engine.write(file, offset, pattern(nbytes))
    strict_engine.read(file, 0, empty(CHUNK))
    strict_engine.read(file, 2 * CHUNK, empty(CHUNK))
    strict_engine.read(file, CHUNK + 5, empty(0))


def test_a_write_under_a_read_is_refused_and_a_second_read_is_not(
    strict_engine: Any, file: StateFile
) -> None:
    strict_engine.read(file, 0, empty(CHUNK))
    strict_engine.read(file, 0, empty(CHUNK))
    with pytest.raises(AssertionError, match=r"write of bytes 0 to 10 .* while read of bytes"):
        strict_engine.write(file, 0, pattern(10))


def test_memory_is_not_filled_while_it_is_in_use(strict_engine: Any, file: StateFile) -> None:
    slot = empty(2 * CHUNK)
    strict_engine.write(file, 0, slot[:CHUNK])
    strict_engine.write(file, 4 * CHUNK, slot[:CHUNK])
    with pytest.raises(AssertionError, match="same memory"):
        strict_engine.read(file, 8 * CHUNK, slot[CHUNK - 1 :])
    strict_engine.read(file, 8 * CHUNK, slot[CHUNK:])
    with pytest.raises(AssertionError, match="same memory"):
        strict_engine.write(file, 12 * CHUNK, slot[CHUNK:])


def test_files_do_not_overlap_each_other(
    strict_engine: Any, file: StateFile, tmp_path: Path
) -> None:
    with StateFile.create(tmp_path / "other.bin", SIZE) as other:
        strict_engine.write(file, 0, pattern(CHUNK))
        strict_engine.write(other, 0, pattern(CHUNK))
        strict_engine.close()


@pytest.mark.parametrize("end", ["wait", "drain"])
def test_what_was_waited_for_is_in_flight_no_more(end: str, engine: Any, file: StateFile) -> None:
    slot = pattern(CHUNK)
    ticket = engine.write(file, 0, slot)
    ticket.wait() if end == "wait" else engine.drain()

    engine.read(file, 0, slot).wait()

    assert slot == pattern(CHUNK)


def test_a_failed_request_is_in_flight_no_more(
    engine: Any, file: StateFile, layer: FailingLayer
) -> None:
    layer.fail("pwrite", errno.EIO)
    slot = pattern(CHUNK)
    with pytest.raises(StateFileError):
        engine.write(file, 0, slot).wait()

    engine.write(file, 0, slot).wait()


def test_a_ticket_does_not_keep_the_memory_it_was_waited_for(engine: Any, file: StateFile) -> None:
    class Memory(bytearray):
        """Can be weakly referenced."""

    memory = Memory(CHUNK)
    gone = weakref.ref(memory)
    ticket = engine.write(file, 0, memoryview(memory))
    ticket.wait()
    del memory
    gc.collect()

    assert gone() is None
    ticket.wait()


# Threads


def test_submission_does_not_wait_for_the_disk(
    threads: Any, file: StateFile, layer: FailingLayer
) -> None:
    gate = layer.delay("pwrite")
    ticket = threads.write(file, 0, pattern(CHUNK))
    assert gate.is_reached.wait(PATIENCE_S)
    buffer = empty(CHUNK)
    threads.read(file, CHUNK, buffer).wait()  # another thread does it meanwhile

    gate.is_open.set()
    ticket.wait()


def test_chunks_of_one_request_move_at_the_same_time(
    threads: Any, file: StateFile, layer: FailingLayer
) -> None:
    gates = [layer.delay("pwrite", nth=1), layer.delay("pwrite", nth=2)]
    ticket = threads.write(file, 0, pattern(2 * CHUNK))
    assert all(gate.is_reached.wait(PATIENCE_S) for gate in gates)
    for gate in gates:
        gate.is_open.set()
    ticket.wait()


def test_a_ticket_may_be_waited_for_by_several_threads(threads: Any, file: StateFile) -> None:
    ticket = threads.write(file, 0, pattern(SIZE))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ticket.wait(), range(4)))


# Ends


def test_a_closed_engine_accepts_nothing_and_its_tickets_raise(
    strict_engine: Any, file: StateFile
) -> None:
    ticket = strict_engine.read(file, 0, empty(CHUNK))
    strict_engine.close()
    strict_engine.close()

    with pytest.raises(StateStoreError, match="closed"):
        ticket.wait()
    for submit in (strict_engine.read, strict_engine.write):
        with pytest.raises(StateStoreError, match="closed"):
            submit(file, 0, empty(CHUNK))


def test_close_logs_what_nobody_waited_for(
    engine: Any, file: StateFile, layer: FailingLayer, caplog: pytest.LogCaptureFixture
) -> None:
    layer.fail("pwrite", errno.EIO)
    ticket = engine.write(file, 0, pattern(CHUNK))
    wait_until_moved(layer, 1)

    engine.close()

    assert f"{file.path}: write failed at offset 0" in caplog.text
    with pytest.raises(StateFileError, match="Input/output error"):
        ticket.wait()


def test_close_finishes_what_runs_and_cancels_the_rest(
    file: StateFile, layer: FailingLayer
) -> None:
    engine = ThreadEngine(1, CHUNK)
    gate = layer.delay("pwrite")
    running = engine.write(file, 0, pattern(CHUNK))
    queued = engine.write(file, CHUNK, pattern(CHUNK))
    assert gate.is_reached.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(engine.close)
        with contextlib.suppress(TimeoutError):
            closing.result(0.05)
        assert not closing.done()
        gate.is_open.set()
        closing.result(PATIENCE_S)

    assert layer.count["pwrite"] == 1
    with pytest.raises(StateStoreError, match="closed"):
        running.wait()
    with pytest.raises(StateStoreError, match="closed before it was done"):
        queued.wait()


def test_a_forked_child_is_told_instead_of_waiting_for_ever(
    threads: Any, file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = threads.read(file, 0, empty(CHUNK))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        threads.close()
        for call in (
            ticket.wait,
            threads.drain,
            lambda: threads.write(file, 0, pattern(CHUNK)),
        ):
            with pytest.raises(StateStoreError, match="not to its child"):
                call()
    ticket.wait()


@pytest.mark.parametrize("make", [lambda: SyncEngine(0), lambda: ThreadEngine(0, CHUNK)])
def test_sizes_must_be_positive(make: Make) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        make()


# The tests' own engine


def test_the_hand_driven_engine_moves_when_told(file: StateFile) -> None:
    engine = HandEngine()
    write = engine.write(file, 0, pattern(CHUNK))
    buffer = empty(CHUNK)
    read = engine.read(file, CHUNK, buffer)
    with pytest.raises(AssertionError, match="the test has not completed"):
        write.wait()
    read.perform()
    read.wait()

    assert engine.pending == [write]
    write.fail(StateStoreError("planted"))
    with pytest.raises(StateStoreError, match="planted"):
        engine.drain()
    assert [line.split(" of ")[0] for line in engine.log] == [
        *("submit write", "submit read", "wait write", "wait read", "wait write"),
    ]
