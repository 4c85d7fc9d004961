"""Device and pinned bytes are a formula of the layout; the file holds exactly the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import gpt, streaming
from tests.patched.scenarios import by_name, make_inner_optimizer_of
from tests.patched.test_streaming_failures import Stopped, fill_grads
from tests.rank_pool import RankPool

BUCKET_NUMEL = 40_000
NUM_DEVICE_SLOTS = 4
SMALL = 50_000
"""Bytes of temporaries that do not grow with the bucket: sums of fingerprints, norms."""
WEIGHTS = 16384 * 8
"""Bytes of the weights of fingerprints, which are made once."""


def measured(call: Callable[[], Any]) -> int:
    """Return how many device bytes a call needs at its peak beyond what is there before."""
    torch.cuda.synchronize()
    before: int = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    peak: int = torch.cuda.max_memory_allocated()
    return peak - before


def measure_optimizer_construction() -> dict[str, int]:
    """Measure from now on what the construction of Megatron's optimizer needs and leaves."""
    from megatron.training import training

    construct = training.get_megatron_optimizer
    found: dict[str, int] = {}

    def measured_construct(*args: Any, **kwargs: Any) -> Any:
        made: list[Any] = []
        before = torch.cuda.memory_allocated()
        found["construction"] = measured(lambda: made.append(construct(*args, **kwargs)))
        found["left"] = torch.cuda.memory_allocated() - before
        return made[0]

    training.get_megatron_optimizer = measured_construct
    return found


SEGMENTS = {"dp1": 3, "lion": 2, "sgd-momentum": 2, "sgd": 1}
"""Main params, and the state that each of these optimizers keeps."""


def measure(directory: str, base: str, with_update: bool, scenario: str) -> dict[str, int]:
    """Measure everything that a store does; without its update, whose temporaries are others'."""
    from megatron.core.optimizer.nvme_state_store import bucket_work

    from tests.emulated_cuda import pinned_memory_allocated

    make_inner_optimizer_of(by_name(scenario).config)
    if not with_update:
        vars(bucket_work)["update_slices"] = lambda *args: None
    found = measure_optimizer_construction()

    def look(model: Sequence[Any], optimizer: Any) -> None:
        store = optimizer._nvme_state_store
        found["pinned"] = pinned_memory_allocated()
        found["slot_nbytes"] = store.layout.slot_nbytes
        found["device_slots"] = store.working_set.staging.num_slots
        found["host_slots"] = len(store.working_set.pipeline._host_slots)
        found["slot_numel"] = store.layout.slot_numels[0]
        found["segments"] = len(store.layout.segments)
        found["total_numel"] = sum(entry.record.numel for entry in store.entries)
        found["largest_entry"] = max(entry.record.numel for entry in store.entries)
        found["storage"] = sum(e.main.untyped_storage().nbytes() for e in store.entries)
        fill_grads(model)
        optimizer.prepare_grads()
        found["step"] = measured(store.step)
        found["refresh"] = measured(store.refresh_main_from_model_params)
        found["save"] = measured(lambda: store.save_to(base))
        found["load"] = measured(lambda: store.load_from(base))
        before = torch.cuda.memory_allocated()
        store.release_slots(host=True)
        found["released"] = before - torch.cuda.memory_allocated()
        found["pinned_after_release"] = pinned_memory_allocated()
        found["step_after_release"] = measured(store.step)
        volumes = store.working_set.homes.open_volumes()
        found["resident"] = sum(volume.file.resident_bytes() for volume in volumes)
        raise Stopped

    try:
        flags = streaming.flags(directory, BUCKET_NUMEL)
        gpt.train([*gpt.BF16, *flags], 0, after_setup=look)
    except Stopped:
        return found
    raise AssertionError("setup did not reach the callback")


