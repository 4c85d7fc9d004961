"""The state of any class is found by asking it, and what cannot stream is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.optimizer_state import (
    StateKeys,
    discover_state,
    shallow_copy,
)

from tests.fused_adam import FusedAdam
from tests.store.test_bucket_optimizer import Lion, make_adam_state

CPU = torch.device("cpu")
ADAM = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def eager() -> Any:
    """Run compiled functions as they are written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def evicted(numel: int = 300) -> torch.Tensor:
    """Return a handle without storage, as the master has them: whoever reads it dies."""
    handle = torch.zeros(numel)
    handle.untyped_storage().resize_(0)
    return handle


def make_lion_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["exp_avg"] = torch.zeros_like(param.data)


def sgd(momentum: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, momentum=momentum)


@pytest.mark.parametrize(
    ("construct", "init_state_fn", "expected"),
    [
        (FusedAdam, make_adam_state, StateKeys(ADAM, {}, ("step",))),
        (torch.optim.AdamW, make_adam_state, StateKeys(ADAM, {"step": torch.tensor(1.0)})),
        (torch.optim.Adam, make_adam_state, StateKeys(ADAM, {"step": torch.tensor(1.0)})),
        (FusedAdam, None, StateKeys(ADAM, {}, ("step",), is_lazy=True)),
        (Lion, make_lion_state, StateKeys(("exp_avg",))),
        (Lion, None, StateKeys(("exp_avg",), is_lazy=True)),
        (sgd(0.9), None, StateKeys(("momentum_buffer",), is_lazy=True)),
        (sgd(0.9), lambda optimizer: None, StateKeys(("momentum_buffer",), is_lazy=True)),
        (sgd(0.0), None, StateKeys()),
    ],
)
def test_a_class_tells_its_own_state(
    construct: Callable[[Any], torch.optim.Optimizer], init_state_fn: Any, expected: StateKeys
) -> None:
    """Tensors, counters and where they are; params, state and groups of the master stay."""
    master = construct([{"params": [evicted()], "lr": 0.1}, {"params": [evicted()], "lr": 0.2}])
    groups = [dict(group) for group in master.param_groups]

    found = discover_state(master, CPU, init_state_fn)

    assert found == expected
    assert not master.state
    assert [group.keys() for group in master.param_groups] == [group.keys() for group in groups]
    for before, after in zip(groups, master.param_groups, strict=True):
        assert all(before[key] is after[key] for key in before)


def test_state_that_only_one_group_has_is_found() -> None:
    """Another group may have no momentum."""
    groups: list[dict[str, Any]] = [{"params": [evicted()]}, {"params": [evicted()]}]
    groups[1]["momentum"] = 0.9
    assert discover_state(torch.optim.SGD(groups, lr=0.1), CPU).tensors == ("momentum_buffer",)


def test_state_that_does_not_start_as_zeros_is_made_by_the_class() -> None:
    """Whatever upstream's function says of it."""

    def init(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param] = {
                    "prev": torch.zeros_like(param),
                    "step_size": torch.full_like(param, 0.5),
                }

    assert discover_state(torch.optim.Rprop([torch.zeros(3)]), CPU, init).is_lazy


def test_state_that_a_constructor_makes_is_refused() -> None:
    """There is no such state for a part of a param."""
    with pytest.raises(ValueError, match="with Adagrad: it makes its state 'sum' when it is"):
        discover_state(torch.optim.Adagrad([torch.zeros(3)]), CPU)


class Keeping(torch.optim.SGD):
    """Keeps something more of each param."""

    def __init__(self, params: Any, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.make = make

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["more"] = self.make(param)
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "tells"),
    [
        (lambda param: torch.zeros(8, 8), r"shape \(8, 8\) and dtype torch.float32"),
        (lambda param: torch.zeros(1), r"shape \(1,\)"),
        (lambda param: param.bfloat16(), r"shape \(64,\) and dtype torch.bfloat16"),
        (lambda param: param.double(), r"dtype torch.float64"),
        (lambda param: torch.tensor(0.5), r"is tensor\(0.5000\) after one step"),
        (lambda param: 7, "is 7 after one step"),
        (lambda param: "text", "is 'text' after one step"),
        (lambda param: [param], r"is \[.*\] after one step"),
    ],
)
def test_state_that_cannot_stream_is_refused(
    make: Callable[[torch.Tensor], Any], tells: str
) -> None:
    """Another shape or dtype, or no counter: the message names flag, class and key."""
    refusal = "--stream-optimizer-state-to-disk cannot be used with Keeping: its state more"
    with pytest.raises(ValueError, match=rf"(?s)^{refusal} .*{tells}"):
        discover_state(Keeping([evicted()], make), CPU)


def test_a_group_key_that_is_no_counter_is_refused() -> None:
    """A class that keeps an estimate in its groups would keep that of the last bucket."""

    class Estimating(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["estimate"] = 0.3

    with pytest.raises(ValueError, match=r"with Estimating: its param group's estimate is 0\.3"):
        discover_state(Estimating([evicted()], lr=0.1), CPU)


def test_a_matrix_may_be_asked_for() -> None:
    """A class for matrices cannot step a vector."""

    class Matrices(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    rows, columns = param.shape
                    self.state[param]["momentum"] = param.new_zeros(rows, columns)

    assert discover_state(Matrices([evicted()]), CPU, shape=(4, 8)).tensors == ("momentum",)


@pytest.mark.parametrize("one", [torch.tensor(1.0), torch.tensor(1, dtype=torch.int32), 1, 1.0])
def test_counters_are_of_the_kind_that_the_class_made(one: Any) -> None:
    value = StateKeys(param_counters={"step": one}).counters(5)["step"]
    assert type(value) is type(one) and value == 5
    assert getattr(value, "dtype", None) == getattr(one, "dtype", None)


def test_groups_show_no_counter_before_the_first_step() -> None:
    groups: list[dict[str, Any]] = [{"step": 3}, {}]
    keys = StateKeys(group_counters=("step",))
    keys.count_in_groups(groups, 0)
    assert groups == [{}, {}]
    keys.count_in_groups(groups, 2)
    assert groups == [{"step": 2}, {"step": 2}]


def test_a_shallow_copy_has_all_attributes() -> None:
    """`copy.copy` would lose what a subclass adds."""
    optimizer = FusedAdam([torch.zeros(3)])
    copied = shallow_copy(optimizer)
    assert type(copied) is type(optimizer)
    assert vars(copied).keys() == vars(optimizer).keys()
    assert not hasattr(copy.copy(optimizer), "adam_w_mode"), "or this function is not needed"
