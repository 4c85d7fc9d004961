"""Engines move the same bytes, keep errors for who waits, and refuse what cannot be in flight."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store.errors import StateFileError, StateStoreError
from megatron.core.optimizer.nvme_state_store.io_engine import SyncEngine, ThreadEngine
from megatron.core.optimizer.nvme_state_store.io_request import IoCounters, IoEngine, Ticket
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
        lambda: ThreadEngine(1, 1, CHUNK),
        lambda: ThreadEngine(3, 3, CHUNK),
    ],
    ids=["sync", "one thread", "three threads"],
)
def engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    """Each engine that ships, with small chunks."""
    made = request.param()
    yield made
    made.close()


@pytest.fixture(
    params=[lambda: SyncEngine(CHUNK), lambda: ThreadEngine(2, 2, CHUNK), HandEngine],
    ids=["sync", "threads", "by hand"],
)
def strict_engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    """Each engine, also the tests' own: all have the rules of what may be in flight together."""
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[IoEngine]:
    made = ThreadEngine(2, 2, CHUNK)
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
    for engine in (SyncEngine(CHUNK), ThreadEngine(1, 1, CHUNK)):
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
    for engine in (SyncEngine(CHUNK), ThreadEngine(2, 2, CHUNK), HandEngine(HandTicket.perform)):
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


# One after the other


class Event:
    """What a wrapper of a CUDA event is to an engine; `error` says how it ends."""

    def __init__(self, is_over: bool = True, error: Exception | None = None) -> None:
        self.gate = Gate()
        self.error = error
        self.num_waits = 0
        if is_over:
            self.gate.is_open.set()

    def wait(self) -> None:
        self.num_waits += 1
        self.gate.pass_through()
        if self.error is not None:
            raise self.error


def done(ticket: Any) -> Any:
    """Return a ticket, performed if its engine leaves that to the test."""
    if isinstance(ticket, HandTicket):
        ticket.perform()
    return ticket


def test_a_slot_is_filled_again_behind_the_write_out_of_it(
    strict_engine: Any, file: StateFile
) -> None:
    """Without a wait in between: in the file is the old content, in the slot the new one."""
    done(strict_engine.write(file, CHUNK, pattern(CHUNK, 9))).wait()
    slot = pattern(CHUNK, 5)
    write = done(strict_engine.write(file, 0, slot))
    read = done(strict_engine.read(file, CHUNK, slot, write))
    read.wait()
    write.wait()

    assert slot == pattern(CHUNK, 9)
    done(strict_engine.read(file, 0, slot)).wait()
    assert slot == pattern(CHUNK, 5)


def test_one_range_of_a_file_is_written_read_and_written_one_after_the_other(
    strict_engine: Any, file: StateFile
) -> None:
    buffer = empty(CHUNK)
    first = done(strict_engine.write(file, 0, pattern(CHUNK, 1)))
    read = done(strict_engine.read(file, 0, buffer, first))
    last = done(strict_engine.write(file, 0, pattern(CHUNK, 2), read))
    last.wait()

    assert buffer == pattern(CHUNK, 1)
    strict_engine.drain()


def test_only_what_a_request_comes_after_may_overlap_it(
    strict_engine: Any, file: StateFile
) -> None:
    slot = empty(CHUNK)
    one = strict_engine.write(file, 0, slot)
    other = strict_engine.write(file, CHUNK, slot)
    unrelated = strict_engine.write(file, 2 * CHUNK, pattern(CHUNK))
    for after in ((), (one,), (other,), (unrelated,), (Event(), other)):
        with pytest.raises(AssertionError, match=r"same memory.* or submit the request after it"):
            strict_engine.read(file, 3 * CHUNK, slot, *after)
    with pytest.raises(AssertionError, match="overlap in the file"):
        strict_engine.read(file, 0, empty(CHUNK), other)


def test_a_wait_for_the_last_of_a_chain_is_one_for_all(strict_engine: Any, file: StateFile) -> None:
    """So that a step may wait for its reads alone, and go on with the slots they have filled."""
    slot, event = pattern(CHUNK), Event()
    write = done(strict_engine.write(file, 0, slot, event))
    read = done(strict_engine.read(file, CHUNK, slot, write))
    with pytest.raises(AssertionError, match="same memory"):
        strict_engine.read(file, 2 * CHUNK, slot)
    read.wait()

    done(strict_engine.read(file, 0, slot)).wait()
    assert slot == pattern(CHUNK)
    write.wait()


