"""State in fewer bytes: ``split`` main params change nothing, rounded moments nearly nothing."""

from __future__ import annotations

import dataclasses
import functools
import logging
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import gpt, streaming
from tests.gpt import Run
from tests.patched.resume import SAVED_AT
from tests.patched.scenarios import DP1, by_name, train
from tests.patched.test_streaming_checkpoint import attempt_with
from tests.patched.test_streaming_failures import Stopped, raised
from tests.rank_pool import RankPool

logger = logging.getLogger(__name__)

MOMENTS = "--stream-optimizer-state-moment-dtype"
MAINS = "--stream-optimizer-state-main-storage"
SPLIT = (MAINS, "split")


def train_with(extra: Sequence[str], **kwargs: Any) -> Run:
    """Train a scenario streamed, with further flags of the store."""
    flags = streaming.flags
    streaming.flags = lambda *args: [*flags(*args), *extra]
    return train(**kwargs)


# Main params


@pytest.mark.parametrize(
    "name",
    ["dp1", "dp2-many-buckets", "pp2", "partly-frozen", "adam-replicated", "muon", "native-fp32"],
)
def test_split_main_params_are_bit_for_bit_the_stock_run(
    name: str, ranks: RankPool, tmp_path: Path
) -> None:
    """One rank and several, uneven shards, tied embeddings, frozen and whole params, Muon.

    Also after a resume: weights of the checkpoint and their other halves make main params again.
    """
    scenario = dataclasses.replace(by_name(name), bucket_numel=10_000)
    checkpoint = str(tmp_path / "checkpoint")
    go = functools.partial(ranks.run, train_with, scenario.world_size, scenario=scenario)

    before = go(extra=SPLIT, directory=str(tmp_path / "before"), until=SAVED_AT, save=checkpoint)
    after = go(extra=SPLIT, directory=str(tmp_path / "after"), load=checkpoint)

    stock = ranks.run(train, scenario.world_size, scenario=scenario)
    for expected, early, late in zip(stock, before, after, strict=True):
        assert late.first_iteration == SAVED_AT
        assert early.final.differences(late.initial) == []
        assert late.final.differences(expected.final) == []
        assert early.losses + late.losses == expected.losses
        assert early.grad_norms + late.grad_norms == expected.grad_norms


def load_onto_other_weights(directory: str, extra: Sequence[str]) -> tuple[str, str]:
    """Load state onto the weights it was saved with, then onto others; return the errors."""
    found: list[str] = []

    def act(model: Sequence[Any], optimizer: Any) -> None:
        saved = Path(directory, "saved")
        optimizer.save_stores(saved)
        found.append(raised(lambda: optimizer.load_stores(saved)))
        weight = next(model[0].parameters())
        weight.data[0, 0] *= 2
        found.append(raised(lambda: optimizer.load_stores(saved)))
        raise Stopped

    arguments = [*gpt.BF16, *streaming.flags(Path(directory, "state")), *extra]
    assert raised(lambda: gpt.train(arguments, 0, after_setup=act)) == "Stopped: "
    same, other = found
    return same, other


def test_split_state_is_not_loaded_onto_other_weights(ranks: RankPool, tmp_path: Path) -> None:
    """Main params made of the halves of two runs round to the weights: only a fingerprint tells."""
    ((same, other),) = ranks.run(load_onto_other_weights, directory=str(tmp_path), extra=SPLIT)

    assert same == ""
    assert other.startswith("StateStoreError: ")
    assert "the model params are not those that were saved with the optimizer state" in other
    assert "embedding.word_embeddings.weight" in other


# Moments

TINY = (
    *gpt.BF16,
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--max-position-embeddings", "16"),
)
STEPS = 200
LARGEST_GAP = {"bf16": 0.005, "fp16": 0.003, "fp8e4m3": 0.04, "fp8e5m2": 0.12}
"""Of the losses of the last 20 steps, relative to FP32's: measured 0.06%, 0.03%, -1.8% and -6.1%.
FP8's are lower: noise in second moments makes the mean step longer, which pays here."""
Losses = Callable[[str, str], list[float]]


def losses_of(moment_dtype: str, beta2: str, directory: str) -> list[float]:
    """Train the smallest model; return the loss of each step."""
    arguments = [
        *(*TINY, "--adam-beta2", beta2, "--train-iters", str(STEPS), "--lr", "3e-3"),
        *(*streaming.flags(directory, 10**6), MOMENTS, moment_dtype),
    ]
    return gpt.train(arguments, STEPS, optimizer_tensors=lambda _: iter(())).losses


