"""A streamed run is bit for bit the stock run: weights, mains, moments, steps, losses and norms."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import gpt, streaming
from tests.gpt import OptimizerTensor, Run
from tests.patched.resume import SAVED_AT
from tests.patched.scenarios import DP1, FP16, NATIVE, SCENARIOS, Scenario, by_name, prepare, train
from tests.rank_pool import RankPool


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a scenario, by rank: stock, and streamed up to its save and after its load.

    A scenario that is not resumed has one streamed run, which is in `after`.
    """

    stock: list[Run]
    before: list[Run]
    after: list[Run]


@pytest.fixture(scope="module")
def make(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], Runs]:
    """Make the runs of a scenario, once."""

    @functools.cache
    def make_once(name: str) -> Runs:
        scenario = by_name(name)
        base = tmp_path_factory.mktemp(name)
        checkpoint = str(base / "checkpoint")
        go = functools.partial(ranks.run, train, scenario.world_size, scenario=scenario)
        before = []
        if scenario.is_resumed:
            before = go(directory=str(base / "before"), until=SAVED_AT, save=checkpoint)
        load = checkpoint if scenario.is_resumed else None
        runs = Runs(go(), before, go(directory=str(base / "after"), load=load))
        shutil.rmtree(base)
        return runs

    return lambda scenario: make_once(scenario.name)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_streamed_run_equals_the_stock_run(
    scenario: Scenario, make: Callable[[Scenario], Runs]
) -> None:
    """State, losses and norms after 10 steps are the same bit for bit on every rank.

    Although the streamed run was saved, and loaded in fresh processes; some of these runs stock
    Megatron could not resume itself (torch's Adam, SGD).
    """
    runs = make(scenario)
    for stock, before, after in zip(runs.stock, runs.before or runs.after, runs.after, strict=True):
        assert after.final.differences(stock.final) == []
        for seen in ("losses", "grad_norms", "num_zeros", "skipped"):
            early = getattr(before, seen) if scenario.is_resumed else []
            assert early + getattr(after, seen) == getattr(stock, seen)
        if scenario.is_resumed:
            assert after.first_iteration == SAVED_AT
            assert before.final.differences(after.initial) == []
        moved = stock.initial.differences(stock.final)
        for name in stock.initial.tensors:
            if name.startswith("model/"):
                assert (name in moved) == scenario.is_trained(name), name


def test_a_run_may_be_saved_before_its_first_step(make: Callable[[Scenario], Runs]) -> None:
    """State that the first step makes is made after the load, then."""
    (before,) = make(by_name("sgd-momentum-overflow")).before
    assert before.skipped == [True] * SAVED_AT


def test_every_scenario_has_a_name_and_says_what_it_shows() -> None:
    """In the table of combinations, too."""
    assert len({each.name for each in SCENARIOS}) == len(SCENARIOS)
    assert all(each.shows for each in SCENARIOS)


def test_empty_scenario_has_ranks_without_any_part_of_a_group(
    make: Callable[[Scenario], Runs],
) -> None:
    """The scenario of empty shards is one."""
    scenario = by_name("empty-shards")
    mains = [
        {name for name in run.final.tensors if name.startswith("main/")}
        for run in make(scenario).stock
    ]
    groups = [{name.split("/")[2] for name in names} for names in mains]
    assert min(len(each) for each in groups) < max(len(each) for each in groups)


def gathers(scenario: Scenario, directory: str | None) -> list[str]:
    """Return which functions of upstream gather params in two steps, in order."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    found: list[str] = []

    def count(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return original(self, *args, **kwargs)

        setattr(kind, name, counted)

    count(_ParamAndGradBucketGroup, "start_param_sync")
    count(LayerWiseDistributedOptimizer, "allgather_params")
    train(scenario, directory, until=2)
    return found


@pytest.mark.parametrize(
    "name", ["muon", "muon-native-fp32", "muon-ping-pong-overlapped", "overlapped-with-the-step"]
)
def test_params_are_gathered_as_often_as_by_stock(
    name: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Once: neither twice, by the layer-wise optimizer and its sibling, nor never."""
    scenario = by_name(name)
    stock = ranks.run(gathers, scenario.world_size, scenario=scenario, directory=None)

    streamed = ranks.run(gathers, scenario.world_size, scenario=scenario, directory=str(tmp_path))

    assert [sorted(each) for each in streamed] == [sorted(each) for each in stock]
    assert all(stock)


def describe_stores(model: Sequence[Any], optimizer: Any) -> None:
    """End the run with what the stores hold."""
    stores = list(optimizer._stores())
    buckets = [bucket for store in stores for bucket in store.layout.buckets]
    entries = [piece.entry for bucket in buckets for piece in bucket.slices]
    raise Described(
        {
            "resident": [resident.record.name for store in stores for resident in store.resident],
            "entries": sum(len(store.entries) for store in stores),
            "groups": {resident.group for store in stores for resident in store.resident},
            "buckets": len(buckets),
            "cut": len(entries) - len(set(entries)),
        }
    )


