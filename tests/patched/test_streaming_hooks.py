"""Guard tests of the patches that hook the state store into Megatron.

Each fails on its own assertion against a Megatron without its patch, whatever that Megatron then
does (refuse a flag, crash on an evicted tensor): see `test_guards.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import gpt, streaming
from tests.patched.scenarios import by_name, train
from tests.rank_pool import RankPool, RanksFailed


class Stopped(Exception):
    """Ends a training run after its setup, with what there was to see."""


def outcome(ranks: RankPool, case: Callable[..., Any], **kwargs: Any) -> Any:
    """Return what a case returns on one rank, or the report of its failure."""
    try:
        return ranks.run(case, **kwargs)[0]
    except RanksFailed as failure:
        return str(failure)


def look_after_setup(
    arguments: Sequence[str],
    look: Callable[[Sequence[Any], Any], Any],
    precision: Sequence[str] = gpt.BF16,
) -> Any:
    """Set up model and optimizer and return what ``look(model, optimizer)`` returns."""

    def stop(model: Sequence[Any], optimizer: Any) -> None:
        raise Stopped(look(model, optimizer))

    try:
        gpt.train([*precision, *arguments], until=0, after_setup=stop)
    except Stopped as stopped:
        return stopped.args[0]
    raise AssertionError("setup did not reach the callback")


def make_config(**fields: Any) -> str:
    """Return the error of an `OptimizerConfig`, or "accepted"."""
    from megatron.core.optimizer import OptimizerConfig

    try:
        OptimizerConfig(bf16=True, use_distributed_optimizer=True, lr=1e-3, **fields)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_config_refuses_streaming_without_deferral(ranks: RankPool) -> None:
    error = outcome(ranks, make_config, stream_optimizer_state_to_disk=True)

    assert error.startswith("ValueError: stream_optimizer_state_to_disk needs defer_main_param_in")


def nbytes_of_mains(model: Sequence[Any], optimizer: Any) -> list[int]:
    """Return the storage of each main param, and check that the attributes are on it."""
    (_, inner), *_ = gpt.inner_optimizers(optimizer)
    mains = [main for group in inner.shard_fp32_from_float16_groups for main in group]
    params = [param for group in inner.model_float16_groups for param in group]
    for param, main in zip(params, mains, strict=True):
        assert param.main_param is main
        assert main.dtype.is_floating_point and main.is_cuda
        assert main.tensor_model_parallel == param.tensor_model_parallel
    return [main.untyped_storage().nbytes() for main in mains]


def test_main_params_have_no_storage_after_construction(ranks: RankPool, tmp_path: Path) -> None:
    found = outcome(
        ranks, look_after_setup, arguments=streaming.flags(tmp_path), look=nbytes_of_mains
    )

    assert found == [0] * 28, found


def classes(model: Sequence[Any], optimizer: Any) -> list[str]:
    """Return the names of the optimizer's classes, outermost first."""
    return [type(optimizer).__name__, *(type(o).__name__ for o in optimizer.chained_optimizers)]


def test_streaming_selects_the_streamed_classes(ranks: RankPool, tmp_path: Path) -> None:
    found = outcome(ranks, look_after_setup, arguments=streaming.flags(tmp_path), look=classes)

    assert found == ["StreamedChainedOptimizer", "StreamedDistributedOptimizer"], found


def tree(optimizer: Any) -> Any:
    """Return the names of the optimizer's classes, as deeply as they are chained."""
    name = type(optimizer).__name__
    children = getattr(optimizer, "chained_optimizers", None)
    return name if children is None else [name, *map(tree, children)]


def describe_tree(model: Sequence[Any], optimizer: Any) -> Any:
    """Return `tree` of the optimizer."""
    return tree(optimizer)


FLOAT16 = "StreamedFloat16Optimizer"
MUON = ("--optimizer", "muon")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [FLOAT16]),
        (MUON, [FLOAT16, FLOAT16]),
        (
            [*MUON, "--use-distributed-optimizer"],
            [["StreamedLayerWiseOptimizer", FLOAT16], "StreamedDistributedOptimizer"],
        ),
        (
            [*MUON, "--use-distributed-optimizer", "--no-use-layer-wise-param-layout"],
            [["StreamedLayerWiseOptimizer", FLOAT16, FLOAT16]],
        ),
    ],
    ids=["adam", "muon", "layer-wise", "layer-wise-without-layout"],
)
def test_streaming_selects_the_streamed_optimizers_of_whole_params(
    arguments: Sequence[str], expected: Any, ranks: RankPool, tmp_path: Path
) -> None:
    flags = [*arguments, *streaming.flags(tmp_path)]

    found = outcome(
        ranks, look_after_setup, arguments=flags, look=describe_tree, precision=gpt.REPLICATED
    )

    assert found == ["StreamedChainedOptimizer", *expected], found