@pytest.fixture(scope="module")
def losses(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Train once with each dtype and beta2."""

    @functools.cache
    def train_once(moment_dtype: str, beta2: str) -> list[float]:
        base = tmp_path_factory.mktemp("moments")
        (found,) = ranks.run(losses_of, moment_dtype=moment_dtype, beta2=beta2, directory=str(base))
        shutil.rmtree(base)
        return list(found)

    return train_once


@pytest.mark.parametrize("beta2", ["0.95", "0.999"])
@pytest.mark.parametrize("moment_dtype", LARGEST_GAP)
def test_rounded_moments_train_as_fp32_ones(
    moment_dtype: str, beta2: str, losses: Losses, record_property: Callable[[str, object], None]
) -> None:
    """The mean losses of the run and of its end are FP32's, within bounds.

    ``--log-cli-level INFO`` shows them.
    """
    exact, rounded = losses("fp32", beta2), losses(moment_dtype, beta2)

    def gap(part: slice) -> float:
        return statistics.mean(rounded[part]) / statistics.mean(exact[part]) - 1

    whole, end = gap(slice(None)), gap(slice(-20, None))
    summary = f"{moment_dtype}, beta2 {beta2}: loss {whole:+.2%} in the mean, {end:+.2%} at the end"
    record_property("loss_gap", summary)
    logger.info(summary)
    assert statistics.mean(exact[-20:]) < exact[0] / 2, "it has learned"
    assert rounded != exact, "the flag has an effect"
    assert abs(whole) < LARGEST_GAP[moment_dtype]
    assert abs(end) < LARGEST_GAP[moment_dtype]


def nearest_losses_of(**kwargs: Any) -> list[float]:
    """Train with second moments that are rounded to nearest, in a process of its own."""
    from megatron.core.optimizer.nvme_state_store import casting

    casting._seed = lambda *args: None  # type: ignore[assignment]
    return losses_of(**kwargs)


def test_second_moments_rounded_to_nearest_would_not(
    ranks: RankPool, losses: Losses, tmp_path: Path
) -> None:
    """The planted fault: BF16's bound of the end is exceeded, by steps that are too short."""
    exact = losses("fp32", "0.999")

    (rounded,) = ranks.run(
        nearest_losses_of, moment_dtype="bf16", beta2="0.999", directory=str(tmp_path)
    )

    gap = statistics.mean(rounded[-20:]) / statistics.mean(exact[-20:]) - 1
    assert gap > 2 * LARGEST_GAP["bf16"]


def save_and_resume(moment_dtype: str, ranks: RankPool, base: Path) -> tuple[Run, Run]:
    go = functools.partial(
        ranks.run, train_with, scenario=DP1, extra=(*SPLIT, MOMENTS, moment_dtype)
    )
    (straight,) = go(directory=str(base / "straight"))
    go(directory=str(base / "before"), until=SAVED_AT, save=str(base / "checkpoint"))
    (resumed,) = go(directory=str(base / "after"), load=str(base / "checkpoint"))
    return straight, resumed


@pytest.mark.parametrize("moment_dtype", ["bf16", "fp8e4m3"])
def test_a_resumed_run_rounds_as_the_uninterrupted_one(
    moment_dtype: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Noise is a function of the step: all is the same bit for bit."""
    straight, resumed = save_and_resume(moment_dtype, ranks, tmp_path)

    assert resumed.first_iteration == SAVED_AT
    assert resumed.final.differences(straight.final) == []
    assert resumed.losses == straight.losses[SAVED_AT:]


@pytest.mark.parametrize(
    ("extra", "tells"),
    [
        ((MOMENTS, "fp8e4m3"), "exp_avg fp8e4m3, exp_avg_sq fp8e4m3-sqrt"),
        ((MOMENTS, "bf16", MAINS, "split"), "main split, exp_avg bf16"),
        ((), "main fp32, exp_avg fp32, exp_avg_sq fp32"),
    ],
    ids=["moments", "mains", "default"],
)
def test_state_of_other_formats_is_refused(
    extra: Sequence[str], tells: str, ranks: RankPool, tmp_path: Path
) -> None:
    """The message says what it holds, what was expected, and which flags choose it."""
    checkpoint = str(tmp_path / "checkpoint")
    ranks.run(
        train_with,
        scenario=DP1,
        extra=(MOMENTS, "bf16"),
        directory=str(tmp_path / "before"),
        until=SAVED_AT,
        save=checkpoint,
    )
    ((error, _),) = ranks.run(
        attempt_with,
        scenario=DP1,
        directory=str(tmp_path / "after"),
        load=checkpoint,
        extra=extra,
    )
    assert error.startswith("StateStoreError: ")
    assert "was saved as main fp32, exp_avg bf16, exp_avg_sq bf16, expected " in error
    assert tells in error
    assert MAINS in error and MOMENTS in error
