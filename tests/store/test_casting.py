"""Buckets of mixed formats come back from their stored bytes, whatever lies between slices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.casting import Casts
from megatron.core.optimizer.nvme_state_store.checkpoint import EntryRecord
from megatron.core.optimizer.nvme_state_store.encoding import decode, encode, split_parts
from megatron.core.optimizer.nvme_state_store.formats import (
    FORMATS,
    FP32,
    MOMENT_DTYPES,
    main_format,
    moment_format,
)
from megatron.core.optimizer.nvme_state_store.layout import MAIN, Bucket, Layout, make_layout
from megatron.core.optimizer.nvme_state_store.layout import make_whole_layout as whole_layout
from megatron.core.optimizer.nvme_state_store.model_shards import Entry
from megatron.core.optimizer.nvme_state_store.staging import ResidentBucket

from tests.store.launches import Launches

NUMELS = (300, 1001, 0, 77, 64, 5)
KEYS = ("exp_avg", "exp_avg_sq")


@dataclass
class Store:
    """Entries with 16-bit shards, and their buckets in one slot each."""

    layout: Layout
    casts: Casts
    shards: list[torch.Tensor]
    slots: list[ResidentBucket]

    def expected(self, bucket: Bucket, index: int) -> torch.Tensor:
        """Return what a segment holds: main params, or moments of the same magnitude."""
        random = torch.Generator().manual_seed(1000 * bucket.index + index)
        values = torch.randn(bucket.numels[index], generator=random)
        return values.square_() if self.layout.segments[index] == "exp_avg_sq" else values

    def fill(self, bucket: Bucket) -> None:
        """Let an update have left these values, and publish the main params."""
        slot = self.slots[bucket.index]
        for index in range(len(self.layout.segments)):
            slot.segment(bucket, index).copy_(self.expected(bucket, index))
        main = slot.segment(bucket, MAIN)
        for piece in bucket.slices:
            target = self.shards[piece.entry][piece.start : piece.start + piece.numel]
            target.copy_(main[piece.offset : piece.offset + piece.numel])

    def forget(self, bucket: Bucket) -> None:
        """Let the decoded segments be those of another bucket."""
        for index, each in enumerate(self.layout.formats):
            if each != FP32:
                self.slots[bucket.index].segment(bucket, index).fill_(float("nan"))

    def stored(self, bucket: Bucket, index: int) -> torch.Tensor:
        """Return the bytes of a segment, without its padding."""
        nbytes = self.layout.formats[index].nbytes(bucket.numels[index])
        return self.slots[bucket.index].stored_segment(bucket, index)[:nbytes]


def make_store(layout: Layout, numels: tuple[int, ...] = NUMELS) -> Store:
    shards = [torch.zeros(numel, dtype=torch.bfloat16) for numel in numels]
    entries = [
        Entry(
            EntryRecord(f"param{index}", (numel,), 0, numel),
            torch.empty(numel),
            0,
            partial(shards.__getitem__, index),
            None,
        )
        for index, numel in enumerate(numels)
    ]
    slots = [
        ResidentBucket(
            layout,
            bucket,
            torch.full((layout.slot_nbytes,), 0xA5, dtype=torch.uint8),
            [
                None if each == FP32 else torch.full((numel,), float("nan"))
                for each, numel in zip(layout.formats, layout.slot_numels, strict=True)
            ],
        )
        for bucket in layout.buckets
    ]
    return Store(layout, Casts(layout, entries), shards, slots)


def made(main_storage: str, moment_dtype: str, bucket_numel: int = 10_000) -> Store:
    formats = [main_format(main_storage), *(moment_format(key, moment_dtype) for key in KEYS)]
    return make_store(make_layout(NUMELS, bucket_numel, KEYS, formats))


@pytest.mark.parametrize("bucket_numel", [64, 256, 10_000])
@pytest.mark.parametrize("moment_dtype", MOMENT_DTYPES)
@pytest.mark.parametrize("main_storage", ["fp32", "split"])
def test_a_bucket_comes_back(main_storage: str, moment_dtype: str, bucket_numel: int) -> None:
    """Main params bit for bit, moments as their format has them, each segment from its own bytes.

    Buckets hold several entries, and parts of one.
    """
    store = made(main_storage, moment_dtype, bucket_numel)
    for bucket in store.layout.buckets:
        store.fill(bucket)
        store.casts.encode(bucket, store.slots[bucket.index], 3)
        store.forget(bucket)
    for bucket in store.layout.buckets:
        slot = store.slots[bucket.index]
        store.casts.decode(bucket, slot)
        for piece in bucket.slices:
            here = slice(piece.offset, piece.offset + piece.numel)
            assert torch.equal(slot.segment(bucket, MAIN)[here], store.expected(bucket, MAIN)[here])
        for index in range(MAIN + 1, len(store.layout.segments)):
            out = torch.empty(bucket.numels[index])
            decode(store.layout.formats[index], store.stored(bucket, index), out)
            assert torch.equal(slot.segment(bucket, index), out)
            error = (out - store.expected(bucket, index)).abs()
            assert error.max() <= {"fp32": 0, "bf16": 0.1, "fp16": 0.01}.get(moment_dtype, 8)


def test_first_moments_are_rounded_to_nearest_and_second_ones_at_random() -> None:
    store = made("fp32", "bf16")
    (bucket,) = store.layout.buckets
    store.fill(bucket)
    store.casts.encode(bucket, store.slots[0], 3)
    for index, is_nearest in ((1, True), (2, False)):
        nearest = torch.empty_like(store.stored(bucket, index))
        encode(FORMATS["bf16"], store.expected(bucket, index), nearest)
        assert torch.equal(store.stored(bucket, index), nearest) == is_nearest


@pytest.mark.parametrize("moment_dtype", [each for each in MOMENT_DTYPES if each != "fp32"])
def test_the_bytes_are_a_function_of_the_step(moment_dtype: str) -> None:
    """The same step gives the same, on another rank or after a resume; another step gives others.

    Of second moments; those of first moments and main params know no step.
    """
    found = []
    for step in (3, 3, 4):
        store = made("split", moment_dtype)
        (bucket,) = store.layout.buckets
        store.fill(bucket)
        store.casts.encode(bucket, store.slots[0], step)
        found.append([store.stored(bucket, index).clone() for index in range(3)])
    first, again, other = found
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert [torch.equal(one, two) for one, two in zip(first, other, strict=True)] == [
        True,
        True,
        False,
    ]


def test_buckets_and_segments_have_noise_of_their_own() -> None:
    """Equal values in two buckets and in two second moments are rounded to different bytes."""
    keys = ("exp_avg_sq", "max_exp_avg_sq")
    store = make_store(
        make_layout((128, 128), 128, keys, [FP32, FORMATS["bf16"], FORMATS["bf16"]]), (128, 128)
    )
    found = []
    for bucket in store.layout.buckets:
        slot = store.slots[bucket.index]
        for index in (1, 2):
            slot.segment(bucket, index).copy_(torch.linspace(1, 2, 128))
        store.casts.encode(bucket, slot, 0)
        found += [store.stored(bucket, index) for index in (1, 2)]
    assert len(found) == 4
    assert len({bytes(each.numpy()) for each in found}) == 4


def test_state_of_other_sizes_than_its_main_params_comes_back() -> None:
    """Entries that are whole; state that is no moment stays FP32, bit for bit."""
    keys = ("exp_avg", "GG", "exp_avg_sq")
    numels = ((300, 300, 10, 300), (77, 77, 5000, 77))
    formats = [main_format("split"), *(moment_format(key, "fp8e4m3") for key in keys)]
    store = make_store(whole_layout(numels, (0, 0), 10_000, keys, formats), (300, 77))
    (bucket,) = store.layout.buckets
    store.fill(bucket)
    store.casts.encode(bucket, store.slots[0], 3)
    store.forget(bucket)
    store.casts.decode(bucket, store.slots[0])
    for index, name in enumerate(store.layout.segments):
        slot, expected = store.slots[0].segment(bucket, index), store.expected(bucket, index)
        for piece in bucket.slices:
            part = piece.parts[index]
            here = slice(part.offset, part.offset + part.numel)
            is_exact = torch.equal(slot[here], expected[here])
            assert is_exact == (name in ("main", "GG")), name
            assert slot[here].isfinite().all()


def launches_of_split(numels: tuple[int, ...]) -> int:
    formats = [main_format("split"), FP32, FP32]
    store = make_store(make_layout(numels, 10_000, KEYS, formats), numels)
    (bucket,) = store.layout.buckets
    store.fill(bucket)
    with Launches() as launches:
        store.casts.encode(bucket, store.slots[0], 3)
        store.casts.decode(bucket, store.slots[0])
    count: int = launches.count
    return count


def test_many_slices_take_as_many_kernels_as_one() -> None:
    """Those of experts lie without a gap. But for copies of the model's shards, one each."""
    one = launches_of_split((6400,))
    assert one > 5
    assert launches_of_split((64,) * 100) == one
    assert launches_of_split((64, 65, 64)) > one, "the padding between two runs stays"


@pytest.mark.parametrize("numels", [(64, 64, 128), (64, 65, 64, 1, 300), (5,), NUMELS])
def test_padding_of_split_main_params_stays_as_it_is(numels: tuple[int, ...]) -> None:
    """Or what another bucket left would be saved with this one."""
    formats = [main_format("split"), FP32, FP32]
    store = make_store(make_layout(numels, 10_000, KEYS, formats), numels)
    (bucket,) = store.layout.buckets
    low, ties = split_parts(store.stored(bucket, MAIN), bucket.numel)
    is_padding = torch.ones(bucket.numel, dtype=torch.bool)
    for piece in bucket.slices:
        is_padding[piece.offset : piece.offset + piece.numel] = False
    store.fill(bucket)
    store.casts.encode(bucket, store.slots[0], 3)
    assert (low.view(torch.uint8).view(-1, 2)[is_padding] == 0xA5).all()
    whole = is_padding[: bucket.numel // 8 * 8].view(-1, 8).all(dim=1)
    assert (ties[: len(whole)][whole] == 0xA5).all()
    assert is_padding.any() == any(numel % 64 for numel in numels[:-1])
