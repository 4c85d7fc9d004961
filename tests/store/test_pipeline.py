"""A step walks the buckets in order, and each stage waits for the one that protects its buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.errors import StateStoreError
from megatron.core.optimizer.nvme_state_store.layout import Bucket, make_layout
from megatron.core.optimizer.nvme_state_store.pipeline import Stages, run_step
from megatron.core.optimizer.nvme_state_store.state_file import StateFile

from tests.store.failing_file import HandEngine, HandTicket

LAYOUT = make_layout([100, 300], 128, ("exp_avg", "exp_avg_sq"))


class Staging:
    """Both slots: a host buffer that is really read and written, and a device that only tells."""

    def __init__(self, tell: Callable[[str, int], None]) -> None:
        self.tell = tell
        self.buffer = bytearray(LAYOUT.slot_nbytes)
        self.marks = 0
        self.is_downloaded = False

    def extent(self, bucket: Bucket) -> memoryview:
        return memoryview(self.buffer)[: bucket.nbytes]

    def upload(self, bucket: Bucket, host: Any) -> None:
        self.is_downloaded = False
        self.tell("upload", bucket.index)

    def download(self, bucket: Bucket, host: Any) -> None:
        self.tell("download", bucket.index)
        self.extent(bucket)[:] = bytes([self.buffer[0] + 1]) * bucket.nbytes
        self.is_downloaded = True

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds_between(self, first: int, second: int) -> float:
        assert self.is_downloaded, "reading a mark waits for the device, which has work left"
        return second - first


class Step:
    """One step, with all that it does in a log; any verb may be told to fail at any bucket."""

    def __init__(self, fails: tuple[str, int] | None = None, peer_fails_at: int = -1) -> None:
        self.fails = fails
        self.peer_fails_at = peer_fails_at
        self.log: list[str] = []
        self.failure: Exception = StateStoreError("of this rank")
        self.brought: list[Exception | None] = []
        self.returned: list[Exception | None] = []

    def run(self, file: StateFile) -> Any:
        staging: Any = Staging(self._do)
        stages = Stages(
            lambda bucket, device: self._do("check", bucket.index),
            self._meet,
            lambda bucket, device: self._do("update", bucket.index),
            lambda bucket, device: self._do("publish", bucket.index),
        )
        return run_step(LAYOUT, file, HandEngine(self._transfer), staging, staging, stages)

    def _do(self, verb: str, index: int) -> None:
        self.log.append(f"{verb} {index}")
        if self.fails == (verb, index):
            raise self.failure

    def _meet(self, bucket: Bucket, error: Exception | None) -> Exception | None:
        """Do what peers do: all get the same error, which is not this rank's own object."""
        self.log.append(f"meet {bucket.index}")
        self.brought.append(error)
        if bucket.index == self.peer_fails_at:
            error = StateStoreError("of a peer")
        self.returned.append(error and StateStoreError(f"agreed: {error}"))
        return self.returned[-1]

    def _transfer(self, ticket: HandTicket) -> None:
        index = [bucket.offset for bucket in LAYOUT.buckets].index(ticket.request.offset)
        try:
            self._do(ticket.request.operation, index)
        except StateStoreError as error:
            ticket.fail(error)
        else:
            ticket.perform()


VERBS = ("read", "upload", "check", "meet", "update", "publish", "download", "write")
CAN_FAIL = tuple(verb for verb in VERBS if verb != "meet")
BUCKETS = range(len(LAYOUT.buckets))


def lines(index: int, verbs: tuple[str, ...] = VERBS) -> list[str]:
    """Return what these verbs log of a bucket."""
    return [f"{verb} {index}" for verb in verbs]


@pytest.fixture
def file(tmp_path: Path) -> Any:
    with StateFile.create(tmp_path / "state.bin", LAYOUT.nbytes) as made:
        yield made


def test_the_verbs_come_in_order_and_every_transfer_is_waited_for(file: StateFile) -> None:
    """Each meeting comes after the check and before the update of its bucket."""
    step = Step()

    step.run(file)

    assert len(BUCKETS) > 2
    assert step.log == [line for index in BUCKETS for line in lines(index)]
    assert step.brought == [None] * len(BUCKETS)


def test_what_was_downloaded_is_what_is_on_disk(file: StateFile) -> None:
    Step().run(file)
    Step().run(file)

    content = bytearray(LAYOUT.nbytes)
    file.read_into(0, memoryview(content))
    assert set(content) == {2}


def test_times_are_those_of_the_stages(file: StateFile) -> None:
    times = Step().run(file)

    buckets = len(BUCKETS)
    assert (times.upload, times.update, times.download) == (buckets, buckets, buckets)
    assert times.read_wait > 0 and times.write_wait > 0


@pytest.mark.parametrize("failing", BUCKETS)
@pytest.mark.parametrize("verb", CAN_FAIL)
def test_after_a_failure_nothing_is_done_but_every_meeting_is_held(
    file: StateFile, verb: str, failing: int
) -> None:
    """Once each and in order: peers that have not failed wait there."""
    step = Step(fails=(verb, failing))

    with pytest.raises(StateStoreError) as caught:
        step.run(file)

    meets = list(BUCKETS[failing:])
    expected = [line for index in BUCKETS[:failing] for line in lines(index)]
    expected += lines(failing, VERBS[: VERBS.index(verb) + 1])
    if verb not in VERBS[: VERBS.index("meet")]:
        meets.remove(failing)  # it was held before
    assert step.log == expected + [f"meet {index}" for index in meets]
    assert caught.value is (step.returned[-1] if meets else step.failure)


@pytest.mark.parametrize("failing", BUCKETS)
def test_an_error_goes_through_all_later_meetings(file: StateFile, failing: int) -> None:
    """The first gets this rank's own, each later one what the one before it returned."""
    step = Step(fails=("check", failing))

    with pytest.raises(StateStoreError):
        step.run(file)

    assert step.brought[:failing] == [None] * failing
    assert step.brought[failing:] == [step.failure, *step.returned[failing:-1]]
    assert None not in step.returned[failing:]


@pytest.mark.parametrize("failing", BUCKETS)
def test_an_error_of_a_peer_stops_this_rank_as_its_own_does(file: StateFile, failing: int) -> None:
    """The bucket of the meeting is not updated, and its bytes on disk are the old ones."""
    step = Step(peer_fails_at=failing)

    with pytest.raises(StateStoreError, match="of a peer") as caught:
        step.run(file)

    expected = [line for index in BUCKETS[:failing] for line in lines(index)]
    expected += lines(failing, ("read", "upload", "check"))
    assert step.log == expected + [f"meet {index}" for index in BUCKETS[failing:]]
    assert step.brought == [None] * (failing + 1) + step.returned[failing:-1]
    assert caught.value is step.returned[-1]
    content = bytearray(LAYOUT.nbytes)
    file.read_into(0, memoryview(content))
    first = LAYOUT.buckets[failing].offset
    assert set(content[:first]) <= {1} and set(content[first:]) == {0}


def test_an_error_that_is_not_the_stores_goes_to_the_meetings_too(file: StateFile) -> None:
    """A kernel may run out of memory."""
    step = Step(fails=("update", 0))
    step.failure = torch.OutOfMemoryError("of a kernel")

    with pytest.raises(StateStoreError, match="of a kernel"):
        step.run(file)

    assert step.brought[1] is step.failure