class Described(Exception):
    """Carries what a store holds."""


def described(scenario: Scenario, directory: str) -> Any:
    try:
        train(scenario, directory, after_setup=describe_stores)
    except Described as found:
        return found.args[0]
    return None


def test_scenarios_are_what_they_are_named_for(ranks: RankPool, tmp_path: Path) -> None:
    """There are resident params, param groups, buckets, and entries cut over buckets."""
    found = {
        name: ranks.run(described, 2, scenario=by_name(name), directory=str(tmp_path))
        for name in ("native-fp32", "dp2-many-buckets", "dp2-one-bucket")
    }

    resident = {name for rank in found["native-fp32"] for name in rank["resident"]}
    for kind in NATIVE.native_fp32:
        assert any(kind in name for name in resident)
    assert set.union(*(rank["groups"] for rank in found["native-fp32"])) == {0, 1}
    for native, many, one in zip(*found.values(), strict=True):
        assert native["entries"] > 0
        assert many["buckets"] > 40 and many["cut"] > 20
        assert one["buckets"] == 1 and one["cut"] == 0


def look_at_tiers(scenario: Scenario, directory: str) -> tuple[int, int, list[int], int, str]:
    """Return the bytes of each tier, of each directory, the buckets, and the engine's class."""
    found: list[Any] = []

    def look(model: Sequence[Any], optimizer: Any) -> None:
        for store in optimizer._stores():
            place = store.placement
            engines = {
                type(each.engine).__name__ for each in store.working_set.homes.open_volumes()
            }
            sizes = (place.device_nbytes, place.host_nbytes, list(place.volume_nbytes))
            found.append((*sizes, len(place.places), " ".join(engines)))

    train(scenario, directory, until=0, after_setup=look)
    return tuple(found[0])


def test_the_rows_of_storage_and_engine_are_what_they_say(ranks: RankPool, tmp_path: Path) -> None:
    """Each tier holds buckets where the row says so, and no others; the engine is the one named."""
    found = {
        name: ranks.run(
            look_at_tiers,
            by_name(name).world_size,
            scenario=by_name(name),
            directory=str(tmp_path / name),
        )[0]
        for name in ("host-tier", "device-tier", "three-tiers", "auto-tiers", "sync-engine")
    }

    device, host, disk, buckets, engine = found["host-tier"]
    assert (device, disk, engine) == (0, [0], "") and host > 0
    device, host, disk, buckets, engine = found["device-tier"]
    assert (host, disk, engine) == (0, [0], "") and device > 0
    device, host, disk, buckets, engine = found["three-tiers"]
    assert 0 < device <= 100_000 and 0 < host <= 300_000 and min(disk) > 0
    assert engine == "ThreadEngine" and buckets > 10
    device, host, disk, buckets, engine = found["auto-tiers"]
    assert device + host > 0 and sum(disk) == 0
    device, host, disk, buckets, engine = found["sync-engine"]
    assert (device, host, engine) == (0, 0, "SyncEngine")


def skip_one_moment_read(model: Sequence[Any], optimizer: Any) -> None:
    """In one step, leave out one bucket's first moments."""
    store = optimizer._nvme_state_store
    bucket = store.layout.buckets[1]
    first_moments = slice(*bucket.starts[1:3])
    staging = store.working_set.staging
    upload = staging.upload

    def upload_all_but_one(this: Any, host: Any) -> Any:
        uploaded = upload(this, host)
        if store.steps == 4 and this.index == bucket.index:
            uploaded.resident.stored[first_moments] = 0
        return uploaded

    staging.upload = upload_all_but_one


def test_planted_fault_fails_the_comparison(
    ranks: RankPool, make: Callable[[Scenario], Runs], tmp_path: Path
) -> None:
    """One moment segment that is not read in one step is found at the end."""
    (stock,) = make(DP1).stock

    (faulty,) = ranks.run(
        train, scenario=DP1, directory=str(tmp_path), after_setup=skip_one_moment_read
    )

    differences = faulty.final.differences(stock.final)
    assert {name.split("/")[0] for name in differences} >= {"main", "exp_avg", "exp_avg_sq"}


SEEN: list[tuple[bool, bool, int, int]] = []
"""(skipped, is the file unchanged, steps before, steps after) of each step of this rank."""


def watch_file(model: Sequence[Any], optimizer: Any) -> None:
    """Look at the file before and after each step."""
    store = optimizer._nvme_state_store
    step = optimizer.step

    def look() -> tuple[str, int, int]:
        store.drain()
        (volume,) = store.working_set.homes.open_volumes()
        path = volume.file.path
        return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns, store.steps

    def watched_step() -> Any:
        before = look()
        result = step()
        after = look()
        SEEN.append((not result[0], before[:2] == after[:2], before[2], after[2]))
        return result

    optimizer.step = watched_step


