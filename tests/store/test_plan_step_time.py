"""The slowest path decides; what forward and backward hide is not exposed; disks wear."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.optimizer.nvme_state_store.config import StoreConfig
from megatron.core.optimizer.nvme_state_store.plan.machine import Machine
from megatron.core.optimizer.nvme_state_store.plan.memory import stream
from megatron.core.optimizer.nvme_state_store.plan.model import model_of_numbers
from megatron.core.optimizer.nvme_state_store.plan.ranks import Parallel, largest_rank
from megatron.core.optimizer.nvme_state_store.plan.rates import Rates
from megatron.core.optimizer.nvme_state_store.plan.step_time import step_time

from tests.store.plans import FAST, PLAIN, PREFIX, only, plan


def test_a_node_has_so_many_ranks_of_bytes_and_they_share_its_disk() -> None:
    one = only(plan(*PLAIN, *FAST))
    four = only(plan("--params", "8e9", "--dp", 4, "--gpus-per-node", 4, *FAST))

    assert four["disk_bytes"] == one["disk_bytes"]
    assert four["node_disk_bytes"] == 4 * one["node_disk_bytes"]
    assert four["step_seconds"] == pytest.approx(4 * one["step_seconds"])


def test_slots_for_the_whole_disk_tier_are_never_read_and_hide_all_writes() -> None:
    ahead = (f"{PREFIX}ahead-gb", 30)
    made = only(plan(*PLAIN, *FAST, *ahead, "--forward-backward-s", 60))

    assert made["read_bytes_per_step"] == 0
    assert made["exposed_seconds"] < 1
    assert made["host_bytes"] == made["disk_bytes"]


def test_what_does_not_fit_into_forward_and_backward_is_exposed() -> None:
    """Twice the slots are hidden if there is time, and what the disk does in that time else."""
    slots = 4 * 0.6e9
    step, long, short = (
        only(plan(*PLAIN, *FAST, "--forward-backward-s", seconds)) for seconds in (1, 60, 1)
    )
    assert step["step_seconds"] == pytest.approx(48e9 / 2e9, rel=0.01)
    assert long["exposed_seconds"] == pytest.approx((48e9 - 2 * slots) / 2e9, rel=0.01)
    assert short["exposed_seconds"] == pytest.approx(48e9 / 2e9 - 1, rel=0.01)


def test_wear_is_what_is_written_in_a_day_of_steps() -> None:
    made = only(plan(*PLAIN, *FAST, "--forward-backward-s", 36))

    seconds = 36 + made["exposed_seconds"]
    assert made["node_written_bytes_per_day"] == pytest.approx(24e9 * 86400 / seconds, rel=0.01)


def test_without_rates_no_time_is_predicted() -> None:
    made = only(plan(*PLAIN))
    assert made["step_seconds"] is None
    assert made["node_written_bytes_per_day"] is None


def test_what_is_only_written_goes_at_the_rate_of_writing_alone() -> None:
    """With slots for all of the disk tier no read is in the way; else, the mixed rate counts."""
    rank = largest_rank(model_of_numbers(2 * 10**9), Parallel(), "adam")
    machine = Machine(1)
    for ahead, write, expected in (
        (0, None, 48 / 2),
        (0, 3e9, 48 / 2),
        (30, None, 24 / 2),
        (30, 3e9, 24 / 3),
        (0, 0.5e9, 24 / 0.5),
    ):
        config = StoreConfig((Path("/disk"),), ahead_bytes=ahead * 10**9)
        streamed = stream(rank, config, "fp32", "te", machine)
        rates = Rates(2e9, None, write, 50e9, 72e9)
        step = step_time(streamed, rank, machine, rates, None).step
        assert step == pytest.approx(expected, rel=0.01)
