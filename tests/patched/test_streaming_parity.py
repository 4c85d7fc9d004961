"""A streamed run is bit for bit the stock run: weights, mains, moments, steps, losses and norms."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import gpt, streaming
from tests.gpt import OptimizerTensor, Run
from tests.rank_pool import RankPool

UNTIL = 10
Setup = Callable[[Sequence[Any], Any], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A way to train, stock and streamed.

    `bucket_numel` is the cap of a bucket; `native_fp32` keeps these params of the model in FP32;
    `after_setup` runs in both. With `is_torch_adamw` Megatron takes the optimizer that it takes
    where neither Transformer Engine nor Apex is installed. If there are `trainable` names, all
    params without one of them are frozen.
    """

    name: str
    world_size: int
    arguments: Sequence[str]
    bucket_numel: int = 20_000
    native_fp32: Sequence[str] = ()
    after_setup: Setup | None = None
    is_torch_adamw: bool = False
    trainable: Sequence[str] = ()


def keep_in_fp32(names: Sequence[str]) -> None:
    """Let params whose name contains one of ``names`` stay FP32 in a 16-bit model.

    Models do so by converting them back after `Float16Module` has cast everything; here the
    casts of the module class are taken, in a process that is this case's own.
    """
    from megatron.core.models.gpt import GPTModel

    def kept(cast: Callable[..., Any]) -> Callable[..., Any]:
        def cast_all_but(self: Any) -> Any:
            originals = {
                name: param.data.clone().float()
                for name, param in self.named_parameters()
                if any(each in name for each in names)
            }
            cast(self)
            for name, param in self.named_parameters():
                if name in originals:
                    param.data = originals[name]
            return self

        return cast_all_but

    for cast in ("bfloat16", "half"):
        setattr(GPTModel, cast, kept(getattr(GPTModel, cast)))


def freeze_all_but(names: Sequence[str]) -> None:
    """Freeze params when the model is made, in a process that is this case's own."""
    from megatron.core.models.gpt import GPTModel

    construct = GPTModel.__init__

    def construct_frozen(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        for name, param in self.named_parameters():
            param.requires_grad = any(each in name for each in names)

    GPTModel.__init__ = construct_frozen


def train(scenario: Scenario, directory: str | None = None, **kwargs: Any) -> Run:
    """Train a scenario as one rank; streamed if there is a directory."""
    prepare(scenario)
    arguments = [*scenario.arguments]
    if directory is not None:
        arguments += streaming.flags(directory, scenario.bucket_numel)
        kwargs["optimizer_tensors"] = streaming.streamed_tensors
    kwargs.setdefault("after_setup", scenario.after_setup)
    return gpt.train(arguments, kwargs.pop("until", UNTIL), **kwargs)


def prepare(scenario: Scenario) -> None:
    """Bring what a scenario is about into this process, which is the scenario's own."""
    if scenario.native_fp32:
        keep_in_fp32(scenario.native_fp32)
    if scenario.trainable:
        freeze_all_but(scenario.trainable)
    if scenario.is_torch_adamw:
        from megatron.core import optimizer

        assert not optimizer.USING_PYTORCH_OPTIMIZER
        optimizer.USING_PYTORCH_OPTIMIZER = True


def change_hyperparameters(model: Sequence[Any], optimizer: Any) -> None:
    """Give each step another lr, weight decay, betas and eps through the master groups."""
    step = optimizer.step
    count = iter(range(100))

    def changed_step() -> Any:
        number = next(count)
        for position, group in enumerate(optimizer.param_groups):
            group["lr"] *= 1 + 0.1 * position
            group["weight_decay"] = 0.01 * number * position
            group["betas"] = (0.9 - 0.01 * number, 0.99 - 0.01 * position)
            group["eps"] = 1e-8 * (1 + number)
        return step()

    optimizer.step = changed_step


TINY = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --make-vocab-size-divisible-by 16"
OVERFLOWING = ("--initial-loss-scale", str(2**19), "--hysteresis", "1")

# Gradient norms of this model are about 1: 0.05 clips every step.
DP1 = Scenario("dp1", 1, gpt.BF16)
# The router's weight is a matrix, so that it decays.
NATIVE = Scenario(
    "native-fp32",
    2,
    [*gpt.BF16, *gpt.MOE, "--moe-router-dtype", "fp32"],
    native_fp32=("layernorm", "router.weight"),
)
FP16 = Scenario("fp16-overflow", 1, [*gpt.FP16, *OVERFLOWING], native_fp32=("final_layernorm",))
TORCH = Scenario(
    "torch-adamw", 2, [*gpt.BF16, *TINY.split()], 1000, ("layernorm",), is_torch_adamw=True
)
SCENARIOS = [
    DP1,
    Scenario("dp2-one-bucket", 2, gpt.BF16, bucket_numel=10**6),
    Scenario("dp2-many-buckets", 2, [*gpt.BF16, "--clip-grad", "0.05"], bucket_numel=1000),
    Scenario("smallest-buckets", 1, [*gpt.BF16, *TINY.split()], bucket_numel=1),
    Scenario(
        "decoupled-lr",
        2,
        [
            *(*gpt.BF16, "--untie-embeddings-and-output-weights"),
            *("--decoupled-lr", "5e-3", "--decoupled-min-lr", "1e-3"),
        ],
    ),
    Scenario("empty-shards", 4, [*gpt.BF16, *TINY.split(), "--ddp-num-buckets", "1"]),
    NATIVE,
    Scenario("hyperparameters", 2, gpt.BF16, after_setup=change_hyperparameters),
    Scenario("tp2", 2, [*gpt.BF16, "--tensor-model-parallel-size", "2"]),
    Scenario("pp2", 2, [*gpt.BF16, "--pipeline-model-parallel-size", "2"]),
    Scenario(
        "ep2-dp4",
        4,
        [*gpt.BF16, *gpt.MOE, "--expert-model-parallel-size", "2", "--overlap-grad-reduce"],
    ),
    Scenario(
        "overlapped",
        2,
        [
            *(*gpt.BF16, "--overlap-grad-reduce", "--overlap-param-gather"),
            *("--ddp-bucket-size", "20000"),
        ],
    ),
    FP16,
    TORCH,
    # One param of eight elements: all ranks but the first have none of it.
    Scenario(
        "nothing-on-some-ranks",
        4,
        [*gpt.BF16, *TINY.split()],
        trainable=("final_layernorm.bias",),
    ),
    Scenario(
        "nothing-on-a-pipeline-stage",
        2,
        [*gpt.BF16, "--pipeline-model-parallel-size", "2"],
        trainable=("final_layernorm",),
    ),
    Scenario(
        "virtual-pipeline",
        2,
        [
            *(*gpt.BF16, "--pipeline-model-parallel-size", "2", "--num-layers", "4"),
            *("--num-layers-per-virtual-pipeline-stage", "1", "--global-batch-size", "4"),
        ],
    ),
    Scenario("optimizer-instances", 4, [*gpt.BF16, "--num-distributed-optimizer-instances", "2"]),
    Scenario("bf16-grads", 2, [*gpt.BF16, "--grad-reduce-in-bf16", "--log-num-zeros-in-grad"]),
]


@dataclass(frozen=True, slots=True)
class Pair:
    """The stock and the streamed runs of a scenario, by rank."""

    stock: list[Run]
    streamed: list[Run]
    log: str


@pytest.fixture(scope="module")
def make(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], Pair]:
    """Make the runs of a scenario, once."""

    @functools.cache
    def make_once(name: str) -> Pair:
        (scenario,) = (each for each in SCENARIOS if each.name == name)
        stock = ranks.run(train, scenario.world_size, scenario=scenario)
        directory = str(tmp_path_factory.mktemp(name))
        streamed = ranks.run(train, scenario.world_size, scenario=scenario, directory=directory)
        return Pair(stock, streamed, "".join(ranks.outputs))

    return lambda scenario: make_once(scenario.name)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_streamed_run_equals_the_stock_run(
    scenario: Scenario, make: Callable[[Scenario], Pair]
) -> None:
    """State, losses and norms after 10 steps are the same bit for bit on every rank."""
    pair = make(scenario)
    for stock, streamed in zip(pair.stock, pair.streamed, strict=True):
        # Torch counts steps in the state of each param; the store in one place for all.
        differences = streamed.final.differences(stock.final)
        assert [name for name in differences if not is_torch_step(name, scenario)] == []
        assert (streamed.losses, streamed.grad_norms) == (stock.losses, stock.grad_norms)
        assert streamed.skipped == stock.skipped
        moved = stock.initial.differences(stock.final)
        must_move = [
            name
            for name in stock.initial.tensors
            if name.startswith("model/") and any(e in name for e in scenario.trainable or [""])
        ]
        assert [name for name in must_move if name not in moved] == []


