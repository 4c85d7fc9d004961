"""The emulated device and the FusedAdam stand-in replace nothing of Megatron's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import gpt
from tests.patched import untouched
from tests.rank_pool import RankPool

# External objects that Megatron's own import logic binds; see `tests.fused_adam`.
STAND_INS = frozenset({"tests.fused_adam.FusedAdam", "tests.fused_adam.FusedSGD"})


def train_then_scan(plant: Callable[[], None] | None = None) -> untouched.Scan:
    """Train two steps, plant a patch if there is one, and scan all of Megatron."""
    gpt.train(gpt.BF16, until=2)
    if plant is not None:
        plant()
    return untouched.scan(STAND_INS)


def test_every_megatron_object_is_megatrons_own(ranks: RankPool) -> None:
    """After training, each function, method and class is what Megatron's source says."""
    (result,) = ranks.run(train_then_scan)
    assert result.foreign == []
    assert result.num_checked > 5000


def _other(*_: Any, **__: Any) -> None:
    """Stand in for what a patch would do."""


def patch_function() -> None:
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    dispatcher.maybe_move_tensor_to_cpu = _other


def patch_method() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    DistributedOptimizer.step_with_ready_grads = _other


def patch_method_with_megatrons_own() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    DistributedOptimizer.zero_grad = DistributedOptimizer.state_dict


def patch_imported_name() -> None:
    import megatron.training.initialize as initialize

    initialize.get_args = _other


def patch_external_name() -> None:
    import megatron.core.optimizer as optimizer

    optimizer.CPUAdam = _other


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (patch_function, "moe.token_dispatcher.maybe_move_tensor_to_cpu"),
        (patch_method, "DistributedOptimizer.step_with_ready_grads"),
        (patch_method_with_megatrons_own, "DistributedOptimizer.zero_grad"),
        (patch_imported_name, "megatron.training.initialize.get_args"),
        (patch_external_name, "megatron.core.optimizer.CPUAdam"),
    ],
)
def test_scan_finds_a_planted_patch(plant: Callable[[], None], found: str, ranks: RankPool) -> None:
    """The scan above would have noticed."""
    (result,) = ranks.run(train_then_scan, plant=plant)
    assert [name for name in result.foreign if found in name.split(" is ")[0]]
