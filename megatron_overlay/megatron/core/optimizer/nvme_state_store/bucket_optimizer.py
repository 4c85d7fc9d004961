"""The update of one resident bucket by the very optimizer Megatron picked.

Whatever class that is (Transformer Engine's or Apex's FusedAdam, torch's Adam or AdamW, Lion), the
bucket is updated by its own `step`, on a shallow copy whose param groups and state hold the
bucket's slices. So the arithmetic is the class's, and every key of the master groups (lr, betas,
what a subclass adds) is honoured, because the copies are made from the master groups at every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import StateStoreError
from .optimizer_state import StateKeys, shallow_copy


@dataclass(frozen=True)
class ResidentSlice:
    """A slice that is on the device: FP32 tensors, updated in place.

    Attributes:
        group: index of its master param group.
        handle: the entry's main param without storage: its attributes tell a class what it has.
        main: main params; in the entry's shape, if that is whole.
        grad: their gradient, of the same shape.
        moments: the state's tensors, by the keys in `StateKeys.tensors`.
    """

    group: int
    handle: torch.Tensor
    main: torch.Tensor
    grad: torch.Tensor
    moments: dict[str, torch.Tensor]


def update_slices(
    optimizer: torch.optim.Optimizer,
    keys: StateKeys,
    slices: Sequence[ResidentSlice],
    step: int,
) -> None:
    """Update resident slices by one step of ``optimizer``'s class.

    Args:
        optimizer: the master: its groups give the hyperparameters, its own state is not touched.
        keys: what state the class keeps.
        slices: what to update; every slice has a gradient.
        step: number of steps already made: the counter of the bias correction before this one.

    Raises:
        StateStoreError: the class made state that it did not make when it was asked at the start.
    """
    stepper = shallow_copy(optimizer)
    stepper.state = defaultdict(dict)
    # A counter in the groups (FusedAdam) and one in each state (torch) say the same.
    stepper.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    keys.count_in_groups(stepper.param_groups, step)
    params = []
    for resident in slices:
        param = torch.nn.Parameter(resident.main, requires_grad=False)
        vars(param).update(vars(resident.handle))
        param.grad = resident.grad
        stepper.param_groups[resident.group]["params"].append(param)
        params.append(param)
        if step or not keys.is_lazy:
            stepper.state[param] = {**resident.moments, **keys.counters(step)}
    stepper.step()
    for param, resident in zip(params, slices, strict=True):
        _keep(stepper.state.get(param, {}), resident, type(optimizer).__name__)


def _keep(state: dict[str, object], resident: ResidentSlice, name: str) -> None:
    """Take over tensors that the class made or replaced instead of changing them in place."""
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        ours = resident.moments.get(key)
        if ours is None:
            if value.dim() > 0:
                raise StateStoreError(f"{name} made a state tensor {key}, which is not streamed")
        elif ours is not value:
            if ours.shape != value.shape:
                raise StateStoreError(
                    f"{name} made a state tensor {key} of shape {tuple(value.shape)}, expected "
                    f"{tuple(ours.shape)}"
                )
            resident.moments[key] = _in_order_of(ours, value)
            resident.moments[key].copy_(value)


def _in_order_of(ours: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the memory of ``ours`` with the strides of ``value``, if that has no gaps.

    `torch.linalg.eigh` returns matrices column by column, and products of such matrices round
    differently (measured with SOAP on the CPU: 1e-7 for a param of 7 x 9).
    """
    strides = torch.empty_like(value, device="meta").stride()
    return ours.as_strided(value.shape, strides)


def update_params(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], groups: Sequence[int]
) -> None:
    """Step only ``params`` of ``optimizer``, in its own state: those that stay resident.

    Args:
        optimizer: the master, whose state and group counters advance.
        params: resident params, each of the group at the same place in ``groups``.
        groups: index of the master param group of each.
    """
    stepper = shallow_copy(optimizer)
    stepper.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    for param, index in zip(params, groups, strict=True):
        stepper.param_groups[index]["params"].append(param)
    stepper.step()