def is_torch_step(name: str, scenario: Scenario) -> bool:
    return scenario.is_torch_adamw and name.startswith("step/")


def test_empty_scenario_has_ranks_without_any_part_of_a_group(
    make: Callable[[Scenario], Pair],
) -> None:
    """The scenario of empty shards is one."""
    (scenario,) = (each for each in SCENARIOS if each.name == "empty-shards")
    mains = [
        {name for name in run.final.tensors if name.startswith("main/")}
        for run in make(scenario).stock
    ]
    groups = [{name.split("/")[2] for name in names} for names in mains]
    assert min(len(each) for each in groups) < max(len(each) for each in groups)


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


def by_name(name: str) -> Scenario:
    (scenario,) = (each for each in SCENARIOS if each.name == name)
    return scenario


def skip_one_moment_read(model: Sequence[Any], optimizer: Any) -> None:
    """In the fifth step, leave one bucket's first moments as the slot holds them."""
    store = optimizer._nvme_state_store
    bucket = store.layout.buckets[1]
    engine = store._engine
    real = engine.read

    def read(file: Any, offset: int, buffer: memoryview) -> Any:
        where = slice(bucket.segment_nbytes, 2 * bucket.segment_nbytes)
        before = bytes(buffer[where])
        ticket = real(file, offset, buffer)
        if store.steps == 4 and offset == bucket.offset:
            buffer[where] = before
        return ticket

    engine.read = read


def test_planted_fault_fails_the_comparison(
    ranks: RankPool, make: Callable[[Scenario], Pair], tmp_path: Path
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
        path = store._file.path
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


def params_norms(scenario: Scenario, directory: str | None) -> list[float]:
    """Return what ``--log-params-norm`` logs before the first and after the second step."""
    from megatron.training.utils import calc_params_l2_norm

    prepare(scenario)
    found: list[float] = []

    def measure(optimizer: Any) -> Iterator[OptimizerTensor]:
        found.append(float(calc_params_l2_norm(list(optimizer.model_chunks))))
        return iter(())

    flags = [] if directory is None else streaming.flags(directory, scenario.bucket_numel)
    gpt.train([*scenario.arguments, *flags], until=2, optimizer_tensors=measure)
    return found


@pytest.mark.parametrize("name", ["native-fp32", "ep2-dp4", "nothing-on-some-ranks"])
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