def test_a_request_moves_only_when_its_event_is_over(
    threads: Any, file: StateFile, layer: FailingLayer
) -> None:
    event = Event(is_over=False)
    ticket = threads.write(file, 0, pattern(3 * CHUNK), event)
    assert event.gate.is_reached.wait(PATIENCE_S)
    assert not layer.count
    assert not ticket.is_done()
    event.gate.is_open.set()
    ticket.wait()

    assert layer.count["pwrite"] == 3
    assert event.num_waits == 1


def test_a_read_moves_only_when_the_write_before_it_is_done(
    threads: Any, file: StateFile, layer: FailingLayer
) -> None:
    """Done with its last chunk, not with its first."""
    gate = layer.delay("pwrite", nth=2)
    buffer = empty(2 * CHUNK)
    write = threads.write(file, 0, pattern(2 * CHUNK))
    read = threads.read(file, 0, buffer, write)
    assert gate.is_reached.wait(PATIENCE_S)
    while layer.count["pwrite"] < 2:
        threading.Event().wait(0.001)
    assert layer.count["preadv"] == 0
    gate.is_open.set()
    read.wait()

    assert buffer == pattern(2 * CHUNK)


def test_an_empty_request_is_done_after_its_event_too(threads: Any, file: StateFile) -> None:
    event = Event(is_over=False)
    ticket = threads.read(file, 0, empty(0), event)
    assert event.gate.is_reached.wait(PATIENCE_S)
    assert not ticket.is_done()
    event.gate.is_open.set()
    ticket.wait()


