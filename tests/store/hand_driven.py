"""A machine whose disk and device do nothing until a test says so, in any order it likes.

The pipeline submits operations: reads and writes, and what it gives to the device's three streams.
Each waits for what it was told to come after, and for the one before it in its stream; beyond that
the order in which they end is free. An operation has its effect on the memories when it ends, so an
order that nothing forbids and that spoils data shows in the data.

`explore` runs a program once for every choice at every point where it can matter: whenever the
caller's thread waits or polls, any operation that can end may end first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.core.optimizer.nvme_state_store.errors import StateStoreError
from megatron.core.optimizer.nvme_state_store.layout import Bucket, Layout
from megatron.core.optimizer.nvme_state_store.placement import Place, Placement, Tier


class Explored(Exception):
    """The machine came to a state from which everything has been tried before."""


@dataclass(eq=False)
class Operation:
    """One transfer or kernel.

    Attributes:
        name: unique in a run.
        after: operations that must have ended.
        effect: what it does to the memories; None if it only orders others. Such a one ends as soon
            as it can: later would be one more of the orders that the others may end in.
    """

    machine: Machine
    name: str
    after: list[Operation]
    effect: Callable[[], None] | None
    has_ended: bool = False
    error: StateStoreError | None = None

    def can_end(self) -> bool:
        return not self.has_ended and all(each.has_ended for each in self.after)

    def end(self) -> None:
        self.has_ended = True
        self.error = next((each.error for each in self.after if each.error), None)
        if self.name in self.machine.fails and self.error is None:
            self.error = StateStoreError(f"{self.name}: planted")
        if self.error is None and self.effect is not None:
            self.effect()

    # What the pipeline may do with a ticket, an event or a download.

    span = None

    def is_done(self) -> bool:
        self.machine.let_some_end()
        return self.has_ended

    def wait(self) -> None:
        while not self.has_ended:
            self.machine.let_one_end()
        if self.error is not None:
            raise self.error

    def synchronize(self) -> None:
        while not self.has_ended:
            self.machine.let_one_end()

    def query(self) -> bool:
        return self.has_ended

    def elapsed_time(self, other: Operation) -> float:
        return 0.0


@dataclass
class Cell:
    """Memory that holds one bucket, as (bucket, version)."""

    name: str
    value: Hashable = None

    def __getitem__(self, where: slice) -> Cell:
        return self

    def numel(self) -> int:
        return 0


class Machine:
    """Memories, operations under way, and the choices of one run.

    Args:
        choices: which of the operations that can end is to end next, at the first choices; after
            those, the first one of them.
        explored: states that were come to before.
        fails: names of operations that fail.
    """

    def __init__(
        self,
        choices: tuple[int, ...] = (),
        explored: set[Hashable] | None = None,
        fails: frozenset[str] = frozenset(),
    ) -> None:
        self.fails = fails
        self.cells: list[Cell] = []
        self.operations: list[Operation] = []
        self.ended: list[str] = []
        self.forks: list[tuple[tuple[int, ...], int]] = []
        self.progress = 0
        self._choices = choices
        self._made: list[int] = []
        self._explored = set() if explored is None else explored

    def cell(self, name: str, value: Hashable = None) -> Cell:
        self.cells.append(Cell(name, value))
        return self.cells[-1]

    def submit(
        self, name: str, after: list[Operation], effect: Callable[[], None] | None
    ) -> Operation:
        self.progress += 1
        same = sum(each.name.split("#")[0] == name for each in self.operations)
        operation = Operation(self, f"{name}#{same}", after, effect)
        self.operations.append(operation)
        self._end_those_without_effect()
        return operation

    def let_one_end(self) -> None:
        """The caller waits: something must end."""
        can_end = [each for each in self.operations if each.can_end()]
        assert can_end, "the caller waits, and nothing can end: a deadlock"
        self._end(can_end[self._choose(len(can_end))])

    def let_some_end(self) -> None:
        """The caller looks: some may have ended, or none."""
        while can_end := [each for each in self.operations if each.can_end()]:
            choice = self._choose(len(can_end) + 1)
            if choice == 0:
                return
            self._end(can_end[choice - 1])

    def end_all(self) -> None:
        """Let all that is under way end, in any order."""
        while any(not each.has_ended for each in self.operations):
            self.let_one_end()

    def _end(self, operation: Operation) -> None:
        operation.end()
        self.ended.append(operation.name)
        self._end_those_without_effect()

    def _end_those_without_effect(self) -> None:
        for each in self.operations:  # they come after earlier ones only
            if each.effect is None and each.can_end():
                each.end()

    def _choose(self, count: int) -> int:
        self.progress += 1
        position = len(self._made)
        if position < len(self._choices):
            choice = self._choices[position]
        else:
            state = (
                self.progress - len(self.ended),
                frozenset(self.ended),
                tuple(cell.value for cell in self.cells),
                tuple(each.name for each in self.operations if not each.has_ended),
            )
            if state in self._explored:
                raise Explored
            self._explored.add(state)
            if count > 1:
                self.forks.append((tuple(self._made), count))
            choice = 0
        self._made.append(choice)
        return choice


def explore(program: Callable[[Machine], None]) -> int:
    """Run a program in every order of ends; return how many states it came to."""
    explored: set[Hashable] = set()
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        machine = Machine(waiting.pop(), explored)
        try:
            program(machine)
        except Explored:
            pass
        except BaseException as error:
            error.add_note(f"order of ends: {' '.join(machine.ended)}")
            raise
        for made, count in machine.forks:
            waiting.extend((*made, choice) for choice in range(1, count))
    return len(explored)


# ------------------------------------------------------------------- what the pipeline is given


@dataclass
class HandResident:
    """A bucket in a device slot."""

    cell: Cell


@dataclass
class HandUpload:
    """See `Upload`."""

    resident: HandResident
    slot: int
    begin: Operation
    end: Operation


class HandStaging:
    """`Staging`, of which only the copies are replaced: the order of its streams is what it does.

    The real one says the same with CUDA's streams and events; `test_staging` compares the two.
    """

    def __init__(self, machine: Machine, num_slots: int) -> None:
        self.num_slots = num_slots
        self.machine = machine
        self.slots = [machine.cell(f"device slot {index}") for index in range(num_slots)]
        self.downloaded: list[Operation | None] = [None] * num_slots
        self.next = 0
        self.last: dict[str, Operation] = {}

    def on_stream(
        self,
        stream: str,
        name: str,
        after: list[Operation],
        effect: Callable[[], None] | None,
    ) -> Operation:
        before = [self.last[stream]] if stream in self.last else []
        self.last[stream] = self.machine.submit(name, before + after, effect)
        return self.last[stream]

    def mark(self) -> Operation:
        return self.on_stream("caller", "mark", [], None)

    def seconds_between(self, first: Any, second: Any) -> float:
        return 0.0

    def keep(self, bucket: Bucket, stored: Cell) -> HandResident:
        return HandResident(stored)

    def upload(self, bucket: Bucket, host: Cell) -> HandUpload:
        index, self.next = self.next, (self.next + 1) % self.num_slots
        slot, free = self.slots[index], self.downloaded[index]

        def effect() -> None:
            slot.value = host.value

        end = self.on_stream("upload", f"upload {bucket.index}", [free] if free else [], effect)
        return HandUpload(HandResident(slot), index, end, end)

    def await_upload(self, upload: HandUpload) -> None:
        self.on_stream("caller", "await", [upload.end], None)

    def download(self, upload: HandUpload, host: Cell) -> Any:
        ready = self.mark()

        def effect() -> None:
            host.value = upload.resident.cell.value

        end = self.on_stream("download", f"download from {upload.slot}", [ready], effect)
        self.downloaded[upload.slot] = end
        return _HandDownload(end)

    def synchronize(self) -> None:
        for operation in list(self.last.values()):
            operation.synchronize()


@dataclass
class _HandDownload:
    end: Operation

    @property
    def begin(self) -> Operation:
        return self.end


@dataclass
class HandVolume:
    """A directory whose engine is the machine."""

    machine: Machine
    disk: dict[int, Cell]
    file: Any = None

    @property
    def engine(self) -> HandVolume:
        return self

    def read(self, file: Any, offset: int, view: Cell, *after: Any) -> Operation:
        source = self.disk[offset]

        def effect() -> None:
            view.value = source.value

        return self.machine.submit(f"read {offset}", _operations(after), effect)

    def write(self, file: Any, offset: int, view: Cell, *after: Any) -> Operation:
        target = self.disk[offset]

        def effect() -> None:
            target.value = view.value

        return self.machine.submit(f"write {offset}", _operations(after), effect)

    def drain(self) -> None:
        self.machine.end_all()


def _operations(after: Any) -> list[Operation]:
    return [each.end if isinstance(each, _HandDownload) else each for each in after]


@dataclass
class HandHomes:
    """`Homes`: each bucket's home is a cell that holds its index and version 0 at first."""

    machine: Machine
    layout: Layout
    placement: Placement
    cells: dict[int, Cell] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for bucket in self.layout.buckets:
            name = f"{self.place(bucket).tier.value} home of {bucket.index}"
            self.cells[bucket.index] = self.machine.cell(name, (bucket.index, 0))
        disk = {
            self.place(bucket).offset: self.cells[bucket.index]
            for bucket in self.layout.buckets
            if self.place(bucket).tier is Tier.DISK
        }
        self._volume = HandVolume(self.machine, disk)

    def place(self, bucket: Bucket) -> Place:
        return self.placement.places[bucket.index]

    def pinned(self, bucket: Bucket) -> Cell:
        return self.cells[bucket.index]

    def on_device(self, bucket: Bucket) -> Cell:
        return self.cells[bucket.index]

    def volume(self, bucket: Bucket) -> HandVolume:
        return self._volume

    def open_volumes(self) -> Iterator[HandVolume]:
        yield self._volume


class HandHost:
    """`PinnedBytes` of the host slots: a cell for each."""

    def __init__(self, machine: Machine, slot_nbytes: int, num_slots: int) -> None:
        self.slots: list[Cell] = [machine.cell(f"host slot {each}") for each in range(num_slots)]
        self.slot_nbytes = slot_nbytes

    @property
    def tensor(self) -> HandHost:
        return self

    def __getitem__(self, where: Any) -> Cell:
        return self.view(where.start, where.stop)

    def view(self, start: int, stop: int) -> Cell:
        return self.slots[start // self.slot_nbytes]
