"""Between a resident bucket and the model: quantised params wait for the cast, and are watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.checkpoint import EntryRecord
from megatron.core.optimizer.nvme_state_store.errors import StateStoreError
from megatron.core.optimizer.nvme_state_store.layout import MAIN, Bucket, Layout, make_layout
from megatron.core.optimizer.nvme_state_store.model_shards import Entry, ModelShards, Quantised
from megatron.core.optimizer.nvme_state_store.staging import ResidentBucket

CPU = torch.device("cpu")
NUMELS = (300, 1001, 77)


@dataclass
class Param:
    """A param of 8 bits with one scale: the sign and a third of the value, in bytes."""

    values: torch.Tensor
    initial: torch.Tensor | None = None
    data: torch.Tensor = field(init=False)
    scale: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.cast(self.values)

    def cast(self, values: torch.Tensor) -> None:
        """What upstream does with all params at once; starts from 16 bits."""
        assert values.dtype == torch.bfloat16
        self.scale = values.float().abs().max().view(1) / 127
        self.data = (values.float() / self.scale).round().to(torch.int8).view(torch.uint8)

    def dequantised(self) -> torch.Tensor:
        return (self.data.view(torch.int8).float() * self.scale).to(torch.bfloat16)

    def release(self) -> None:
        self.initial = None

    def quantised(self) -> Quantised:
        return Quantised(
            dtype=torch.bfloat16,
            values=lambda: self.dequantised() if self.initial is None else self.initial,
            scales=lambda: self.scale.view(torch.uint8),
            release=self.release,
        )


def some(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def on_device(layout: Layout, bucket: Bucket) -> ResidentBucket:
    """Return a bucket whose segments are all FP32: none has to be decoded."""
    stored = torch.zeros(layout.slot_nbytes, dtype=torch.uint8)
    return ResidentBucket(layout, bucket, stored, [None] * len(layout.segments))


@dataclass
class Model:
    """Three params, the second of 8 bits, cut into buckets."""

    params: list[Param]
    entries: list[Entry]
    layout: Layout
    shards: ModelShards
    slots: list[ResidentBucket]


@pytest.fixture(params=[64, 256, 10_000])
def model(request: pytest.FixtureRequest) -> Model:
    params = [Param(some(numel, seed).bfloat16()) for seed, numel in enumerate(NUMELS)]
    params[1].initial = params[1].values
    plain = [param.values.clone() for param in params]
    entries = [
        Entry(
            EntryRecord(f"param{index}", (numel,), 0, numel),
            torch.empty(numel),
            0,
            (lambda: params[1].data) if index == 1 else partial(plain.__getitem__, index),
            params[1].quantised() if index == 1 else None,
        )
        for index, numel in enumerate(NUMELS)
    ]
    layout = make_layout(NUMELS, request.param, ("moment",))
    made = Model(params, entries, layout, ModelShards(entries, CPU), [])
    for bucket in layout.buckets:
        made.slots.append(on_device(layout, bucket))
        made.shards.fill(bucket, made.slots[-1], None)
    made.shards.release_initial_values()
    return made


def each_bucket(model: Model, call: Callable[..., None]) -> None:
    for bucket, slot in zip(model.layout.buckets, model.slots, strict=True):
        call(bucket, slot)


def step(model: Model, seed: int) -> None:
    """Subtract the gradients from the main params, publish, and cast what was parked."""
    for index, entry in enumerate(model.entries):
        entry.main.grad = some(entry.record.numel, seed + index)

    def update(bucket: object, slot: ResidentBucket) -> None:
        for piece in model.shards.slices(bucket, slot):  # type: ignore[arg-type]
            piece.main.sub_(piece.grad)
        model.shards.publish(bucket, slot)  # type: ignore[arg-type]

    each_bucket(model, update)
    model.params[1].cast(model.entries[1].parked())


def mains(model: Model, entry: int) -> torch.Tensor:
    """Return the main params of an entry, out of the slots of all buckets."""
    return torch.cat(
        [
            slot.segment(bucket, MAIN)[piece.offset : piece.offset + piece.numel]
            for bucket, slot in zip(model.layout.buckets, model.slots, strict=True)
            for piece in bucket.slices
            if piece.entry == entry
        ]
    )


def test_main_params_start_from_the_values_before_the_first_cast(model: Model) -> None:
    """Which are more precise than what the model has, and are released then."""
    for index, param in enumerate(model.params):
        assert torch.equal(mains(model, index), param.values.float())
        assert param.initial is None
    assert not torch.equal(model.params[1].dequantised(), model.params[1].values)


def test_parking_reaches_no_gradient_that_is_still_to_be_read(model: Model) -> None:
    """Wherever an entry is cut; what is cast is the rounding of the main params."""
    expected = [mains(model, index) for index in range(3)]
    for seed in (10, 20):
        step(model, seed)
        model.shards.remember_quantised(model.layout.buckets)
        for index in range(3):
            expected[index] = expected[index] - some(NUMELS[index], seed + index)
            assert torch.equal(mains(model, index), expected[index])
        cast = Param(expected[1].bfloat16())
        assert torch.equal(model.params[1].data, cast.data)
        assert torch.equal(model.params[1].scale, cast.scale)
        model.shards.check(model.layout.buckets)


def test_a_cast_that_was_not_remembered_is_found(model: Model) -> None:
    """So a step whose cast failed can't be gone on from."""
    step(model, 10)
    with pytest.raises(StateStoreError, match="param1"):
        model.shards.check(model.layout.buckets)


