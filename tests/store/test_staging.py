"""Copies wait for what they must, and for nothing else; slots come and go as a whole.

Streams and events are doubles that record who waits for whom. So a test asks whether one operation
comes before another on every device, and not whether it happened to this time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.formats import BF16, FORMATS, FP32, SPLIT, Format
from megatron.core.optimizer.nvme_state_store.layout import MAIN, Bucket, Layout, make_layout
from megatron.core.optimizer.nvme_state_store.staging import Staging, Upload

CPU = torch.device("cpu")
ADAM = ("exp_avg", "exp_avg_sq")
LAYOUT = make_layout([10_000], 1024, ADAM)
"""Ten buckets, the last one smaller."""
ENCODED: tuple[Format, ...] = (SPLIT, BF16, FORMATS["fp8e5m2-sqrt"])


class Step:
    """One operation of a stream, after that stream's last one and what it waits for."""

    def __init__(self, name: str, after: list[Step]) -> None:
        self.name = name
        self.after = after

    def comes_after(self, other: Step) -> bool:
        return self is other or any(each.comes_after(other) for each in self.after)


class Stream:
    """Double of `torch.cuda.Stream`."""

    def __init__(self, device: Any, machine: Machine) -> None:
        self.machine = machine
        self.device = device
        self.last: list[Step] = []

    def submit(self, name: str, *after: Step) -> Step:
        step = Step(name, [*self.last, *after])
        self.last = [step]
        return step

    def wait_event(self, event: Event) -> None:
        assert event.step is not None, "an event that was not recorded lets everything pass"
        self.submit("wait", event.step)

    def wait_stream(self, other: Stream) -> None:
        self.submit("wait", *other.last)

    def synchronize(self) -> None:
        self.machine.synchronized.append(self)
        self.machine.on_synchronize()


