"""The state of any class is found by asking it, and what cannot stream is refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.optimizer_state import (
    StateKeys,
    discover_state,
    shallow_copy,
    state_shapes,
)

from tests.fused_adam import FusedAdam
from tests.store.test_bucket_optimizer import (
    OPTIMIZERS,
    AdaptiveMuon,
    Lion,
    Soap,
    emerging,
    make_adam_state,
)

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


# ------------------------------------------------------------------------------------- whole params

SOAP = ("exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R")
MUON = ("momentum_buffer", "moment2_buffer")
make_emerging_state = emerging._eopt_init_state_fn


def adaptive(method: str) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: AdaptiveMuon(
        params, lr=0.1, momentum=0.9, weight_decay=0.0, moment2_method=method
    )


def soap(params: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = Soap(params, lr=0.1)
    return found


def muon(params: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = emerging.TensorParallelMuon(params)
    return found


def evicted_matrix() -> torch.Tensor:
    handle = torch.zeros(6, 4)
    handle.untyped_storage().resize_(0)
    return handle


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("lr", [0.0, 1e-30, 0.1])
def test_what_does_the_same_to_pieces_is_elementwise(kind: str, lr: float) -> None:
    """Of a matrix it keeps what it keeps of a shard, each tensor as large as the param."""
    flat = OPTIMIZERS[kind]([{"params": [evicted()], "lr": lr}])
    whole = OPTIMIZERS[kind]([{"params": [evicted_matrix()], "lr": lr}])

    keys = discover_state(whole, CPU, is_whole=True)

    assert keys.is_elementwise
    assert keys == discover_state(flat, CPU)
    for shape in [(3, 5), (7,), (2, 3, 4)]:
        assert state_shapes(whole, keys, None, shape, 0) == (shape,) * len(keys.tensors)


@pytest.mark.parametrize(
    ("construct", "expected"),
    [
        (soap, StateKeys(SOAP, {"step": 1}, is_lazy=True, is_elementwise=False)),
        (muon, StateKeys(MUON[:1], is_elementwise=False)),
        (adaptive("adamuon"), StateKeys(MUON, is_elementwise=False)),
        (adaptive("normuon"), StateKeys(MUON, is_elementwise=False)),
        (adaptive("namo"), StateKeys(MUON, is_elementwise=False)),
    ],
)
def test_what_looks_at_matrices_keeps_them_whole(
    construct: Callable[[Any], torch.optim.Optimizer], expected: StateKeys
) -> None:
    """SOAP starts from identities, so it makes its state itself; master and groups stay."""
    master = construct([{"params": [evicted_matrix()]}, {"params": [evicted_matrix()], "lr": 0.0}])
    groups = [dict(group) for group in master.param_groups]

    assert discover_state(master, CPU, make_emerging_state, is_whole=True) == expected

    assert not master.state
    for before, after in zip(groups, master.param_groups, strict=True):
        assert before.keys() == after.keys()
        assert all(before[key] is after[key] for key in before)


class Planted(torch.optim.Optimizer):
    """Momentum whose update of a param is a function of it and the number of the step."""

    def __init__(self, params: Any, update: Callable[[torch.Tensor, int], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param))
                state["step"] = state.get("step", 0) + 1
                momentum.mul_(0.9).add_(param.grad)
                param.sub_(self.update(momentum, state["step"]), alpha=group["lr"])


def clipped_to(norm: float) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda momentum, step: momentum * (norm / momentum.norm().clamp(min=norm))


@pytest.mark.parametrize(
    ("update", "is_elementwise"),
    [
        (lambda momentum, step: momentum, True),
        (lambda momentum, step: momentum.sign() if step > 1 else momentum, True),
        (lambda momentum, step: momentum / momentum.norm(dim=-1, keepdim=True), False),
        (lambda momentum, step: momentum / momentum.norm(dim=0, keepdim=True), False),
        (lambda momentum, step: momentum - momentum.mean(), False),
        (lambda momentum, step: momentum / (momentum.norm() if step > 1 else 1), False),
        (lambda momentum, step: momentum / (momentum.norm() if step > 2 else 1), False),
        (clipped_to(1e-6), False),
        (clipped_to(0.1), False),
        (clipped_to(10), False),
        (clipped_to(1000), False),
    ],
    ids=[
        *("momentum", "sign-later", "rows", "columns", "centered", "norm-later", "norm-third"),
        *("clip-all", "clip-small", "clip-large", "clip-largest"),
    ],
)
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_one_update_in_three_steps_that_looks_at_the_whole_is_enough(
    update: Callable[[torch.Tensor, int], torch.Tensor], is_elementwise: bool, lr: float
) -> None:
    """Rows, columns or the whole; from a later step on; only gradients above some norm.

    Whatever the learning rate: a warm-up starts at zero, where every class is elementwise.
    """
    master = Planted([evicted_matrix()], update)
    master.param_groups[0]["lr"] = lr
    assert discover_state(master, CPU, is_whole=True).is_elementwise is is_elementwise


def test_a_class_that_steps_matrices_only_keeps_them_whole() -> None:
    """Pieces cannot be tried, so they are not made."""
    keys = discover_state(torch.optim.Muon([torch.zeros(6, 4)]), CPU, is_whole=True)
    assert keys == StateKeys(("momentum_buffer",), is_lazy=True, is_elementwise=False)


class Coupled(Planted):
    """Clips by a norm over all of its params."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.grad.mul_(1 / norm.clamp(min=1))
        super().step()


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_class_that_couples_its_params_is_refused(is_whole: bool) -> None:
    """Stepped bucket by bucket it would do something else, silently."""
    master = Coupled([evicted_matrix()], lambda momentum, step: momentum)
    with pytest.raises(ValueError, match="Coupled: its update of a param depends on other params"):
        discover_state(master, CPU, is_whole=is_whole)


