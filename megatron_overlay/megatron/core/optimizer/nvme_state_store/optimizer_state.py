"""What state an optimizer's class keeps of a param: found by letting the class make it.

No class is named here. A shallow copy of the master steps once on a tiny param, and whatever it
then holds is sorted: FP32 tensors stream, one segment each; numbers are step counters, in each
param's state (torch's Adam) or in the param group (FusedAdam). State of any other kind would be
lost between two steps, so it is refused before any file is made.

[Note: The first step]
A class that finds no state may do something else than with zeros: torch's SGD copies the gradient
into its momentum instead of decaying and adding, SOAP starts from the eigenbasis of the first
gradient. Only upstream's ``init_state_fn`` vouches that zeros are the same. What it does not make
as zeros, the class gets to make itself, in the first step of each slice (`StateKeys.is_lazy`); in
the file it is zeros until then. The one step counter of the store says whether that step is still
to come, so also after skipped steps, and after a load.

[Note: Whole params]
Under the distributed optimizer a class sees flat shards, cut where it suits the ranks: upstream
vouches that it does not care. Anywhere else it sees params in their shapes, and may care (Muon).
If it does the same bits to a matrix as to pieces of it, entries may be cut all the same;
otherwise they stay whole, and its state may have any shape that upstream's ``init_state_fn`` makes
for that of the param: it is asked for each, on the meta device, so without memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

FLAT, MATRIX = (64,), (8, 16)
"""Shapes of a param that is tried: of a shard, and of a whole param."""

InitStateFn = Callable[[torch.optim.Optimizer], Any]
"""Upstream's ``init_state_fn``: makes the state of all params, without a step."""


def shallow_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with the same attributes.

    `copy.copy` would go through `Optimizer.__getstate__`, which drops all that a subclass adds.
    """
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    return copy


@dataclass(frozen=True)
class StateKeys:
    """What an optimizer keeps besides the params.

    Attributes:
        tensors: keys of a param's state that are FP32 tensors: what streams.
        param_counters: keys of a param's state that count steps, each with its value after one
            step, which tells the type, dtype and device of any other value.
        group_counters: keys of a param group that count steps.
        is_lazy: the class must make its tensors itself, in the first step: see
            [Note: The first step].
        is_elementwise: its entries may be cut: see [Note: Whole params].
    """

    tensors: tuple[str, ...] = ()
    param_counters: Mapping[str, Any] = field(default_factory=dict)
    group_counters: tuple[str, ...] = ()
    is_lazy: bool = False
    is_elementwise: bool = True

    def counters(self, step: int) -> dict[str, Any]:
        """Return the counters of a param's state after ``step`` steps."""
        return {
            key: torch.full_like(one, step) if isinstance(one, torch.Tensor) else type(one)(step)
            for key, one in self.param_counters.items()
        }

    def count_in_groups(self, groups: Sequence[dict[str, Any]], step: int) -> None:
        """Let param groups show ``step`` steps; before the first one they show nothing."""
        for group in groups:
            for key in self.group_counters:
                if step:
                    group[key] = step
                else:
                    group.pop(key, None)


def discover_state(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    init_state_fn: InitStateFn | None = None,
    *,
    is_whole: bool = False,
) -> StateKeys:
    """Find out what state a class keeps, by one step with a zero gradient on a param of zeros.

    Neither the master nor its params are touched.

    Args:
        optimizer: the master; each of its param groups is tried.
        device: where the model is: a fused kernel may run nowhere else.
        init_state_fn: upstream's, if there is one; tells which tensors may start as zeros.
        is_whole: the class sees params in their shapes, not flat shards of them.

    Raises:
        ValueError: the class keeps state that does not stream; the message names class and key.
    """
    name = type(optimizer).__name__
    shape = MATRIX if is_whole else FLAT
    is_elementwise = not is_whole or _is_elementwise(optimizer, device)
    must_match = shape if is_elementwise else None
    is_zero: dict[str, bool] = {}
    if init_state_fn is not None:
        probe = _probe(optimizer, device, shape)
        init_state_fn(probe)
        for key, value in _made(probe):
            if _is_streamed(name, key, value, must_match):
                is_zero[key] = is_zero.get(key, True) and not bool(value.any())
    probe = _probe(optimizer, device, shape)
    try:
        probe.step()
    except KeyError as error:
        raise ValueError(
            f"--stream-optimizer-state-to-disk cannot be used with {name}: it makes its state "
            f"{error} when it is constructed, for params as a whole"
        ) from error
    tensors: dict[str, None] = dict.fromkeys(is_zero)
    counters: dict[str, Any] = {}
    for key, value in _made(probe):
        if _is_streamed(name, key, value, must_match):
            tensors.setdefault(key)
        else:
            counters.setdefault(key, value)
    for key, value in counters.items():
        _require_counter(f"state {key}", name, value)
    _require_separable(optimizer, device, shape)
    return StateKeys(
        tensors=tuple(tensors),
        param_counters=counters,
        group_counters=_group_counters(optimizer, probe),
        is_lazy=not all(is_zero.get(key, False) for key in tensors),
        is_elementwise=is_elementwise,
    )