@pytest.mark.parametrize("part", ["data", "scale"])
def test_bytes_and_scales_of_quantised_params_are_watched(part: str, model: Model) -> None:
    """Scales alone would change all values and no byte."""
    step(model, 10)
    model.shards.remember_quantised(model.layout.buckets)
    tensor = getattr(model.params[1], part)
    tensor.view(torch.uint8)[-1] ^= 1
    with pytest.raises(StateStoreError, match=r"param1.*not those the store published"):
        model.shards.check(model.layout.buckets)


@pytest.mark.parametrize("index", range(3))
def test_the_first_bucket_whose_shards_were_replaced_is_named(index: int, model: Model) -> None:
    """One comparison for all buckets, and the message still says where to look."""
    step(model, 10)
    model.shards.remember_quantised(model.layout.buckets)
    model.shards.check(model.layout.buckets)
    for entry in model.entries[index:]:
        entry.model_shard().view(torch.uint8)[0] ^= 1
    first = next(
        bucket
        for bucket in model.layout.buckets
        if any(piece.entry == index for piece in bucket.slices)
    )
    with pytest.raises(StateStoreError, match=rf"^bucket {first.index} \(.*param{index}.*\)"):
        model.shards.check(model.layout.buckets)


@pytest.mark.parametrize("cap", [64, 256, 10_000])
@pytest.mark.parametrize("numels", [(300, 1001, 77), (300, 0, 77), (0, 500, 0, 0, 700, 3)])
def test_each_main_param_has_its_norm(numels: tuple[int, ...], cap: int) -> None:
    """Also one that is cut over buckets, and beside one of which this rank has nothing."""
    values = [some(numel, seed).bfloat16() for seed, numel in enumerate(numels)]
    entries = [
        Entry(EntryRecord("p", (numel,), 0, numel), torch.empty(0), 0, lambda each=each: each)  # type: ignore[misc]
        for numel, each in zip(numels, values, strict=True)
    ]
    layout = make_layout(numels, cap, ("exp_avg",))
    shards = ModelShards(entries, CPU)

    for bucket in layout.buckets:
        shards.fill(bucket, on_device(layout, bucket), None)

    norms = torch.cat([entry.main.nvme_l2_norm for entry in entries])  # type: ignore[attr-defined]
    torch.testing.assert_close(norms, torch.stack([each.float().norm() for each in values]))


def test_a_param_without_gradient_is_named(model: Model) -> None:
    """Before anything is read: the update would skip it, silently."""
    step(model, 10)
    model.shards.remember_quantised(model.layout.buckets)
    model.entries[2].main.grad = None
    with pytest.raises(StateStoreError, match="param2 has no gradient"):
        model.shards.check(model.layout.buckets)


