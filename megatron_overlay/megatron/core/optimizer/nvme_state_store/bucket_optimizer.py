"""The update of one resident bucket by the very optimizer Megatron picked.

Whatever class that is (Transformer Engine's or Apex's FusedAdam, torch's Adam or AdamW), the bucket
is updated by its own `step`, on a shallow copy whose param groups and state hold the bucket's
slices. So the arithmetic is the class's, and every key of the master groups (lr, betas, what a
subclass adds) is honoured, because the copies are made from the master groups at every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ResidentSlice:
    """A slice that is on the device: FP32 tensors of one shape, updated in place.

    Attributes:
        group: index of its master param group.
        main: main params.
        grad: their gradient.
        moments: by the names in `MOMENTS`.
    """

    group: int
    main: torch.Tensor
    grad: torch.Tensor
    moments: dict[str, torch.Tensor]


def shallow_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with the same attributes.

    `copy.copy` would go through `Optimizer.__getstate__`, which drops all that a subclass adds.
    """
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    return copy


def update_slices(
    optimizer: torch.optim.Optimizer, slices: Sequence[ResidentSlice], step: int
) -> None:
    """Update resident slices by one step of ``optimizer``'s class.

    Args:
        optimizer: the master: its groups give the hyperparameters, its own state is not touched.
        slices: what to update; every slice has a gradient.
        step: number of steps already made: the counter of the bias correction before this one.
    """
    stepper = shallow_copy(optimizer)
    stepper.state = defaultdict(dict)
    # A counter in the groups (FusedAdam) and one in each state (torch) say the same.
    stepper.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    for group in stepper.param_groups:
        if step:
            group["step"] = step
        else:
            group.pop("step", None)
    for resident in slices:
        param = torch.nn.Parameter(resident.main, requires_grad=False)
        param.grad = resident.grad
        stepper.param_groups[resident.group]["params"].append(param)
        stepper.state[param] = dict(resident.moments)
        if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            stepper.state[param]["step"] = torch.tensor(float(step))
    stepper.step()


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
