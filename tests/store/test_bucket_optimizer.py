"""Updating slices of params one after the other is the same as updating whole params at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.bucket_optimizer import (
    MOMENTS,
    ResidentSlice,
    shallow_copy,
    update_params,
    update_slices,
)

from tests.fused_adam import FusedAdam

SIZES = (300, 128, 64)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused-adam": FusedAdam,
    "torch-adamw": torch.optim.AdamW,
    "torch-adam": torch.optim.Adam,
    "torch-adamw-foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "torch-adamw-one-by-one": lambda groups: torch.optim.AdamW(groups, foreach=False),
}


def make(kind: str) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Return params in two groups, and an optimizer of them."""
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(size, generator=generator) for size in SIZES]
    groups = [
        {"params": params[:1], "lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": params[1:], "lr": 1e-3, "weight_decay": 0.0, "eps": 1e-6},
    ]
    return params, OPTIMIZERS[kind](groups)


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(size, generator=generator) for size in SIZES]


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Change what a scheduler may change."""
    for position, group in enumerate(optimizer.param_groups):
        group["lr"] *= 0.9 - 0.1 * position
        group["betas"] = (0.9 - 0.01 * step, 0.99)
        group["weight_decay"] += 0.01 * position


GROUPS = (0, 1, 1)


@pytest.mark.parametrize("cut", [64, 128, 1000])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_slices_of_params_step_as_whole_params_do(kind: str, cut: int) -> None:
    """Mains and moments after five scheduled steps are the same bit for bit."""
    params, stock = make(kind)
    _, master = make(kind)
    mains = [param.clone() for param in params]
    moments = [{name: torch.zeros_like(main) for name in MOMENTS} for main in mains]
    for step in range(5):
        schedule(stock, step)
        schedule(master, step)
        grads = gradients(step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        stock.step()
        for index, main in enumerate(mains):
            for start in range(0, len(main), cut):
                where = slice(start, start + cut)
                resident = ResidentSlice(
                    GROUPS[index],
                    main[where],
                    grads[index][where],
                    {name: moments[index][name][where] for name in MOMENTS},
                )
                update_slices(master, [resident], step)
    for param, main, state in zip(params, mains, moments, strict=True):
        assert torch.equal(param, main)
        for name in MOMENTS:
            assert torch.equal(stock.state[param][name], state[name])
    assert not master.state, "the master's own state is not touched"
    assert [len(group["params"]) for group in master.param_groups] == [1, 2]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resident_params_step_as_in_the_master(kind: str) -> None:
    """Only the given params move, and their state is the master's."""
    params, stock = make(kind)
    ours, master = make(kind)
    untouched = ours[0].clone()
    for step in range(3):
        for param, mine, grad in zip(params, ours, gradients(step), strict=True):
            param.grad, mine.grad = grad.clone(), grad.clone()
        stock.step()
        update_params(master, ours[1:], GROUPS[1:])
        for group in master.param_groups:  # the store counts for all groups
            if kind == "fused-adam":
                group["step"] = step + 1
    assert torch.equal(ours[0], untouched)
    assert ours[0] not in master.state
    for param, mine in zip(params[1:], ours[1:], strict=True):
        assert torch.equal(param, mine)
        for name in MOMENTS:
            assert torch.equal(stock.state[param][name], master.state[mine][name])


class Subclass(FusedAdam):
    """Keeps attributes and group keys of its own, as Megatron's forks do."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.scale = 0.5

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = param.grad * self.scale * group["own"]
        return super().step(closure)


def test_attributes_and_group_keys_of_a_subclass_are_honoured() -> None:
    """The update is the class's own step."""
    main, grad = torch.ones(64), torch.full((64,), 2.0)
    whole = torch.ones(64)
    whole.grad = grad.clone()
    stock = Subclass([{"params": [whole], "own": 3.0}])
    master = Subclass([{"params": [main], "own": 3.0}])
    moments = {name: torch.zeros(64) for name in MOMENTS}

    stock.step()
    update_slices(master, [ResidentSlice(0, main, grad, moments)], 0)

    assert torch.equal(main, whole)
    assert torch.equal(moments["exp_avg"], stock.state[whole]["exp_avg"])


def test_a_shallow_copy_has_all_attributes() -> None:
    """`copy.copy` would lose what a subclass adds."""
    _, optimizer = make("fused-adam")
    copied = shallow_copy(optimizer)
    assert type(copied) is type(optimizer)
    assert vars(copied).keys() == vars(optimizer).keys()
    assert not hasattr(copy.copy(optimizer), "adam_w_mode"), "or this function is not needed"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_step_counter_gives_another_result(kind: str) -> None:
    """The bias correction sees the counter that it is given."""
    results = []
    for step in (0, 1):
        _, master = make(kind)
        main = torch.ones(64)
        moments = {name: torch.full((64,), 0.1) for name in MOMENTS}
        update_slices(master, [ResidentSlice(0, main, torch.ones(64), moments)], step)
        results.append(main)
    assert not torch.equal(*results)