def train_and_watch(scenario: Scenario, directory: str) -> list[tuple[bool, bool, int, int]]:
    train(scenario, directory, after_setup=watch_file)
    return SEEN


def test_skipped_step_touches_no_byte_and_no_counter(ranks: RankPool, tmp_path: Path) -> None:
    """An overflow leaves the file's bytes and time, and the step counter, as they were."""
    (seen,) = ranks.run(train_and_watch, scenario=FP16, directory=str(tmp_path))

    assert {skipped for skipped, *_ in seen} == {True, False}
    for skipped, is_unchanged, before, after in seen:
        assert is_unchanged == skipped
        assert after == before + (not skipped)


def flags(scenario: Scenario, directory: str | None) -> list[str]:
    """Return the arguments that stream, if there is a directory."""
    return [] if directory is None else streaming.flags(directory, scenario.bucket_numel)


def params_norms(scenario: Scenario, directory: str | None) -> list[float]:
    """Return what ``--log-params-norm`` logs before the first and after the second step."""
    from megatron.training.utils import calc_params_l2_norm

    prepare(scenario)
    found: list[float] = []
    chunks: list[Any] = []

    def measure(optimizer: Any) -> Iterator[OptimizerTensor]:
        found.append(float(calc_params_l2_norm(chunks)))
        return iter(())

    gpt.train(
        [*scenario.arguments, *flags(scenario, directory)],
        until=2,
        after_setup=lambda model, optimizer: chunks.extend(model),
        optimizer_tensors=measure,
    )
    return found


@pytest.mark.parametrize(
    "name", ["native-fp32", "ep2-dp4", "nothing-on-some-ranks", "muon", "adam-replicated-ep2-tp2"]
)
def test_params_norm_is_that_of_the_stock_run(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """Of sharded, resident and expert params; summed in another order, so not bit for bit."""
    scenario = by_name(name)
    stock = ranks.run(params_norms, scenario.world_size, scenario=scenario, directory=None)

    streamed = ranks.run(
        params_norms, scenario.world_size, scenario=scenario, directory=str(tmp_path)
    )

    for ours, theirs in zip(streamed, stock, strict=True):
        assert len(ours) == 2 and ours[0] != ours[1]
        assert ours == pytest.approx(theirs, rel=1e-6)


def save_and_load(scenario: Scenario, directory: str) -> tuple[list[int], bool]:
    """Save and load the stores alone; return their elements, and whether all was well."""
    found: list[int] = []

    def act(model: Sequence[Any], optimizer: Any) -> None:
        optimizer.save_stores(Path(directory, "saved"))
        optimizer.load_stores(Path(directory, "saved"))
        found.extend(
            sum(entry.record.numel for entry in store.entries) for store in optimizer._stores()
        )
        raise Described(found)

    try:
        train(scenario, directory, after_setup=act)
    except Described:
        return found, True
    return found, False


@pytest.mark.parametrize("name", ["nothing-on-some-ranks", "nothing-on-a-pipeline-stage"])
def test_ranks_without_elements_save_and_load(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """An empty store has a snapshot, too; where there is no store there is none."""
    scenario = by_name(name)

    found = ranks.run(
        save_and_load, scenario.world_size, scenario=scenario, directory=str(tmp_path)
    )

    assert all(is_well for _, is_well in found)
    assert any(sum(elements) == 0 for elements, _ in found)
    assert any(sum(elements) > 0 for elements, _ in found)


def train_with_threshold(threshold: float, directory: str | None) -> Run:
    """Train two pipeline stages, of which one is frozen, with a threshold of the gradient norm."""
    frozen = by_name("nothing-on-a-pipeline-stage")
    whole = {"grad_norm_skip_threshold": threshold}
    return train(dataclasses.replace(frozen, whole=whole), directory)


def test_steps_that_a_frozen_stage_does_not_skip_hang_nobody(
    ranks: RankPool, make: Callable[[Scenario], Runs], tmp_path: Path
) -> None:
    """Upstream lets a rank without params go on where the others skip."""
    norms = make(by_name("nothing-on-a-pipeline-stage")).stock[0].grad_norms
    threshold = statistics.median(norm for norm in norms if norm is not None)
    stock = ranks.run(train_with_threshold, 2, threshold=threshold, directory=None)

    streamed = ranks.run(
        train_with_threshold, 2, threshold=threshold, directory=str(tmp_path), timeout_s=60
    )

    assert {skipped for run in stock for skipped in run.skipped} == {True, False}
    for ours, theirs in zip(streamed, stock, strict=True):
        assert ours.final.differences(theirs.final) == []
        assert ours.skipped == theirs.skipped