def test_a_stock_run_selects_the_stock_classes(ranks: RankPool) -> None:
    found = outcome(ranks, look_after_setup, arguments=[], look=classes)

    assert found == ["ChainedOptimizer", "DistributedOptimizer"]


def test_a_checkpoint_holds_the_streamed_state(ranks: RankPool, tmp_path: Path) -> None:
    failure = outcome(
        ranks,
        gpt.train,
        arguments=[*gpt.BF16, *streaming.flags(tmp_path / "state")],
        until=1,
        save=str(tmp_path / "checkpoint"),
        optimizer_tensors=streaming.streamed_tensors,
    )
    manifests = sorted((tmp_path / "checkpoint").rglob("manifest.json"))

    assert [str(path.relative_to(tmp_path / "checkpoint")) for path in manifests] == [
        "iter_0000001/nvme_optimizer_state/rank00000/optimizer0/manifest.json"
    ], failure


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ckpt-format", "torch"], "--ckpt-format torch: it serialises tensors"),
        (["--dist-ckpt-optim-fully-reshardable"], "in a format of its own"),
        (["--optimizer", "sgd"], "under the distributed optimizer: Megatron itself refuses that"),
        (["--stream-optimizer-state-bucket-numel", "0"], "expected a positive number of elements"),
        (["--stream-optimizer-state-dir", "a,a"], "expected different directories"),
        (["--stream-optimizer-state-host-gb", "-1"], "expected a number of GB, or auto"),
    ],
)
def test_arguments_refuse_what_would_read_evicted_state(
    ranks: RankPool, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    failure = outcome(
        ranks,
        look_after_setup,
        arguments=[*streaming.flags(tmp_path / "state"), *arguments],
        look=classes,
    )

    assert "ValueError: --stream-optimizer-state" in str(failure), failure
    assert reason in str(failure)
    assert not (tmp_path / "state").exists()


def params_norm(arguments: Sequence[str], tensors: Any) -> float:
    """Return what ``--log-params-norm`` logs after two steps."""
    from megatron.training.utils import calc_params_l2_norm

    found = []

    def train_and_measure(optimizer: Any) -> Any:
        found.append(calc_params_l2_norm(list(optimizer.model_chunks)))
        return tensors(optimizer)

    gpt.train([*gpt.BF16, *arguments], until=2, optimizer_tensors=train_and_measure)
    return float(found[-1])


def test_params_norm_is_logged_while_streaming(ranks: RankPool, tmp_path: Path) -> None:
    stock = ranks.run(params_norm, arguments=[], tensors=gpt.resident_tensors)[0]

    streamed = outcome(
        ranks,
        params_norm,
        arguments=streaming.flags(tmp_path),
        tensors=streaming.streamed_tensors,
    )

    assert streamed == pytest.approx(stock, rel=1e-6)


def make_mimo_optimizer() -> str:
    """Return the error of a streamed `MimoOptimizer`; the check comes before any use of a model."""
    from megatron.core.models.mimo.optimizer import get_mimo_optimizer
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(
        bf16=True,
        use_distributed_optimizer=True,
        lr=1e-3,
        stream_optimizer_state_to_disk=True,
        defer_main_param_initialization=True,
    )
    try:
        get_mimo_optimizer(None, config)
    except (AttributeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_mimo_model_refuses_streaming(ranks: RankPool) -> None:
    error = outcome(ranks, make_mimo_optimizer)

    assert "ValueError: --stream-optimizer-state-to-disk cannot be used with MimoModel" in error


class Writer:
    """Stands for TensorBoard's, and for W&B's module."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.scalars.append((name, float(value), iteration))

    def log(self, values: dict[str, Any], iteration: int) -> None:
        for name, value in values.items():
            self.add_scalar(name, value, iteration)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def train_in_megatrons_loop(arguments: Sequence[str], steps: int) -> list[tuple[str, float, int]]:
    """Run `megatron.training.training.train`, and return what its writers got of the store."""
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.utils import get_model_config
    from megatron.training import global_vars, training

    writers = Writer(), Writer()
    setup = training.setup_model_and_optimizer

    def set_up_and_train(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = made = setup(*args, **kwargs)
        # There is neither TensorBoard nor W&B here.
        global_vars._GLOBAL_TENSORBOARD_WRITER, global_vars._GLOBAL_WANDB_WRITER = writers
        training.train(
            gpt.forward_step,
            model,
            optimizer,
            scheduler,
            *(RerunDataIterator(gpt.batches(0)), None, None),
            *(get_model_config(model[0]), {}, None),
        )
        return made

    training.setup_model_and_optimizer = set_up_and_train
    more = ["--train-iters", str(steps), "--log-interval", "1", "--tensorboard-log-interval", "2"]
    gpt.train([*gpt.BF16, *arguments, *more], 0, optimizer_tensors=lambda optimizer: iter(()))
    first, second = (
        [each for each in writer.scalars if each[0].startswith("nvme-state-store/")]
        for writer in writers
    )
    assert first == second
    return first


def test_metrics_reach_megatrons_writers(ranks: RankPool, tmp_path: Path) -> None:
    """Under stable names, at Megatron's interval, and only while streaming."""
    streamed = outcome(ranks, train_in_megatrons_loop, arguments=streaming.flags(tmp_path), steps=4)
    stock = outcome(ranks, train_in_megatrons_loop, arguments=[], steps=2)

    assert stock == []
    assert isinstance(streamed, list), streamed
    assert [iteration for name, _, iteration in streamed if name.endswith("step-seconds")] == [2, 4]
    values = {name.removeprefix("nvme-state-store/"): value for name, value, _ in streamed}
    assert set(values) == METRICS
    assert values["read-gb"] > 0 and values["written-gb"] == values["disk-tier-gb"] > 0
    assert values["uploaded-gb"] == values["disk-tier-gb"]
    assert values["host-tier-gb"] == values["device-tier-gb"] == 0
    assert 0 < values["update-seconds"] <= values["step-seconds"]


METRICS = {
    *("step-seconds", "read-wait-seconds", "write-wait-seconds"),
    *("upload-seconds", "update-seconds", "publish-seconds", "download-seconds"),
    *("read-gb", "written-gb", "uploaded-gb", "downloaded-gb", "page-cache-gb"),
    *("disk-tier-gb", "host-tier-gb", "device-tier-gb"),
}

LOG_LINES = (
    r"NVMe optimizer state store: \d+ buckets, \d+\.\d+ GB disk, 0\.000 GB host, 0\.000 GB device "
    r"at \S+ \(main fp32, moments fp32, io (direct|buffered)\)",
    r"NVMe optimizer state slots: \d+ of \d+\.\d+ GB on the device, \d+ in pinned host memory "
    r"\(engine threads\)",
    r"NVMe optimizer main-param initialization: \d+\.\d+ GB in \d+\.\d+s",
    r"NVMe streaming step: \d+ buckets, read \d+\.\d+ GB, wrote \d+\.\d+ GB in \d+\.\d+s "
    r"\(read-wait \S+s upload \S+s update \S+s publish \S+s download \S+s write-wait \S+s\)",
    r"NVMe optimizer state saved: \S+/nvme_optimizer_state/rank0000\d/optimizer0 ",
    r"NVMe optimizer state loaded: \S+/nvme_optimizer_state/rank0000\d/optimizer0 .*step 1",
)


@pytest.mark.parametrize(("name", "dtype"), [("lion", "fp32"), ("sgd", "none")])
def test_the_log_names_the_dtype_of_what_is_kept(
    name: str, dtype: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Where there are no moments it says so."""
    ranks.run(train, scenario=by_name(name), directory=str(tmp_path), until=0)

    assert f"(main fp32, moments {dtype}, io " in ranks.outputs[0]


def test_copies_of_gradients_are_planned_for(ranks: RankPool, tmp_path: Path) -> None:
    """Only where gradients are not FP32 anyway."""
    says = r"a step makes FP32 copies of 16-bit gradients, \d+\.\d+ GB on the device"
    for name, is_copied in (("bf16-grads", True), ("adam-replicated", False)):
        ranks.run(train, 2, scenario=by_name(name), directory=str(tmp_path / name), until=0)
        assert bool(re.search(says, ranks.outputs[0])) == is_copied


def test_buffered_io_tells_how_much_is_cached(ranks: RankPool, tmp_path: Path) -> None:
    """And direct I/O that it leaves nothing there."""
    for io in ("buffered", "auto"):
        arguments = [*gpt.BF16, *streaming.flags(tmp_path / io), "--stream-optimizer-state-io", io]
        ranks.run(
            gpt.train, arguments=arguments, until=1, optimizer_tensors=streaming.streamed_tensors
        )
        has_cached = re.search(r"write-wait \S+s\) page cache \d+\.\d+ GB", ranks.outputs[0])
        assert bool(has_cached) == ("io buffered" in ranks.outputs[0])


def test_every_rank_logs_what_runs(ranks: RankPool, tmp_path: Path) -> None:
    """The lines are stable: people and tools look for them."""
    checkpoint = str(tmp_path / "checkpoint")
    run = partial(
        ranks.run,
        gpt.train,
        world_size=2,
        arguments=[*gpt.BF16, *streaming.flags(tmp_path / "state")],
        optimizer_tensors=streaming.streamed_tensors,
    )
    run(until=1, save=checkpoint)
    first = list(ranks.outputs)
    run(until=1, load=checkpoint)

    for rank, output in enumerate(first):
        text = output + ranks.outputs[rank]
        for line in LOG_LINES:
            assert re.search(line, text), f"rank {rank}: {line}"
