"""A step walks the buckets in order, and each stage waits for the one that protects its buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store.errors import StateFileError
from megatron.core.optimizer.nvme_state_store.layout import Bucket, make_layout
from megatron.core.optimizer.nvme_state_store.pipeline import run_step
from megatron.core.optimizer.nvme_state_store.state_file import StateFile

from tests.store.failing_file import HandEngine, HandTicket

LAYOUT = make_layout([100, 300], 128, ("exp_avg", "exp_avg_sq"))


class Staging:
    """Both slots: a host buffer that is really read and written, and a device that only logs."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.buffer = bytearray(LAYOUT.slot_nbytes)
        self.marks = 0

    def extent(self, bucket: Bucket) -> memoryview:
        return memoryview(self.buffer)[: bucket.nbytes]

    def upload(self, bucket: Bucket, host: Any) -> None:
        self.log.append(f"upload {bucket.index}")

    def download(self, bucket: Bucket, host: Any) -> None:
        self.log.append(f"download {bucket.index}")
        self.extent(bucket)[:] = bytes([self.buffer[0] + 1]) * bucket.nbytes

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds_between(self, first: int, second: int) -> float:
        return second - first


def _run(file: StateFile, engine: HandEngine, log: list[str]) -> Any:
    staging: Any = Staging(log)
    return run_step(
        LAYOUT,
        file,
        engine,
        staging,
        staging,
        lambda bucket, device: log.append(f"update {bucket.index}"),
        lambda bucket, device: log.append(f"publish {bucket.index}"),
    )


@pytest.fixture
def file(tmp_path: Path) -> Any:
    with StateFile.create(tmp_path / "state.bin", LAYOUT.nbytes) as made:
        yield made


def test_the_six_verbs_come_in_order_and_every_transfer_is_waited_for(file: StateFile) -> None:
    log: list[str] = []

    def on_wait(ticket: HandTicket) -> None:
        log.append(f"{ticket.request.operation} {ticket.request.offset}")
        ticket.perform()

    _run(file, HandEngine(on_wait), log)

    expected = []
    for bucket in LAYOUT.buckets:
        expected.append(f"read {bucket.offset}")
        for verb in ("upload", "update", "publish", "download"):
            expected.append(f"{verb} {bucket.index}")
        expected.append(f"write {bucket.offset}")
    assert len(LAYOUT.buckets) > 2
    assert log == expected


def test_what_was_downloaded_is_what_is_on_disk(file: StateFile) -> None:
    engine = HandEngine(lambda ticket: ticket.perform())

    _run(file, engine, [])
    _run(file, engine, [])

    content = bytearray(LAYOUT.nbytes)
    file.read_into(0, memoryview(content))
    assert set(content) == {2}


def test_times_are_those_of_the_stages(file: StateFile) -> None:
    times = _run(file, HandEngine(lambda ticket: ticket.perform()), [])

    buckets = len(LAYOUT.buckets)
    assert (times.upload, times.update, times.download) == (buckets, buckets, buckets)
    assert times.read_wait > 0 and times.write_wait > 0


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_failed_transfer_ends_the_step_at_its_bucket(file: StateFile, operation: str) -> None:
    """A bucket whose read failed is not updated; none comes after one that failed."""
    log: list[str] = []
    second = LAYOUT.buckets[1].offset
    failure = StateFileError(file.path, operation, offset=second, expected=1, actual=0, errno=5)

    def on_wait(ticket: HandTicket) -> None:
        if (ticket.request.operation, ticket.request.offset) == (operation, second):
            ticket.fail(failure)
        else:
            ticket.perform()

    with pytest.raises(StateFileError):
        _run(file, HandEngine(on_wait), log)

    assert ("update 1" in log) == (operation == "write")
    assert "update 2" not in log
