"""Updating slices of params one after the other is the same as updating whole params at once."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.bucket_optimizer import (
    ResidentSlice,
    update_params,
    update_slices,
)
from megatron.core.optimizer.nvme_state_store.errors import StateStoreError
from megatron.core.optimizer.nvme_state_store.optimizer_state import discover_state, state_shapes

from tests.fused_adam import FusedAdam

# Lion's kernel is compiled: seconds for each shape, and not what is tested here.
pytestmark = pytest.mark.usefixtures("eager")

# Untyped.
emerging: Any = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
Lion: Any = importlib.import_module("emerging_optimizers.scalar_optimizers").Lion
Soap: Any = importlib.import_module("emerging_optimizers.soap").SOAP
AdaptiveMuon: Any = importlib.import_module(
    "emerging_optimizers.orthogonalized_optimizers"
).AdaptiveMuon
SIZES = (300, 128, 64)
CPU = torch.device("cpu")
HANDLE = torch.empty(0)
"""Of an entry that has no attributes."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused-adam": FusedAdam,
    "torch-adamw": torch.optim.AdamW,
    "torch-adam": torch.optim.Adam,
    "torch-adamw-foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "torch-adamw-one-by-one": lambda groups: torch.optim.AdamW(groups, foreach=False),
    "torch-amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "lion": Lion,
    "lion-l2": lambda groups: Lion(groups, weight_decay_method="l2"),
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "sgd-nesterov": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    # Where the first step differs most from one with zeros.
    "sgd-dampening": lambda groups: torch.optim.SGD(groups, momentum=0.9, dampening=0.7),
    # State that does not start as zeros.
    "rprop": torch.optim.Rprop,
}


@pytest.fixture
def eager() -> Any:
    """Run compiled functions as they are written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Do what upstream's ``init_state_fn`` of Adam does."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param][name] = torch.zeros_like(param.data)


INIT = {kind: make_adam_state for kind in OPTIMIZERS if "adam" in kind or "ams" in kind}


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
        if "betas" in group:
            group["betas"] = (0.9 - 0.01 * step, 0.99)
        group["weight_decay"] += 0.01 * position


GROUPS = (0, 1, 1)


@pytest.mark.parametrize("cut", [64, 128, 1000])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_slices_of_params_step_as_whole_params_do(kind: str, cut: int) -> None:
    """Mains, state and counters after five scheduled steps are the same bit for bit."""
    params, stock = make(kind)
    _, master = make(kind)
    keys = discover_state(master, CPU, INIT.get(kind))
    mains = [param.clone() for param in params]
    moments = [{name: torch.zeros_like(main) for name in keys.tensors} for main in mains]
    for step in range(5):
        schedule(stock, step)
        schedule(master, step)
        grads = gradients(step)
        for param, grad in zip(params, grads, strict=True):
            grad[:7] = -0.0  # a sign that some arithmetic loses
            param.grad = grad.clone()
        stock.step()
        for index, main in enumerate(mains):
            for start in range(0, len(main), cut):
                where = slice(start, start + cut)
                resident = ResidentSlice(
                    GROUPS[index],
                    HANDLE,
                    main[where],
                    grads[index][where],
                    {name: moments[index][name][where] for name in keys.tensors},
                )
                update_slices(master, keys, [resident], step)
        for param, main, state in zip(params, mains, moments, strict=True):
            assert same_bits(param, main)
            theirs = {key: value for key, value in stock.state[param].items() if value is not None}
            assert theirs.keys() == {*keys.tensors, *keys.param_counters}
            for name in keys.tensors:
                assert same_bits(theirs[name], state[name])
            for name, value in keys.counters(step + 1).items():
                assert torch.equal(theirs[name], value)
    assert not master.state, "the master's own state is not touched"
    assert [len(group["params"]) for group in master.param_groups] == [1, 2]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resident_params_step_as_in_the_master(kind: str) -> None:
    """Only the given params move, and their state is the master's."""
    params, stock = make(kind)
    ours, master = make(kind)
    keys = discover_state(master, CPU, INIT.get(kind))
    untouched = ours[0].clone()
    for step in range(3):
        for param, mine, grad in zip(params, ours, gradients(step), strict=True):
            param.grad, mine.grad = grad.clone(), grad.clone()
        stock.step()
        update_params(master, ours[1:], GROUPS[1:])
        keys.count_in_groups(master.param_groups, step + 1)  # as the store does, for all groups
    assert torch.equal(ours[0], untouched)
    assert ours[0] not in master.state
    for param, mine in zip(params[1:], ours[1:], strict=True):
        assert same_bits(param, mine)
        for name in keys.tensors:
            assert same_bits(stock.state[param][name], master.state[mine][name])


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
    keys = discover_state(master, CPU, make_adam_state)
    moments = {name: torch.zeros(64) for name in keys.tensors}

    stock.step()
    update_slices(master, keys, [ResidentSlice(0, HANDLE, main, grad, moments)], 0)

    assert torch.equal(main, whole)
    assert torch.equal(moments["exp_avg"], stock.state[whole]["exp_avg"])