BytesOf = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def bytes_of(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> BytesOf:
    """The measurements, with and without the inner optimizer's own temporaries."""

    @functools.cache
    def make_once(with_update: bool, scenario: str = "dp1") -> dict[str, int]:
        directory = tmp_path_factory.mktemp("memory")
        (found,) = ranks.run(
            measure,
            directory=str(directory / "state"),
            base=str(directory / "saved"),
            with_update=with_update,
            scenario=scenario,
        )
        assert isinstance(found, dict)
        return found

    return make_once


def test_the_model_is_larger_than_the_slots(bytes_of: BytesOf) -> None:
    """Else the bounds would say nothing."""
    found = bytes_of(False)
    assert found["device_slots"] == found["host_slots"] == NUM_DEVICE_SLOTS
    assert found["total_numel"] > 1.5 * found["device_slots"] * found["slot_numel"]
    assert found["slot_numel"] >= 0.9 * BUCKET_NUMEL / NUM_DEVICE_SLOTS
    assert found["slot_nbytes"] > 2 * SMALL


@pytest.mark.parametrize("scenario", SEGMENTS)
def test_device_bytes_are_those_of_the_slots(scenario: str, bytes_of: BytesOf) -> None:
    """They are there from construction on, and the configured cap is that of all of them."""
    found = bytes_of(False, scenario)
    assert found["segments"] == SEGMENTS[scenario]
    slots = found["device_slots"] * found["slot_nbytes"]
    assert slots <= found["left"] <= slots + WEIGHTS + SMALL
    assert found["device_slots"] * found["slot_numel"] <= BUCKET_NUMEL + 64 * NUM_DEVICE_SLOTS
    assert found["storage"] == 0


@pytest.mark.parametrize("scenario", SEGMENTS)
@pytest.mark.parametrize("what", ["step", "refresh", "load", "save"])
def test_nothing_else_takes_device_memory(what: str, scenario: str, bytes_of: BytesOf) -> None:
    """But for a load the rounded main params that are compared."""
    found = bytes_of(False, scenario)
    rounded = 2 * found["slot_numel"] if what == "load" else 0
    assert found[what] <= rounded + SMALL


@pytest.mark.parametrize("scenario", SEGMENTS)
def test_released_slots_are_given_back_and_taken_again(scenario: str, bytes_of: BytesOf) -> None:
    found = bytes_of(False, scenario)
    slots = found["device_slots"] * found["slot_nbytes"]
    assert slots <= found["released"] <= slots + SMALL
    assert found["pinned_after_release"] == 0
    assert slots <= found["step_after_release"] <= slots + SMALL


def test_the_inner_optimizer_sees_one_bucket_at_a_time(
    bytes_of: BytesOf,
) -> None:
    """Its temporaries are a few times its largest slice, never the whole shard's."""
    found = bytes_of(True)
    assert found["step"] <= 4 * 4 * found["slot_numel"] + SMALL


def test_state_that_the_first_step_makes_is_there_once_more(bytes_of: BytesOf) -> None:
    """For one bucket: beside the slot, the momentum that SGD makes, and SGD's temporaries."""
    found = bytes_of(True, "sgd-momentum")
    assert found["step"] <= (4 + 2 * 4) * found["slot_numel"] + SMALL


def test_construction_is_bounded_by_the_slots_or_one_shard(
    bytes_of: BytesOf,
) -> None:
    """At no time is the whole FP32 state there."""
    found = bytes_of(False)
    slots = found["device_slots"] * found["slot_nbytes"]
    bound = max(slots, 4 * found["largest_entry"])
    assert found["construction"] <= bound + WEIGHTS + SMALL
    assert found["construction"] < 12 * found["total_numel"]


@pytest.mark.parametrize("scenario", SEGMENTS)
def test_pinned_bytes_are_those_of_the_host_slots(scenario: str, bytes_of: BytesOf) -> None:
    """Exactly: each holds so many times the main params, rounded up to pages."""
    found = bytes_of(False, scenario)
    assert found["pinned"] == found["host_slots"] * found["slot_nbytes"]
    main = found["slot_nbytes"] // found["segments"]
    assert 4 * found["slot_numel"] <= main < 4 * found["slot_numel"] + 4096


def measure_whole_params(directory: str, base: str, arguments: list[str]) -> dict[str, int]:
    """Measure construction, refresh and load of stores of whole params, without any update."""
    from megatron.core.optimizer.nvme_state_store import bucket_work

    vars(bucket_work)["update_slices"] = lambda *args: None
    found = measure_optimizer_construction()

    def look(model: Sequence[Any], optimizer: Any) -> None:
        stores = list(optimizer._stores())
        entries = [entry for store in stores for entry in store.entries]
        found["slots"] = sum(
            store.working_set.staging.num_slots * store.layout.slot_nbytes for store in stores
        )
        found["rounded"] = 2 * max(store.layout.slot_numels[0] for store in stores)
        found["mains"] = 4 * sum(entry.record.numel for entry in entries)
        found["largest"] = 4 * max(entry.record.numel for entry in entries)
        found["storage"] = sum(entry.main.untyped_storage().nbytes() for entry in entries)
        fill_grads(model)
        optimizer.prepare_grads()
        found["step"] = max(measured(store.step) for store in stores)
        found["refresh"] = measured(optimizer.reload_model_params)
        found["save"] = measured(lambda: optimizer.save_stores(Path(base)))
        found["load"] = measured(lambda: optimizer.load_stores(Path(base)))
        raise Stopped

    try:
        flags = streaming.flags(directory, 8_000)
        gpt.train([*gpt.REPLICATED, *arguments, *flags], 0, after_setup=look)
    except Stopped:
        return found
    raise AssertionError("setup did not reach the callback")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--optimizer", "muon"],
        ["--optimizer", "muon", "--use-distributed-optimizer"],
        ["--optimizer", "soap", "--use-distributed-optimizer"],
    ],
    ids=["adam", "muon", "muon-layer-wise", "soap-layer-wise"],
)
def test_whole_params_take_a_slot_and_never_all_of_their_main_params(
    arguments: list[str], ranks: RankPool, tmp_path: Path
) -> None:
    """At construction, too; a slot holds the cap, or the largest matrix with its state."""
    (found,) = ranks.run(
        measure_whole_params,
        directory=str(tmp_path / "state"),
        base=str(tmp_path / "saved"),
        arguments=arguments,
    )

    assert found["storage"] == 0
    assert found["construction"] <= found["slots"] + found["largest"] + WEIGHTS + SMALL
    for what in ("step", "refresh", "load"):
        rounded = found["rounded"] if what == "load" else 0
        assert found[what] <= rounded + SMALL
    assert found["save"] < SMALL