def test_a_long_chain_needs_no_more_than_one_reader_and_one_writer(file: StateFile) -> None:
    """Each thread waits for the other one's last request: forwards only, so it ends."""
    slot = pattern(CHUNK, 3)
    last: list[Ticket] = []
    with contextlib.closing(ThreadEngine(1, 1, CHUNK)) as engine:
        for number in range(SIZE // CHUNK - 1):
            place = number * CHUNK
            write = engine.write(file, place, slot, *last)
            last = [engine.read(file, place, slot, write)]
        last[0].wait()
    assert slot == pattern(CHUNK, 3)


def test_an_event_that_fails_fails_the_request(
    engine: Any, file: StateFile, layer: FailingLayer
) -> None:
    planted = RuntimeError("CUDA error: planted")
    event = Event(error=planted)
    ticket = engine.write(file, 0, pattern(3 * CHUNK), event)

    with pytest.raises(RuntimeError, match="planted"):
        ticket.wait()
    assert event.num_waits == 1
    assert not layer.count
    assert engine.counters == IoCounters()


def test_a_failed_request_fails_what_comes_after_it_and_that_moves_nothing(
    engine: Any, file: StateFile, layer: FailingLayer
) -> None:
    layer.fail("pwrite", errno.EIO)
    slot = pattern(CHUNK)
    write = engine.write(file, 0, slot)
    read = engine.read(file, CHUNK, slot, write)
    another = engine.write(file, CHUNK, pattern(CHUNK), read)
    for ticket in (another, read, write):
        with pytest.raises(StateFileError, match="write failed at offset 0") as caught:
            ticket.wait()
        assert caught.value.errno == errno.EIO

    assert layer.count == {"pwrite": 1}
    assert slot == pattern(CHUNK)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_drain_tells_an_error_although_another_request_has_met_it(
    is_waited_for: bool, engine: Any, file: StateFile, layer: FailingLayer
) -> None:
    layer.fail("pwrite", errno.EIO)
    write = engine.write(file, 0, pattern(CHUNK))
    read = engine.read(file, CHUNK, empty(CHUNK), write)
    if is_waited_for:
        with pytest.raises(StateFileError):
            read.wait()

    with pytest.raises(StateFileError, match="write failed at offset 0") as caught:
        engine.drain()

    more = [] if is_waited_for else ["and 1 more requests failed"]
    assert getattr(caught.value, "__notes__", []) == more
    engine.drain()


def test_what_was_waited_for_is_not_told_again_by_drain(
    engine: Any, file: StateFile, layer: FailingLayer
) -> None:
    """Whichever of the two was waited for first."""
    layer.fail("pwrite", errno.EIO)
    write = engine.write(file, 0, pattern(CHUNK))
    read = engine.read(file, CHUNK, empty(CHUNK), write)
    for ticket in (read, write):
        with pytest.raises(StateFileError):
            ticket.wait()

    engine.drain()


def test_a_ticket_of_another_engine_can_come_first(file: StateFile, layer: FailingLayer) -> None:
    layer.fail("pwrite", errno.EIO)
    with (
        contextlib.closing(ThreadEngine(1, 1, CHUNK)) as first,
        contextlib.closing(ThreadEngine(1, 1, CHUNK)) as second,
    ):
        read = second.read(file, 0, empty(CHUNK), first.write(file, 0, pattern(CHUNK)))
        with pytest.raises(StateFileError, match="write failed"):
            read.wait()
        second.drain()
        with pytest.raises(StateFileError, match="write failed"):
            first.drain()


def test_a_chain_of_many_steps_keeps_no_memory(engine: Any, file: StateFile) -> None:
    """A slot's read comes after its write, that after its read, and so on, for the whole run."""
    last = None
    events = []
    for _ in range(3):
        event = Event()
        events.append(weakref.ref(event))
        write = engine.write(file, 0, pattern(CHUNK), event)
        last = engine.read(file, 0, empty(CHUNK), write)
        last.wait()
    del event, write
    gc.collect()

    assert last is not None
    assert [event() for event in events] == [None] * 3


# What a ticket tells


def test_a_ticket_tells_without_blocking_whether_it_is_done(
    threads: Any, file: StateFile, layer: FailingLayer
) -> None:
    gate = layer.delay("pwrite", nth=2)
    ticket = threads.write(file, 0, pattern(2 * CHUNK))
    assert gate.is_reached.wait(PATIENCE_S)
    assert not ticket.is_done()
    gate.is_open.set()
    ticket.wait()

    assert ticket.is_done()


def test_a_failed_ticket_is_done_and_tells_its_error_to_the_wait_alone(
    engine: Any, file: StateFile, layer: FailingLayer
) -> None:
    layer.fail("pwrite", errno.EIO)
    ticket = engine.write(file, 0, pattern(CHUNK))
    while not ticket.is_done():
        threading.Event().wait(0.001)

    assert ticket.span is None
    with pytest.raises(StateFileError):
        ticket.wait()


def test_a_ticket_tells_when_its_bytes_moved(
    strict_engine: Any, file: StateFile, layer: FailingLayer
) -> None:
    before = time.monotonic()
    write = done(strict_engine.write(file, 0, pattern(3 * CHUNK)))
    read = done(strict_engine.read(file, 0, empty(3 * CHUNK), write))
    read.wait()
    write.wait()

    assert before <= write.span.begin < write.span.end <= read.span.begin < read.span.end
    assert read.span.end <= time.monotonic()


def test_a_span_begins_after_the_event_and_ends_with_the_last_chunk(
    threads: Any, file: StateFile, layer: FailingLayer
) -> None:
    event = Event(is_over=False)
    gate = layer.delay("pwrite", nth=1)
    ticket = threads.write(file, 0, pattern(2 * CHUNK), event)
    assert event.gate.is_reached.wait(PATIENCE_S)
    assert ticket.span is None
    over = time.monotonic()
    event.gate.is_open.set()
    assert gate.is_reached.wait(PATIENCE_S)
    while layer.count["pwrite"] < 2:
        threading.Event().wait(0.001)
    assert ticket.span is None
    last = time.monotonic()
    gate.is_open.set()
    ticket.wait()

    span: Any = ticket.span
    assert over <= span.begin <= last <= span.end


# Threads


def test_reads_do_not_queue_behind_writes(
    threads: Any, file: StateFile, layer: FailingLayer
) -> None:
    """All writers are stuck, with more writes in the queue; a read goes on."""
    gates = [layer.delay("pwrite", nth=1), layer.delay("pwrite", nth=2)]
    writes = threads.write(file, 0, pattern(10 * CHUNK))
    assert all(gate.is_reached.wait(PATIENCE_S) for gate in gates)

    threads.read(file, 10 * CHUNK, empty(5 * CHUNK)).wait()

    assert not writes.is_done()
    for gate in gates:
        gate.is_open.set()
    writes.wait()


def test_writes_do_not_queue_behind_reads_that_wait(threads: Any, file: StateFile) -> None:
    """What the reads wait for is submitted before them, so it is not in their queue."""
    event = Event(is_over=False)
    read = threads.read(file, 0, empty(10 * CHUNK), event)
    assert event.gate.is_reached.wait(PATIENCE_S)

    threads.write(file, 10 * CHUNK, pattern(5 * CHUNK)).wait()

    assert not read.is_done()
    event.gate.is_open.set()
    read.wait()


def test_a_thread_of_an_engine_submits_nothing(threads: Any, file: StateFile) -> None:
    """It might wait for what is queued behind itself."""

    class Submits(Event):
        def wait(self) -> None:
            threads.read(file, 0, empty(CHUNK))

    with pytest.raises(AssertionError, match="was submitted by nvme-state-store-write_0"):
        threads.write(file, 0, pattern(CHUNK), Submits()).wait()


def test_two_threads_do_not_submit_at_the_same_time(file: StateFile, layer: FailingLayer) -> None:
    engine = SyncEngine(CHUNK)  # whose submission lasts as long as a gate is closed
    gate = layer.delay("pwrite")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(engine.write, file, 0, pattern(CHUNK))
        assert gate.is_reached.wait(PATIENCE_S)
        with pytest.raises(AssertionError, match="one thread at a time"):
            engine.read(file, CHUNK, empty(CHUNK))
        gate.is_open.set()
        first.result(PATIENCE_S).wait()
    engine.close()


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
    engine = ThreadEngine(1, 1, CHUNK)
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


def test_close_ends_a_read_that_waits_for_a_cancelled_write(
    file: StateFile, layer: FailingLayer
) -> None:
    engine = ThreadEngine(1, 1, CHUNK)
    gate = layer.delay("pwrite")
    engine.write(file, 0, pattern(CHUNK))
    queued = engine.write(file, CHUNK, pattern(CHUNK))
    assert gate.is_reached.wait(PATIENCE_S)
    read = engine.read(file, CHUNK, empty(CHUNK), queued)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(engine.close)
        with pytest.raises(StateStoreError, match="closed before it was done"):
            read.wait()
        gate.is_open.set()
        closing.result(PATIENCE_S)

    assert layer.count == {"pwrite": 1}


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: SyncEngine(0),
        lambda: ThreadEngine(1, 1, 0),
        lambda: ThreadEngine(0, 1, CHUNK),
        lambda: ThreadEngine(1, 0, CHUNK),
    ],
)
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