def state_shapes(
    optimizer: torch.optim.Optimizer,
    keys: StateKeys,
    init_state_fn: InitStateFn | None,
    shape: tuple[int, ...],
    group: int,
) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each tensor in ``keys.tensors`` for a param of ``shape`` in a group.

    Raises:
        ValueError: the class is not elementwise, and no ``init_state_fn`` tells.
    """
    if keys.is_elementwise:
        return (shape,) * len(keys.tensors)
    made: Mapping[str, Any] = {}
    if init_state_fn is not None:
        probe = _probe(optimizer, torch.device("meta"), shape)
        init_state_fn(probe)
        (param,) = probe.param_groups[group]["params"]
        made = probe.state.get(param, {})
    missing = [key for key in keys.tensors if key not in made]
    if missing:
        raise ValueError(
            f"--stream-optimizer-state-to-disk cannot be used with {type(optimizer).__name__}: "
            f"nothing tells which shape its state {', '.join(missing)} has for a param of shape "
            f"{shape}; what can stream is state that Megatron's init_state_fn makes"
        )
    return tuple(tuple(made[key].shape) for key in keys.tensors)


def _is_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether three steps give a matrix and pieces of it, each alone, the same bits."""
    start, grads = _trial(MATRIX, device)
    for group in range(len(optimizer.param_groups)):
        try:
            (whole,) = _stepped(optimizer, group, [start], [[grad] for grad in grads])
            for piece in (slice(64), slice(64, None)):
                pieces = [[grad.view(-1)[piece]] for grad in grads]
                (cut,) = _stepped(optimizer, group, [start.view(-1)[piece]], pieces)
                if not torch.equal(whole.view(-1)[piece], cut):
                    return False
        except torch.OutOfMemoryError:
            raise  # of this rank alone, which tells nothing about the class
        except (TypeError, ValueError, LookupError, RuntimeError, AssertionError):
            return False  # what has no rows and columns is refused
    return True


def _require_separable(
    optimizer: torch.optim.Optimizer, device: torch.device, shape: tuple[int, ...]
) -> None:
    """Refuse a class whose update of a param depends on which others are stepped with it."""
    start, grads = _trial(shape, device)
    for group in range(len(optimizer.param_groups)):
        alone, *_ = _stepped(optimizer, group, [start], [[grad] for grad in grads])
        pairs = [[grad, -3 * grad] for grad in grads]
        together, _ = _stepped(optimizer, group, [start, start + 1], pairs)
        # Coupling is no matter of last bits, which a GPU's library may not repeat.
        if not torch.allclose(alone, together, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise ValueError(
                "--stream-optimizer-state-to-disk cannot be used with "
                f"{type(optimizer).__name__}: its update of a param depends on other params, and "
                "these are not all there at once"
            )


def _trial(shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a param and three gradients of it, of several magnitudes."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(4, *shape, generator=generator).to(device)
    return start, [grad * 100.0 ** (power - 1) for power, grad in enumerate(grads)]


def _stepped(
    optimizer: torch.optim.Optimizer,
    group: int,
    values: Sequence[torch.Tensor],
    grads: Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Return the values after a step of a group with each of the gradients.

    With a learning rate that shows, whatever the schedule's is.
    """
    probe = _probe(optimizer, values[0].device, MATRIX)
    params = [torch.nn.Parameter(each.clone(), requires_grad=False) for each in values]
    for position, each in enumerate(probe.param_groups):
        each.update(params=params if position == group else [], lr=0.01)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        probe.step()
    return [param.detach() for param in params]


def _probe(
    optimizer: torch.optim.Optimizer, device: torch.device, shape: tuple[int, ...]
) -> torch.optim.Optimizer:
    """Return a copy of the master with one param of zeros in each group, and no state."""
    probe = shallow_copy(optimizer)
    probe.state = defaultdict(dict)
    probe.param_groups = []
    for group in optimizer.param_groups:
        zeros = torch.zeros(shape, dtype=torch.float32, device=device)
        param = torch.nn.Parameter(zeros, requires_grad=False)
        param.grad = torch.zeros_like(zeros)
        probe.param_groups.append({**group, "params": [param]})
    return probe


def _made(probe: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for group in probe.param_groups:
        for param in group["params"]:
            for key, value in probe.state.get(param, {}).items():
                if value is not None:  # how some classes write "not yet"
                    yield key, value


def _is_streamed(name: str, key: str, value: Any, must_match: tuple[int, ...] | None) -> bool:
    """Tell a tensor that streams from a number; refuse every other tensor."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    shape = must_match or value.shape
    if value.shape != shape or value.dtype != torch.float32:
        raise ValueError(
            f"--stream-optimizer-state-to-disk cannot be used with {name}: its state {key} has "
            f"shape {tuple(value.shape)} and dtype {value.dtype} for a param of shape "
            f"{tuple(shape)}; what streams is {torch.float32} of the param's shape"
        )
    return True


def _group_counters(
    optimizer: torch.optim.Optimizer, probe: torch.optim.Optimizer
) -> tuple[str, ...]:
    """Return the keys of param groups that a step changes."""
    found: dict[str, None] = {}
    for before, after in zip(optimizer.param_groups, probe.param_groups, strict=True):
        for key, value in after.items():
            if key == "params" or (key in before and before[key] is value):
                continue
            if key not in before or bool(before[key] != value):
                _require_counter(f"param group's {key}", type(optimizer).__name__, value)
                found.setdefault(key)
    return tuple(found)


def _require_counter(what: str, name: str, value: Any) -> None:
    """Refuse what is not the number of steps that were made: one."""
    is_number = isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1)
    if not is_number or float(value) != 1:
        raise ValueError(
            f"--stream-optimizer-state-to-disk cannot be used with {name}: its {what} is {value!r} "
            "after one step; what can be kept are FP32 tensors of the param's shape and counters "
            "of steps"
        )
