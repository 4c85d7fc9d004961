"""Whatever ends first, every bucket is updated once a step, from its own last bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.errors import StateStoreError
from megatron.core.optimizer.nvme_state_store.layout import Bucket, make_layout
from megatron.core.optimizer.nvme_state_store.pipeline import Pipeline, Stages, run_step
from megatron.core.optimizer.nvme_state_store.placement import place_buckets

from tests.store.hand_driven import HandHomes, HandHost, HandStaging, Machine, explore

LAYOUT = make_layout([4 * 64], 64, ("exp_avg", "exp_avg_sq"))
BUCKETS = range(len(LAYOUT.buckets))
SIZE = LAYOUT.buckets[0].nbytes
TIERS = {"disk": (0, 0), "host and disk": (0, 2), "host": (0, 4), "all three": (1, 1)}
"""Buckets of the device and host tier."""


class Run:
    """A pipeline over hand-driven memories, and how many steps each bucket has seen.

    Args:
        machine: decides what ends when.
        tiers: buckets of the device and host tier.
        host_slots: for those on disk.
        device_slots: for all that are not on the device.
    """

    def __init__(
        self,
        machine: Machine,
        tiers: tuple[int, int] = (0, 0),
        host_slots: int = 3,
        device_slots: int = 3,
    ) -> None:
        self.machine = machine
        placement = place_buckets(LAYOUT, tiers[0] * SIZE, tiers[1] * SIZE, 1)
        homes: Any = HandHomes(machine, LAYOUT, placement)
        staging: Any = HandStaging(machine, device_slots)
        self.homes, self.staging = homes, staging
        on_disk = sum(place.tier.value == "disk" for place in placement.places)
        host_slots = min(host_slots, on_disk)
        host: Any = HandHost(machine, SIZE, host_slots)
        self.pipeline = Pipeline(homes, staging, host, host_slots)
        self.log: list[str] = []
        self.updated: list[int] = []
        self.steps = 0

    def step(self, meet: Callable[[Bucket, Any], Any] = lambda bucket, error: error) -> None:
        self.steps += 1
        version = self.steps
        self.updated = []

        def update(bucket: Bucket, resident: Any) -> None:
            def effect() -> None:
                assert resident.cell.value == (bucket.index, version - 1), "not its last bytes"
                resident.cell.value = (bucket.index, version)
                self.updated.append(bucket.index)

            self.staging.on_stream("caller", f"update {bucket.index}", [], effect)
            self.log.append(f"update {bucket.index}")

        def publish(bucket: Bucket, resident: Any) -> None:
            self.staging.on_stream("caller", f"publish {bucket.index}", [], None)

        self.pipeline.begin_step()
        run_step(self.pipeline, LAYOUT.buckets, Stages(meet, update, publish))
        assert self.updated == list(BUCKETS), "returned too early"

    @property
    def at_home(self) -> list[Any]:
        return [self.homes.cells[index].value for index in BUCKETS]


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("device_slots", [1, 2, 3])
def test_every_order_of_ends_gives_the_same_bytes(
    device_slots: int, tiers: tuple[int, int]
) -> None:
    """Two steps of 4 buckets, 3 host slots: what is read ahead and written behind included."""

    def program(machine: Machine) -> None:
        run = Run(machine, tiers, 3, device_slots)
        run.step()
        run.step()
        run.pipeline.drain()
        assert run.at_home == [(index, 2) for index in BUCKETS]

    states = explore(program)

    assert states > 20


@pytest.mark.parametrize("host_slots", [1, 2, 4])
def test_every_order_of_ends_is_right_with_any_number_of_host_slots(host_slots: int) -> None:
    """With one there is no reading ahead; with one for each bucket nothing is read twice."""

    def program(machine: Machine) -> None:
        run = Run(machine, (0, 0), host_slots, 2)
        run.step()
        run.step()
        run.pipeline.drain()
        assert run.at_home == [(index, 2) for index in BUCKETS]
        reads = [name for name in machine.ended if name.startswith("read")]
        assert len(reads) == 4 if host_slots == 4 else len(reads) >= 8

    assert explore(program) > 20


FAULTS: dict[str, Callable[[Run], None]] = {}


def fault(name: str) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Plant a missing wait: exploring must find it."""

    def add(plant: Callable[[Run], None]) -> Callable[[Run], None]:
        FAULTS[name] = plant
        return plant

    return add


@fault("a write does not wait for the download")
def _write_at_once(run: Run) -> None:
    volume = next(run.homes.open_volumes())
    write = volume.write
    volume.write = lambda file, offset, view, *after: write(file, offset, view)


@fault("a read waits neither for the slot nor for the bucket")
def _read_at_once(run: Run) -> None:
    volume = next(run.homes.open_volumes())
    read = volume.read
    volume.read = lambda file, offset, view, *after: read(file, offset, view)


@fault("a read waits for the slot alone")
def _read_before_written(run: Run) -> None:
    volume = next(run.homes.open_volumes())
    read = volume.read
    volume.read = lambda file, offset, view, *after: read(file, offset, view, *after[:1])


@fault("an upload does not wait for the slot")
def _upload_at_once(run: Run) -> None:
    run.staging.downloaded = _Nothing()


@fault("the update does not wait for the upload")
def _no_await(run: Run) -> None:
    run.staging.await_upload = lambda upload: None


@fault("the download does not wait for the update")
def _download_at_once(run: Run) -> None:
    on_stream = run.staging.on_stream

    def impatient(stream: str, name: str, after: Any, effect: Any) -> Any:
        return on_stream(stream, name, [] if stream == "download" else after, effect)

    run.staging.on_stream = impatient