def test_the_hand_driven_engine_refuses_to_move_out_of_order(file: StateFile) -> None:
    engine = HandEngine()
    write = engine.write(file, 0, pattern(CHUNK))
    buffer = empty(CHUNK)
    read = engine.read(file, 0, buffer, write)
    with pytest.raises(AssertionError, match=r"read .* performed before the write"):
        read.perform()
    assert not read.is_done()
    write.perform()
    read.perform()
    read.wait()

    assert buffer == pattern(CHUNK)
    assert engine.in_flight == []


def test_the_hand_driven_engine_passes_errors_on_and_tells_them_all(file: StateFile) -> None:
    engine = HandEngine()
    write = engine.write(file, 0, pattern(CHUNK))
    buffer = empty(CHUNK)
    read = engine.read(file, CHUNK, buffer, write)
    write.fail(StateStoreError("planted"))
    read.perform()
    with pytest.raises(StateStoreError, match="planted"):
        read.wait()
    with pytest.raises(StateStoreError, match="planted"):
        engine.drain()
    engine.drain()

    event = Event(error=RuntimeError("CUDA error: planted"))
    late = engine.read(file, CHUNK, buffer, event)
    assert event.num_waits == 0
    late.perform()
    with pytest.raises(RuntimeError, match="CUDA error"):
        late.wait()
    assert buffer == empty(CHUNK)