class OfMatrices(Planted):
    """Asserts that it sees matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert all(param.dim() == 2 for group in self.param_groups for param in group["params"])
        super().step()


def test_a_class_that_asserts_matrices_keeps_them_whole() -> None:
    master = OfMatrices([evicted_matrix()], lambda momentum, step: momentum)
    assert not discover_state(master, CPU, is_whole=True).is_elementwise


def test_one_group_that_looks_at_the_whole_is_enough() -> None:
    """Whichever it is."""

    class OfGroups(Planted):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    if group["norm"] < 1:
                        param.grad.mul_(group["norm"] / param.grad.norm())
            super().step()

    groups = [{"params": [evicted_matrix()], "norm": norm} for norm in (1.0, 1e-6)]
    master = OfGroups(groups, lambda momentum, step: momentum)
    assert not discover_state(master, CPU, is_whole=True).is_elementwise


def test_shards_of_a_class_are_not_asked_whether_they_may_be_cut() -> None:
    """They are cut already: upstream's distributed optimizer vouches for it."""
    master = Planted([evicted()], clipped_to(0.1))
    assert discover_state(master, CPU).is_elementwise


HUGE = 1_000_000


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 9), (HUGE, HUGE), (HUGE, HUGE - 1)])
@pytest.mark.parametrize(
    ("construct", "expected"),
    [
        (soap, lambda m, n: [(m, n), (m, n), (m, m), (n, n), (m, m), (n, n)]),
        (muon, lambda m, n: [(m, n)]),
        (adaptive("adamuon"), lambda m, n: [(m, n), (m, n)]),
        (adaptive("normuon"), lambda m, n: [(m, n), (m, 1) if m >= n else (1, n)]),
        (adaptive("namo"), lambda m, n: [(m, n), (1,)]),
    ],
    ids=["soap", "muon", "adamuon", "normuon", "namo"],
)
def test_state_has_the_shapes_that_upstream_makes(
    construct: Callable[[Any], torch.optim.Optimizer],
    expected: Callable[[int, int], list[tuple[int, ...]]],
    shape: tuple[int, int],
) -> None:
    """Told without memory: a matrix of 4 TB has a shape like any other."""
    master = construct([evicted_matrix()])
    keys = discover_state(master, CPU, make_emerging_state, is_whole=True)

    found = state_shapes(master, keys, make_emerging_state, shape, 0)

    assert list(found) == expected(*shape)
    assert not master.state


class Whole(Planted):
    """Looks at rows, and keeps something more of each param."""

    def __init__(self, params: Any, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(params, clipped_to(0.1))
        self.make = make

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for param, state in self.state.items():
            state["more"] = self.make(param)


def make_momentum(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["momentum"] = torch.zeros_like(param)


@pytest.mark.parametrize(
    ("init_state_fn", "names"), [(None, "momentum, more"), (make_momentum, "more")]
)
def test_state_whose_shape_nobody_tells_is_refused(init_state_fn: Any, names: str) -> None:
    """One step on a small matrix does not say what a large one needs."""
    master = Whole([evicted_matrix()], lambda param: torch.zeros(3, 7))
    keys = discover_state(master, CPU, init_state_fn, is_whole=True)
    assert keys.tensors == ("momentum", "more")

    refusal = (
        "--stream-optimizer-state-to-disk cannot be used with Whole: nothing tells which shape "
        f"its state {names} has for a param of shape (6, 4)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(refusal)}"):
        state_shapes(master, keys, init_state_fn, (6, 4), 0)


@pytest.mark.parametrize(
    ("make", "tells"),
    [
        (lambda param: param.bfloat16(), r"has shape \(8, 16\) and dtype torch.bfloat16"),
        (
            lambda param: torch.zeros(3, dtype=torch.int64),
            r"has shape \(3,\) and dtype torch.int64",
        ),
        (lambda param: torch.tensor(0.5), r"is tensor\(0.5000\) after one step"),
        (lambda param: "text", "is 'text' after one step"),
    ],
)
def test_state_of_whole_params_that_cannot_stream_is_refused(
    make: Callable[[torch.Tensor], Any], tells: str
) -> None:
    """Its shape is free, its dtype is not."""
    refusal = "--stream-optimizer-state-to-disk cannot be used with Whole: its state more"
    with pytest.raises(ValueError, match=f"^{refusal} {tells}"):
        discover_state(Whole([evicted_matrix()], make), CPU, is_whole=True)


@pytest.mark.parametrize("shape", [(8, 8), (1,), (128,), (16, 8)])
def test_state_of_a_class_that_may_be_cut_must_be_as_large_as_its_params(
    shape: tuple[int, ...],
) -> None:
    """Else there is nothing that a piece of it would be."""
    tells = f"its state more has shape {shape} and dtype torch.float32 for a param of shape (8, 16)"
    with pytest.raises(ValueError, match=re.escape(tells)):
        discover_state(Keeping([evicted()], lambda param: torch.zeros(shape)), CPU, is_whole=True)