class _Nothing(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return None

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


@pytest.mark.parametrize("name", FAULTS)
def test_a_missing_wait_is_found(name: str) -> None:
    """So the exploration looks where it must."""

    def program(machine: Machine) -> None:
        run = Run(machine, (0, 0), 3, 2)
        FAULTS[name](run)
        run.step()
        run.step()
        run.pipeline.drain()
        assert run.at_home == [(index, 2) for index in BUCKETS]

    with pytest.raises(AssertionError):
        explore(program)


def names_of_transfers() -> list[str]:
    """Return every read and write of two steps."""
    machine = Machine()
    run = Run(machine)
    run.step()
    run.step()
    run.pipeline.drain()
    machine.end_all()
    return [each.name for each in machine.operations if each.name.startswith(("read", "write"))]


@pytest.mark.parametrize("failing", names_of_transfers())
def test_a_failing_transfer_is_raised_and_spoils_nothing(failing: str) -> None:
    """In this step, or in the next one, or at the end; forgetting makes the pipeline usable."""
    machine = Machine(fails=frozenset([failing]))
    run = Run(machine)
    raised = 0
    for _ in range(3):
        try:
            run.step()
        except StateStoreError as error:
            assert f"{failing}: planted" in str(error)
            raised += 1
            break
    try:
        run.pipeline.drain()
    except StateStoreError as error:
        assert f"{failing}: planted" in str(error)
        raised += 1

    assert raised >= 1
    for index, value in enumerate(run.at_home):
        assert value[0] == index, "a bucket has the bytes of another one"
    run.pipeline.forget()
    for index in BUCKETS:
        run.homes.cells[index].value = (index, 0)
    run.steps = 0
    run.step()
    run.pipeline.drain()
    assert run.at_home == [(index, 1) for index in BUCKETS]


def test_a_failed_write_is_told_until_it_is_forgotten() -> None:
    """The bytes at home are lost: neither a second drain nor a save may overlook that."""
    last = place_buckets(LAYOUT, 0, 0, 1).places[-1].offset
    run = Run(Machine(fails=frozenset([f"write {last}#0"])))
    run.step()

    for _ in range(2):
        with pytest.raises(StateStoreError, match="planted"):
            run.pipeline.drain()
    run.pipeline.forget()
    run.pipeline.drain()


def test_slots_do_not_outnumber_the_buckets_that_pass_through_them() -> None:
    """An upload of the host tier waits for its bucket's download through its slot alone."""
    with pytest.raises(AssertionError, match="an upload may overtake a download"):
        Run(Machine(), device_slots=len(LAYOUT.buckets) + 1)


def test_reads_go_ahead_and_writes_stay_behind() -> None:
    """The next step's first reads are under way when a step returns, and its last writes too."""
    machine = Machine()
    run = Run(machine)

    run.step()

    offsets = [place.offset for place in run.homes.placement.places]
    reads = [each.name.split("#")[0] for each in machine.operations if each.name[:4] == "read"]
    assert reads == [f"read {offset}" for offset in offsets + offsets[:3]]
    assert any(each.name[:5] == "write" and not each.has_ended for each in machine.operations)


class Meetings:
    """Peers of an update: each meeting may bring an error."""

    def __init__(self, run: Run, peer_fails_at: int = -1) -> None:
        self.run = run
        self.peer_fails_at = peer_fails_at
        self.brought: list[Any] = []
        self.returned: list[Any] = []

    def meet(self, bucket: Bucket, error: Exception | None) -> Exception | None:
        """Do what peers do: all get the same error, which is not this rank's own object."""
        self.run.log.append(f"meet {bucket.index}")
        self.brought.append(error)
        if bucket.index == self.peer_fails_at:
            error = StateStoreError("of a peer")
        agreed = None if error is None else StateStoreError(f"agreed: {error}")
        self.returned.append(agreed)
        return agreed


@pytest.mark.parametrize("failing", BUCKETS)
def test_after_a_failure_nothing_is_done_but_every_meeting_is_held(failing: int) -> None:
    """Once each and in order, with what the one before returned: peers wait there."""
    place = place_buckets(LAYOUT, 0, 0, 1).places[failing]
    run = Run(Machine(fails=frozenset([f"read {place.offset}#0"])))
    meetings = Meetings(run)

    with pytest.raises(StateStoreError, match=r"agreed: .* planted") as caught:
        run.step(meetings.meet)

    before = [line for index in range(failing) for line in (f"meet {index}", f"update {index}")]
    assert run.log == before + [f"meet {index}" for index in BUCKETS[failing:]]
    assert meetings.brought[:failing] == [None] * failing
    assert meetings.brought[failing + 1 :] == meetings.returned[failing:-1]
    assert caught.value is meetings.returned[-1]


@pytest.mark.parametrize("failing", BUCKETS)
def test_an_error_of_a_peer_stops_this_rank_as_its_own_does(failing: int) -> None:
    """The bucket of the meeting is not updated, and its bytes at home are the old ones."""
    run = Run(Machine())
    meetings = Meetings(run, peer_fails_at=failing)

    with pytest.raises(StateStoreError, match="of a peer") as caught:
        run.step(meetings.meet)

    run.pipeline.drain()
    assert caught.value is meetings.returned[-1]
    assert run.at_home == [(index, int(index < failing)) for index in BUCKETS]


def test_an_error_that_is_not_the_stores_goes_to_the_meetings_too() -> None:
    """A kernel may run out of memory."""
    run = Run(Machine())
    meetings = Meetings(run)
    failure = torch.OutOfMemoryError("of a kernel")

    def fail(bucket: Bucket, resident: Any) -> None:
        raise failure

    run.pipeline.begin_step()
    with pytest.raises(StateStoreError, match="of a kernel"):
        run_step(run.pipeline, LAYOUT.buckets, Stages(meetings.meet, fail, fail))

    assert meetings.brought[1] is failure
