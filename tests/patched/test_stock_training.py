"""The stock optimizer trains, saves and resumes bit for bit on the emulated device.

This is the ground that the parity tests of the streamed optimizer stand on. It also shows that the
comparison can fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests import gpt
from tests.patched.resume import (
    SAVED_AT,
    UNTIL,
    Resumption,
    Scenario,
    break_and_resume,
    differences,
    resume,
)
from tests.rank_pool import RankPool

# 2**19 overflows fp16 in the first steps; with hysteresis 1 each overflow halves the scale, until
# a step succeeds before the checkpoint is written.
_SKIPPING_SCALER = ("--initial-loss-scale", str(2**19), "--hysteresis", "1")

DP1 = Scenario("dp1", 1, gpt.BF16)
DP2 = Scenario("dp2", 2, gpt.BF16)
FP16 = Scenario("fp16", 1, [*gpt.FP16, *_SKIPPING_SCALER])
SCENARIOS = [
    DP1,
    DP2,
    Scenario("tp2", 2, [*gpt.BF16, "--tensor-model-parallel-size", "2"]),
    Scenario("pp2", 2, [*gpt.BF16, "--pipeline-model-parallel-size", "2"]),
    Scenario("ep2", 2, [*gpt.BF16, *gpt.MOE, "--expert-model-parallel-size", "2"]),
    FP16,
]


@pytest.fixture(scope="module")
def make(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Scenario], Resumption]:
    """Make all runs of a scenario, once."""

    @functools.cache
    def make_once(name: str) -> Resumption:
        (scenario,) = (each for each in SCENARIOS if each.name == name)
        return break_and_resume(ranks, scenario, tmp_path_factory.mktemp(name))

    return lambda scenario: make_once(scenario.name)


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.name)
def resumption(
    request: pytest.FixtureRequest, make: Callable[[Scenario], Resumption]
) -> Resumption:
    """The runs of each scenario in turn."""
    return make(request.param)


def test_resumed_state_equals_that_of_an_uninterrupted_run(resumption: Resumption) -> None:
    """Every param, main, moment, step and scaler is the same bit for bit on every rank."""
    assert [run.first_iteration for run in resumption.after] == [SAVED_AT] * len(resumption.after)
    assert differences(resumption.straight, resumption.after) == [[]] * len(resumption.after)


def test_resumed_losses_and_norms_equal_those_of_an_uninterrupted_run(
    resumption: Resumption,
) -> None:
    """Not only the end agrees: each step does."""
    for straight, before, after in zip(
        resumption.straight, resumption.before, resumption.after, strict=True
    ):
        assert before.losses + after.losses == straight.losses
        assert before.grad_norms + after.grad_norms == straight.grad_norms
        assert len(straight.grad_norms) == UNTIL
    assert any(run.losses for run in resumption.straight)


def test_loading_restores_what_was_saved(resumption: Resumption) -> None:
    """The state right after loading is the state right before saving."""
    for before, after in zip(resumption.before, resumption.after, strict=True):
        assert before.final.differences(after.initial) == []


def test_every_trainable_param_has_moved(resumption: Resumption) -> None:
    """Equality would mean little if nothing had been trained."""
    for run in resumption.straight:
        names = [name for name in run.initial.tensors if name.startswith(("model/", "main/"))]
        assert names
        assert [name for name in names if name not in run.initial.differences(run.final)] == []


def test_state_holds_mains_and_moments(resumption: Resumption) -> None:
    """The comparison looks at what it is for."""
    for run in resumption.straight:
        kinds = {name.split("/")[0] for name in run.final.tensors}
        assert kinds == {"model", "main", "exp_avg", "exp_avg_sq"}
        steps = {value for name, value in run.final.scalars.items() if name.startswith("step/")}
        assert steps == {run.skipped.count(False)}


@pytest.mark.parametrize("scenario", [DP1, DP2], ids=lambda scenario: scenario.name)
def test_device_memory_is_that_of_the_state(
    scenario: Scenario, make: Callable[[Scenario], Resumption]
) -> None:
    """What stays on the device is 6 bytes a param, and 12 a param of this rank's shard.

    That is bf16 params and fp32 grads; fp32 mains and two moments. Little else may stay: the bound
    is a quarter of the smallest of these.
    """
    for run in make(scenario).straight:
        state_nbytes = (6 + 12 // scenario.world_size) * run.num_params
        assert state_nbytes <= run.device_nbytes < state_nbytes + run.num_params // 2
        assert run.max_device_nbytes > run.device_nbytes


def test_fp16_run_skips_steps_and_recovers(make: Callable[[Scenario], Resumption]) -> None:
    """The scenario really overflows at first, lowers its scale, and then steps."""
    (run,) = make(FP16).straight
    assert run.skipped[0]
    assert not run.skipped[SAVED_AT - 1]
    assert run.final.scalars["scaler/0"]["scale"] == 2**19 / 2 ** run.skipped.count(True)


def change_one_moment(model: Sequence[Any], optimizer: Any) -> None:
    """Move one element of one first moment to the next float."""
    _, inner = next(gpt.inner_optimizers(optimizer))
    moment = next(iter(inner.optimizer.state.values()))["exp_avg"].view(-1)
    moment[0] = torch.nextafter(moment[0], torch.full_like(moment[0], float("inf")))


def advance_step(model: Sequence[Any], optimizer: Any) -> None:
    """Pretend that one step more had been made."""
    _, inner = next(gpt.inner_optimizers(optimizer))
    for group in inner.optimizer.param_groups:
        group["step"] += 1


@pytest.mark.parametrize(
    ("fault", "tells"),
    [(change_one_moment, "exp_avg/0/0/0"), (advance_step, "main/0/0/0")],
)
def test_planted_fault_fails_the_comparison(
    fault: Callable[[Sequence[Any], Any], None],
    tells: str,
    ranks: RankPool,
    make: Callable[[Scenario], Resumption],
) -> None:
    """One float's last bit, or the step counter, changed after loading is found at the end."""
    sound = make(DP1)
    faulty = resume(ranks, DP1, sound.checkpoint, after_setup=fault)
    (names,) = differences(sound.straight, faulty)
    assert tells in names