def slots_of_stores(directory: str, arguments: list[str]) -> list[tuple[int, int, int]]:
    """Return, of each store of a rank, elements of state, elements of slots, buckets."""
    found: list[tuple[int, int, int]] = []

    def look(model: Sequence[Any], optimizer: Any) -> None:
        for store in optimizer._stores():
            slots = store.working_set.staging.num_slots * store.layout.slot_nbytes
            found.append((store.layout.nbytes // 12, slots // 12, len(store.layout.buckets)))
        raise Stopped

    try:
        flags = streaming.flags(directory, BUCKET_NUMEL)
        gpt.train([*gpt.BF16, *arguments, *flags], 0, after_setup=look)
    except Stopped:
        return found
    raise AssertionError("setup did not reach the callback")


@pytest.mark.parametrize("experts", ["4", "32"])
def test_the_slots_of_all_stores_together_keep_to_the_cap(
    experts: str, ranks: RankPool, tmp_path: Path
) -> None:
    """A mixture of experts has two stores on each rank, of any sizes; each streams."""
    arguments = [*gpt.MOE, "--num-experts", experts, "--expert-model-parallel-size", "2"]
    by_rank = ranks.run(slots_of_stores, 2, directory=str(tmp_path), arguments=arguments)

    padding = 2 * NUM_DEVICE_SLOTS * 1024  # segments begin at multiples of 4096 bytes
    for stores in by_rank:
        assert len(stores) == 2
        assert sum(numel for numel, _, _ in stores) > 1.5 * BUCKET_NUMEL, "or all fits"
        assert sum(slots for _, slots, _ in stores) <= BUCKET_NUMEL + padding
        assert all(buckets >= NUM_DEVICE_SLOTS for _, _, buckets in stores)


def parts_of_stores(nbytes_by_rank: list[tuple[int, int]]) -> list[Fraction]:
    """Return the parts that a store of flat shards and one of whole params get on this rank."""
    import torch.distributed as dist
    from megatron.core.optimizer.nvme_state_store.chained_optimizer import StreamedChainedOptimizer

    dist.init_process_group("gloo")
    found: list[Fraction] = []
    stores = [
        SimpleNamespace(
            layout=SimpleNamespace(nbytes=nbytes),
            keys=SimpleNamespace(is_elementwise=is_elementwise),
            use_part=found.append,
        )
        for nbytes, is_elementwise in zip(
            nbytes_by_rank[dist.get_rank()], (True, False), strict=True
        )
    ]
    optimizer: Any = object.__new__(StreamedChainedOptimizer)
    optimizer._stores = lambda: iter(stores)
    optimizer._share_slots()
    return found


def test_ranks_give_whole_params_the_same_part_of_their_slots(ranks: RankPool) -> None:
    """Those that update matrices together walk the same buckets, whatever else each of them has."""
    first, second = ranks.run(parts_of_stores, 2, nbytes_by_rank=[(100, 300), (100, 100)])

    assert first == [Fraction(1, 4), Fraction(3, 4)]
    assert second == [Fraction(1, 2), Fraction(3, 4)]


def look_at_file(directory: str) -> dict[str, Any]:
    """Compare the file after construction with the model, and look at its page cache."""
    from megatron.core.optimizer.nvme_state_store.store import OptimizerStateStore

    written: list[int] = []
    initialize = OptimizerStateStore.initialize_main_from_model_params

    def initialized(self: Any, budgets: Any = None) -> int:
        written.append(initialize(self, budgets))
        return written[-1]

    setattr(OptimizerStateStore, initialize.__name__, initialized)
    found: dict[str, Any] = {}

    def look(model: Sequence[Any], optimizer: Any) -> None:
        store = optimizer._nvme_state_store
        volumes = store.working_set.homes.open_volumes()
        found["resident"] = sum(volume.file.resident_bytes() for volume in volumes)
        found["written"] = written
        found["mains"] = sum(bucket.starts[1] for bucket in store.layout.buckets)
        (volume,) = store.working_set.homes.open_volumes()
        found["blocks"] = volume.file.path.stat().st_blocks * 512 - store.layout.nbytes
        content = volume.file.path.read_bytes()
        wrong, elements = [], 0
        for bucket in store.layout.buckets:
            for piece in bucket.slices:
                entry = store.entries[piece.entry]
                shard = entry.model_shard()[piece.start : piece.start + piece.numel]
                start = bucket.offset + 4 * piece.offset
                main, *moments = (
                    content[start + begin :][: 4 * piece.numel] for begin in bucket.starts[:3]
                )
                if main != shard.float().cpu().numpy().tobytes() or any(map(any, moments)):
                    wrong.append(entry.record.name)
                elements += piece.numel
        found["wrong"] = wrong
        found["elements"] = elements
        raise Stopped

    try:
        flags = streaming.flags(directory, BUCKET_NUMEL)
        gpt.train([*gpt.BF16, *flags], 0, after_setup=look)
    except Stopped:
        return found
    raise AssertionError("setup did not reach the callback")


def test_file_holds_the_weights_as_fp32_and_zeros(ranks: RankPool, tmp_path: Path) -> None:
    """Main params are the BF16 shards exactly and moments are zero, on every rank.

    The bytes written are returned, blocks are reserved, and the page cache is gone.
    """
    for found in ranks.run(look_at_file, 2, directory=str(tmp_path)):
        assert found["wrong"] == []
        assert found["elements"] > BUCKET_NUMEL
        assert found["written"] == [found["mains"]]
        assert found["blocks"] >= 0
        assert found["resident"] == 0