def test_a_rank_without_buckets_has_nothing_to_check() -> None:
    ModelShards([], CPU).check([])
    ModelShards([], CPU).require([], [])
    assert ModelShards([], CPU).fingerprints([]) == ()


def test_fingerprints_of_a_snapshot_are_those_of_its_model_alone(model: Model) -> None:
    """Numbers that go through a manifest; one flipped bit of a weight is found by name."""
    buckets = model.layout.buckets
    saved = model.shards.fingerprints(buckets)
    assert all(type(number) is int for each in saved for number in each)

    model.shards.require(buckets, saved)
    shard = model.entries[0].model_shard()
    shard.view(torch.uint8)[-1] ^= 1
    with pytest.raises(StateStoreError, match=r"param0.*of different checkpoints"):
        model.shards.require(buckets, saved)
    shard.view(torch.uint8)[-1] ^= 1
    model.shards.require(buckets, saved)
    changed = [list(each) for each in saved]
    changed[-1][1] += 1
    with pytest.raises(StateStoreError, match=rf"^bucket {buckets[-1].index} "):
        model.shards.require(buckets, changed)


def test_main_params_that_do_not_round_to_the_model_are_told() -> None:
    """Which have no home in ``split`` storage; of a tie only the even neighbour is right."""
    shard = torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16)
    entry = Entry(EntryRecord("param", (3,), 0, 3), torch.empty(3), 0, lambda: shard)
    layout = make_layout([3], 64, ())
    (bucket,) = layout.buckets
    resident = on_device(layout, bucket)
    main = resident.segment(bucket, MAIN)
    shards = ModelShards([entry], CPU)

    main.copy_(shard)
    assert shards.rounds(bucket, resident)
    main[0] += 2**-8  # half a unit in the last place: a tie, and 1.0 is even
    assert shards.rounds(bucket, resident)
    main[0] += 2**-20
    assert not shards.rounds(bucket, resident)


def test_loaded_main_params_must_be_near_the_quantised_values(model: Model) -> None:
    """As far as 8 bits tell: not those of another run."""

    class E4M3(Param):
        def cast(self, values: torch.Tensor) -> None:
            self.scale = values.float().abs().max().view(1) / 448
            scaled = (values.float() / self.scale).to(torch.float8_e4m3fn)
            self.data = scaled.view(torch.uint8)

        def dequantised(self) -> torch.Tensor:
            values = self.data.view(torch.float8_e4m3fn).float()
            return (values * self.scale).to(torch.bfloat16)

    numel = 1001
    param = E4M3((some(numel, 3) * torch.logspace(-9, 0, numel)).bfloat16())
    entry = Entry(
        EntryRecord("param", (numel,), 0, numel),
        torch.empty(numel),
        0,
        lambda: param.data,
        param.quantised(),
    )
    layout = make_layout([numel], 256, ())
    shards = ModelShards([entry], CPU)

    def compare(values: torch.Tensor) -> None:
        for bucket in layout.buckets:
            slot = on_device(layout, bucket)
            for piece in bucket.slices:
                where = slice(piece.offset, piece.offset + piece.numel)
                slot.segment(bucket, MAIN)[where] = values[piece.start : piece.start + piece.numel]
            shards.compare(bucket, slot)

    compare(param.values.float())
    with pytest.raises(StateStoreError, match="of different checkpoints"):
        compare(some(numel, 4) * torch.logspace(-9, 0, numel))


def test_params_that_are_offloaded_are_not_read(model: Model) -> None:
    """Their storage is gone: on a GPU it would be an illegal access, here a crash."""
    step(model, 3)
    bucket, slot = model.layout.buckets[0], model.slots[0]
    model.entries[0].model_shard().untyped_storage().resize_(0)

    for call in (
        lambda: model.shards.check_published(model.layout.buckets),
        lambda: model.shards.fill(bucket, slot, None),
        lambda: model.shards.publish(bucket, slot),
        lambda: model.shards.compare(bucket, slot),
        lambda: model.shards.rounds(bucket, slot),
    ):
        with pytest.raises(StateStoreError, match="param0: the model params are offloaded"):
            call()