class Late(torch.optim.SGD):
    """Keeps a tensor that it did not make for the first step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if self.state[param]:
                    self.state[param]["late"] = torch.zeros_like(param)
        return super().step(closure)


def test_state_that_is_made_later_is_not_lost_silently() -> None:
    main = torch.ones(64)
    master = Late([main], momentum=0.9)
    keys = discover_state(master, CPU)
    moments = {"momentum_buffer": torch.zeros(64)}
    resident = ResidentSlice(0, HANDLE, main, torch.ones(64), moments)

    update_slices(master, keys, [resident], 0)
    with pytest.raises(StateStoreError, match="Late made a state tensor late"):
        update_slices(master, keys, [resident], 1)


@pytest.mark.parametrize("kind", INIT)
def test_another_step_counter_gives_another_result(kind: str) -> None:
    """The bias correction sees the counter that it is given."""
    results = []
    for step in (1, 2):
        _, master = make(kind)
        main = torch.ones(64)
        keys = discover_state(master, CPU, INIT.get(kind))
        moments = {name: torch.full((64,), 0.1) for name in keys.tensors}
        update_slices(master, keys, [ResidentSlice(0, HANDLE, main, torch.ones(64), moments)], step)
        results.append(main)
    assert not torch.equal(*results)


def test_attributes_of_a_param_reach_the_class() -> None:
    """Upstream marks params (QKV, experts, how they are cut); the handle has the marks."""
    seen: list[dict[str, Any]] = []

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                seen.extend(dict(vars(param)) for param in group["params"])
            return super().step(closure)

    marked, main = torch.empty(0), torch.ones(64)
    vars(marked).update(partition_dim=1, is_qkv=True)
    marked.grad = torch.full((0,), 5.0)
    master = Looking([marked], lr=1.0)
    keys = discover_state(master, CPU)
    seen.clear()

    grad = torch.full((64,), 0.25)
    slices = [ResidentSlice(0, each, main.clone(), grad, {}) for each in (marked, HANDLE)]
    update_slices(master, keys, slices, 0)

    assert seen == [{"partition_dim": 1, "is_qkv": True}, {}]
    assert torch.equal(slices[0].main, torch.full((64,), 0.75)), "its gradient is the slice's"


class Replacing(torch.optim.Optimizer):
    """Makes its state anew in every step, of the shape that it is told; looks at whole params."""

    def __init__(self, params: Any, shape: tuple[int, ...]) -> None:
        super().__init__(params, {})
        self.shape = shape

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.norm())
                before = self.state[param].get("more", torch.zeros(())).sum() / 15
                self.state[param]["more"] = torch.full(self.shape, before.item() + 1)


def test_a_tensor_that_the_class_replaced_is_copied_into_ours() -> None:
    """Ours is what is written to disk."""
    main, ours = torch.zeros(4, 8), torch.zeros(3, 5)
    master = Replacing([main], (3, 5))
    keys = discover_state(master, CPU, is_whole=True)
    assert keys.tensors == ("more",)

    for step in range(3):
        slices = [ResidentSlice(0, HANDLE, main, torch.ones(4, 8), {"more": ours})]
        update_slices(master, keys, slices, step)
        assert torch.equal(ours, torch.full((3, 5), step + 1.0))


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("shape", [(5, 3), (15,), (1, 5), (1,), ()])
def test_state_of_another_shape_than_was_told_is_an_error(
    shape: tuple[int, ...], step: int
) -> None:
    """Whether it could be copied (one number would fill ours) or not."""
    master = Replacing([torch.zeros(4, 8)], (3, 5))
    keys = discover_state(master, CPU, is_whole=True)
    master.shape, ours = shape, torch.zeros(3, 5)

    resident = ResidentSlice(0, HANDLE, torch.zeros(4, 8), torch.ones(4, 8), {"more": ours})
    told = f"made a state tensor more of shape {shape}, expected (3, 5)"
    with pytest.raises(StateStoreError, match=re.escape(told)):
        update_slices(master, keys, [resident], step)
    assert not ours.any()


# ----------------------------------------------------------------------------------- whole matrices

SHAPES = ((24, 40), (40, 24), (7, 9), (1, 16))
WHOLE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "soap": lambda groups: Soap(groups, lr=0.01),
    "soap-kl-eigh": lambda groups: Soap(groups, lr=0.01, use_kl_shampoo=True, use_eigh=True),
    "muon": lambda groups: emerging.TensorParallelMuon(groups, lr=0.01),
    **{
        f"adaptive-{method}": lambda groups, method=method: AdaptiveMuon(
            groups, lr=0.01, momentum=0.9, weight_decay=0.1, moment2_method=method
        )
        for method in ("adamuon", "normuon", "namo")
    },
}


def matrices(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make_whole(kind: str, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return WHOLE[kind]([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.3}])


@pytest.mark.parametrize("bucket", [1, len(SHAPES)], ids=["one-by-one", "together"])
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_matrices_step_as_the_class_steps_them(kind: str, bucket: int) -> None:
    """Mains and state of any shape after each of five steps are the same bit for bit.

    SOAP makes its state in the first one, from the gradient, and replaces it in every one, by
    tensors that are transposed in memory: products round by that.
    """
    params, mains = matrices(0), matrices(0)
    stock, master = make_whole(kind, params), make_whole(kind, mains)
    init = emerging._eopt_init_state_fn
    keys = discover_state(master, CPU, init, is_whole=True)
    assert not keys.is_elementwise and keys.is_lazy == kind.startswith("soap")
    moments = [
        {
            name: torch.zeros(size)
            for name, size in zip(
                keys.tensors, state_shapes(master, keys, init, shape, 0), strict=True
            )
        }
        for shape in SHAPES
    ]
    for step in range(5):
        schedule(stock, step)
        schedule(master, step)
        grads = matrices(100 + step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        stock.step()
        slices = [
            ResidentSlice(index // 2, HANDLE, *each)
            for index, each in enumerate(zip(mains, grads, moments, strict=True))
        ]
        for start in range(0, len(slices), bucket):
            update_slices(master, keys, slices[start : start + bucket], step)
        for param, main, state in zip(params, mains, moments, strict=True):
            assert same_bits(param, main)
            assert stock.state[param].keys() == {*keys.tensors, *keys.param_counters}
            for name in keys.tensors:
                assert same_bits(stock.state[param][name], state[name])
            for name, value in keys.counters(step + 1).items():
                assert stock.state[param][name] == value
    assert not master.state