class Event:
    """Double of `torch.cuda.Event`; recorded at most once, like those of the staging."""

    def __init__(self, machine: Machine, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing, "spans need the time"
        assert blocking, "a waiting thread must not keep a core busy"
        self.machine = machine
        self.step: Step | None = None
        self.stream: Stream | None = None
        self.num_waits = 0

    def record(self) -> None:
        assert self.step is None
        self.stream = self.machine.current
        self.step = self.stream.submit("mark")

    def synchronize(self) -> None:
        self.num_waits += 1

    def elapsed_time(self, other: Event) -> float:
        assert self.num_waits and other.num_waits
        return 1500.0


class Machine:
    """The streams of a device, the operations that they were given, and which of them is current.

    Attributes:
        copies: the transfers, in order of submission.
        synchronized: streams that the host waited for.
    """

    def __init__(self) -> None:
        self.caller = self.current = Stream(CPU, self)
        self.made: list[Stream] = []
        self.copies: list[Step] = []
        self.synchronized: list[Stream] = []
        self.on_synchronize: Callable[[], object] = lambda: None

    def make_stream(self, device: Any) -> Stream:
        self.made.append(Stream(device, self))
        return self.made[-1]

    def make_event(self, **flags: bool) -> Event:
        return Event(self, **flags)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def kernel(self) -> Step:
        """Give something to the caller's stream."""
        return self.caller.submit("kernel")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    real = torch.Tensor.copy_

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        assert non_blocking, "the host would wait"
        made.copies.append(made.current.submit("copy"))
        return real(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.cuda, "Stream", made.make_stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", made.make_event)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    return made


def host_bytes(bucket: Bucket, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + bucket.index)
    return torch.randint(256, (bucket.nbytes,), dtype=torch.uint8, generator=generator)


def bring(staging: Staging, machine: Machine, index: int) -> tuple[Upload, Step]:
    """Upload a bucket; return what came of it and its copy."""
    bucket = LAYOUT.buckets[index]
    upload = staging.upload(bucket, host_bytes(bucket))
    return upload, machine.copies[-1]


def take(staging: Staging, machine: Machine, upload: Upload) -> Step:
    """Download a bucket; return the copy."""
    staging.download(upload, torch.empty_like(upload.resident.stored))
    return machine.copies[-1]


# ------------------------------------------------------------------------------- who waits for whom


def test_an_upload_waits_for_the_last_download_out_of_its_slot_alone(machine: Machine) -> None:
    """That of the other slot may still be under way."""
    staging = Staging(LAYOUT, CPU, 2)
    downloads: list[Step] = []
    for index in range(8):
        upload, copy = bring(staging, machine, index)
        assert upload.slot == index % 2
        for before, download in enumerate(downloads):
            assert copy.comes_after(download) == (before <= index - 2)
        staging.await_upload(upload)
        downloads.append(take(staging, machine, upload))


def test_the_callers_stream_waits_for_an_upload_when_it_is_told_to(machine: Machine) -> None:
    """And for none of those that were begun after it."""
    staging = Staging(LAYOUT, CPU, 3)
    first, first_copy = bring(staging, machine, 0)
    _, second_copy = bring(staging, machine, 1)
    before = machine.kernel()

    staging.await_upload(first)
    after = machine.kernel()

    assert not before.comes_after(first_copy)
    assert after.comes_after(first_copy)
    assert not after.comes_after(second_copy)


def test_a_download_waits_for_what_the_callers_stream_was_given_before_it(machine: Machine) -> None:
    """The next update goes on beside it, and so does the next upload."""
    staging = Staging(LAYOUT, CPU, 2)
    upload, upload_copy = bring(staging, machine, 0)
    staging.await_upload(upload)
    update = machine.kernel()
    download = take(staging, machine, upload)
    next_update = machine.kernel()
    _, next_copy = bring(staging, machine, 1)

    assert download.comes_after(update)
    assert download.comes_after(upload_copy)
    for one, other in ((next_update, download), (next_copy, download), (next_copy, update)):
        assert not one.comes_after(other)
        assert not other.comes_after(one)


def test_the_verbs_have_streams_of_their_own(machine: Machine) -> None:
    """Uploads follow each other, and so do downloads."""
    staging = Staging(LAYOUT, CPU, 4)
    uploads = [bring(staging, machine, index) for index in range(4)]
    downloads = [take(staging, machine, upload) for upload, _ in uploads]
    for one, other in (*pairwise(copy for _, copy in uploads), *pairwise(downloads)):
        assert other.comes_after(one)
    marks = [(upload.begin, upload.end) for upload, _ in uploads]
    upload_stream, download_stream = machine.made
    assert {mark.stream for pair in marks for mark in pair} == {upload_stream}  # type: ignore[attr-defined]
    assert all(download_stream.last[0].comes_after(each) for each in downloads)
    for (upload, copy), (begin, end) in zip(uploads, marks, strict=True):
        assert copy.comes_after(begin.step)  # type: ignore[attr-defined]
        assert end.step.comes_after(copy)  # type: ignore[attr-defined]
        assert upload.slot == uploads.index((upload, copy))


def test_a_slot_that_was_lent_to_the_callers_stream_is_free_of_its_last_download(
    machine: Machine,
) -> None:
    """The caller's stream fills it then: at the start, and in a refresh."""
    staging = Staging(LAYOUT, CPU, 1)
    first = staging.lend(LAYOUT.buckets[0])
    fill = machine.kernel()
    download = take(staging, machine, first)
    assert download.comes_after(fill)
    assert not machine.kernel().comes_after(download)

    second = staging.lend(LAYOUT.buckets[1])

    assert machine.kernel().comes_after(download)
    assert second.slot == first.slot
    assert second.begin.stream is machine.caller  # type: ignore[attr-defined]


def test_new_slots_are_not_used_before_what_the_callers_stream_was_given(machine: Machine) -> None:
    """The allocator hands out memory that kernels of that stream may still be using."""
    staging = Staging(LAYOUT, CPU, 2)
    for _ in range(2):
        old = machine.kernel()
        _, copy = bring(staging, machine, 0)
        assert copy.comes_after(old)
        new = machine.kernel()
        _, copy = bring(staging, machine, 1)
        assert not copy.comes_after(new), "only the first use waits"
        staging.release()


def test_nothing_but_synchronize_and_release_blocks_the_host(machine: Machine) -> None:
    """A thread may wait for a download; what is measured waits for its marks."""
    staging = Staging(LAYOUT, CPU, 2)
    bucket = LAYOUT.buckets[0]
    upload, _ = bring(staging, machine, 0)
    staging.await_upload(upload)
    download = staging.download(upload, host_bytes(bucket))
    staging.keep(bucket, host_bytes(bucket))
    events: Any = (upload.begin, upload.end, download.begin, download.end)
    assert machine.synchronized == []
    assert [event.num_waits for event in events] == [0, 0, 0, 0]

    download.wait()
    assert [event.num_waits for event in events] == [0, 0, 0, 1]
    assert staging.seconds_between(upload.begin, upload.end) == 1.5
    assert machine.synchronized == []

    staging.synchronize()
    assert set(machine.synchronized) == {machine.caller, *machine.made}
    assert len(machine.made) == 2


# ---------------------------------------------------------------------------------- slots and bytes


def test_slots_are_used_in_turn_and_do_not_overlap(machine: Machine) -> None:
    """Each is as large as the largest bucket."""
    staging = Staging(LAYOUT, CPU, 3)
    uploads = [bring(staging, machine, index)[0] for index in range(9)]
    assert [upload.slot for upload in uploads] == [0, 1, 2] * 3
    storages = [upload.resident.stored.untyped_storage() for upload in uploads]
    assert len({storage.data_ptr() for storage in storages}) == 3
    assert all(storage.nbytes() == LAYOUT.slot_nbytes for storage in storages)


def test_what_was_uploaded_and_changed_is_what_is_downloaded(machine: Machine) -> None:
    """The whole extent of a bucket, also of one that does not fill its slot."""
    staging = Staging(LAYOUT, CPU, 2)
    for bucket in LAYOUT.buckets:
        source = host_bytes(bucket)
        upload = staging.upload(bucket, source)
        assert torch.equal(upload.resident.stored, source)
        upload.resident.stored.bitwise_not_()
        target = torch.zeros_like(source)
        staging.download(upload, target)
        assert torch.equal(target, ~source)


def test_the_first_bytes_of_an_extent_travel_alone(machine: Machine) -> None:
    """As of main params, to be compared or after they were filled."""
    staging = Staging(LAYOUT, CPU, 1)
    bucket = LAYOUT.buckets[0]
    nbytes = bucket.starts[MAIN + 1]
    upload = staging.upload(bucket, host_bytes(bucket)[:nbytes])
    assert torch.equal(upload.resident.stored[:nbytes], host_bytes(bucket)[:nbytes])
    assert not upload.resident.stored[nbytes:].any()

    target = torch.full((bucket.nbytes,), 7, dtype=torch.uint8)
    upload.resident.stored.fill_(1)
    staging.download(upload, target[:nbytes])
    assert target[:nbytes].eq(1).all() and target[nbytes:].eq(7).all()


def test_a_bucket_of_the_device_tier_needs_no_slot(machine: Machine) -> None:
    """It is updated where it lives, and no turn is skipped."""
    staging = Staging(LAYOUT, CPU, 2)
    bucket = LAYOUT.buckets[0]
    bring(staging, machine, 1)
    home = host_bytes(bucket)
    resident = staging.keep(bucket, home)
    resident.segment(bucket, MAIN).fill_(2.0)
    assert home[:4].view(torch.float32).item() == 2.0
    assert bring(staging, machine, 2)[0].slot == 1
    assert len(machine.copies) == 2


def test_without_slots_there_is_room_for_decoding_alone(machine: Machine) -> None:
    """All buckets may live on the device."""
    layout = make_layout([10_000], 1024, ADAM, ENCODED)
    staging = Staging(layout, CPU, 0)
    bucket = layout.buckets[0]
    resident = staging.keep(bucket, torch.zeros(bucket.nbytes, dtype=torch.uint8))
    assert resident.segment(bucket, MAIN).shape == (bucket.numel,)
    staging.release()


def parts(layout: Layout, staging: Staging, bucket: Bucket) -> list[tuple[int, int, int, int]]:
    """Return where each segment's FP32 and stored bytes lie: addresses and ends."""
    resident = staging.lend(bucket).resident
    found = []
    for index in range(len(layout.segments)):
        values, stored = resident.segment(bucket, index), resident.stored_segment(bucket, index)
        assert values.dtype == torch.float32 and values.shape == (bucket.numels[index],)
        assert stored.dtype == torch.uint8
        assert stored.numel() == bucket.starts[index + 1] - bucket.starts[index]
        found.append(
            (
                values.data_ptr(),
                values.data_ptr() + 4 * values.numel(),
                stored.data_ptr(),
                stored.data_ptr() + stored.numel(),
            )
        )
    return found


def test_segments_of_fp32_are_updated_where_they_are_stored(machine: Machine) -> None:
    """Without a copy: they are views of the slot."""
    staging = Staging(LAYOUT, CPU, 2)
    for bucket in LAYOUT.buckets:
        for first, last, start, end in parts(LAYOUT, staging, bucket):
            assert first == start and last <= end


def test_encoded_segments_are_decoded_in_one_place_of_their_own(machine: Machine) -> None:
    """The same for all slots; only the caller's stream uses it."""
    layout = make_layout([10_000], 1024, ADAM, (SPLIT, FP32, ENCODED[2]))
    staging = Staging(layout, CPU, 2)
    found = [parts(layout, staging, bucket) for bucket in layout.buckets]
    slots = [(each[0][2], each[-1][3]) for each in found[:2]]
    for each in found:
        for index in (0, 2):
            first, last, *_ = each[index]
            assert first == found[0][index][0], "every bucket's is here"
            assert all(last <= start or first >= end for start, end in slots)
        assert each[1][0] == each[1][2], "FP32 stays in the slot"
    assert found[0][0][1] <= found[0][2][0] or found[0][2][1] <= found[0][0][0]


# ------------------------------------------------------------------------------------------- memory


def record_size(storages: list[torch.UntypedStorage], sizes: list[int]) -> None:
    sizes.append(sum(each.nbytes() for each in storages))


@pytest.mark.parametrize("formats", [None, ENCODED], ids=["fp32", "encoded"])
def test_memory_is_that_of_the_formula_and_is_there_from_first_use_to_release(
    formats: tuple[Format, ...] | None, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots, and 4 bytes for each element of a segment that is decoded (invariant 9)."""
    storages: list[torch.UntypedStorage] = []
    real = torch.zeros

    def zeros(*arguments: Any, **keywords: Any) -> torch.Tensor:
        made = real(*arguments, **keywords)
        storages.append(made.untyped_storage())
        return made

    monkeypatch.setattr(torch, "zeros", zeros)
    layout = make_layout([10_000], 1024, ADAM, formats)
    bucket = layout.buckets[0]
    staging = Staging(layout, CPU, 3)
    decoded = 0 if formats is None else 4 * sum(layout.slot_numels)
    staging.release()
    assert storages == [], "nothing was used"
    for use in (staging.allocate, lambda: staging.lend(bucket)):
        use()
        staging.allocate()
        in_use = storages.copy()
        assert sum(each.nbytes() for each in in_use) == 3 * layout.slot_nbytes + decoded
        sizes: list[int] = []
        machine.synchronized.clear()
        machine.on_synchronize = partial(record_size, in_use, sizes)

        staging.release()

        assert set(machine.synchronized) == {machine.caller, *machine.made}
        assert sizes == [3 * layout.slot_nbytes + decoded] * 3, "copies may be under way till then"
        assert [each.nbytes() for each in in_use] == [0] * len(in_use)
        storages.clear()


def test_memory_is_given_back_although_an_error_still_holds_a_bucket(machine: Machine) -> None:
    """Its traceback does; and the memory of the device tier is not the staging's to free."""
    layout = make_layout([10_000], 1024, ADAM, ENCODED)
    bucket = layout.buckets[0]
    staging = Staging(layout, CPU, 1)
    held = staging.upload(bucket, torch.zeros(bucket.nbytes, dtype=torch.uint8)).resident
    decoded = held.segment(bucket, MAIN)
    home = torch.ones(bucket.nbytes, dtype=torch.uint8)
    kept = staging.keep(bucket, home)

    staging.release()

    assert held.stored.untyped_storage().nbytes() == 0
    assert decoded.untyped_storage().nbytes() == 0
    assert kept.stored.eq(1).all()


def test_released_slots_do_not_wait_for_downloads_of_before(machine: Machine) -> None:
    """These have ended: `release` waited for them."""
    staging = Staging(LAYOUT, CPU, 1)
    upload, _ = bring(staging, machine, 0)
    download = take(staging, machine, upload)
    staging.release()
    _, copy = bring(staging, machine, 1)
    assert not copy.comes_after(download)
