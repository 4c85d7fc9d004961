"""Operators of the emulated device: the dispatch mode that runs them on the CPU, and moving.

Two layers make tensors of the device:

* `DeviceMode`, a `TorchDispatchMode`, sees every operator below autograd: from Python, from C++
  composites and from the backward engine. It turns `device='cuda'` into the CPU, decides where each
  new storage lives, and refuses operators that mix places, as real kernels do.
* Methods of `torch.Tensor` and `torch.UntypedStorage` that report a device or move between devices
  answer before C++ does, see `tests.emulated_tensor`.

[Note: No TorchFunctionMode]
A function mode is popped while one of its own calls runs, so it is blind inside `Tensor.backward`:
in every custom backward and in recomputation. Class attributes and a dispatch mode have no such
hole, and class attributes hold in threads too.

[Note: Who asked for this tensor]
Python's bindings always pass `pin_memory=`; C++ code that creates a tensor like another passes
`layout=` and `device=` from that tensor's options, which say "cpu" for everything here. A creation
without `pin_memory` therefore carries no wish: it goes where its tensor arguments are, or
is FLOATING (see `Place`) until it meets another tensor.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulated_memory import REGISTRY, Place, place_of, storage_of
from tests.emulated_nccl import check_collective

# The methods that the patches below fall back on. Any: stubs leave out much of them.
_REAL: Any = torch._C.TensorBase
_REAL_STORAGE: Any = torch._C.StorageBase
_CPU = torch.device("cpu")

# Operators for which real CUDA accepts host tensors beside device tensors. Everywhere, tensors of
# no dimension count as scalars.
_MAY_MIX = frozenset(
    (
        *("copy_", "_copy_from", "_foreach_copy_", "_to_copy", "set_"),
        *("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"),
        *("lift_fresh", "lift_fresh_copy", "is_same_size"),
    )
)


def current_index() -> int:
    """Return the index of this process's emulated device (`torch.cuda.current_device()`)."""
    return _Current.index


class _Current:
    """Index that `torch.cuda.set_device` chose. One process has one device, as one rank has."""

    index = 0


def set_index(index: int) -> None:
    """Choose the index under which this process's device reports itself."""
    _Current.index = index


class _Move(torch.autograd.Function):
    """Copy to another place; the gradient travels back to where the input is."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, place: Place, dtype: torch.dtype, memory_format: Any
    ) -> torch.Tensor:
        ctx.origin = (place_of(tensor), tensor.dtype)
        return _copy_to(tensor, place, dtype, memory_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        place, dtype = ctx.origin
        (grad,) = grads
        if place is not place_of(grad) or dtype is not grad.dtype:
            grad = _copy_to(grad, place, dtype, torch.preserve_format)
        return grad, None, None, None


class _Destination(threading.local):
    """Where the next `_to_copy` of this thread must put its result."""

    place: Place | None = None


_DESTINATION = _Destination()


def _copy_to(
    tensor: torch.Tensor, place: Place, dtype: torch.dtype, memory_format: Any
) -> torch.Tensor:
    _DESTINATION.place = place
    try:
        copy: torch.Tensor = _REAL.to(tensor, dtype, copy=True, memory_format=memory_format)
    finally:
        _DESTINATION.place = None
    REGISTRY.put(copy.untyped_storage(), place)  # for a thread without the mode
    return copy


def move(
    tensor: torch.Tensor,
    place: Place,
    dtype: torch.dtype | None = None,
    memory_format: Any = torch.preserve_format,
) -> torch.Tensor:
    """Return a copy of `tensor` at `place`, differentiable as `Tensor.to` is."""
    dtype = tensor.dtype if dtype is None else dtype
    if tensor.requires_grad and torch.is_grad_enabled():
        differentiable: Any = _Move
        moved: torch.Tensor = differentiable.apply(tensor, place, dtype, memory_format)
        return moved
    return _copy_to(tensor, place, dtype, memory_format)


# ------------------------------------------------------------------------------ the dispatch mode


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def _may_mix(func: Any) -> bool:
    return func.namespace != "aten" or func.overloadpacket.__name__ in _MAY_MIX


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


class _Inputs:
    """Places of an operator's tensor arguments; settles floating ones beside device tensors."""

    __slots__ = ("any_device", "any_floating", "any_host_array", "num_tensors", "storages")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.any_device = False
        self.any_host_array = False
        self.num_tensors = 0
        floating: list[torch.UntypedStorage] = []
        self._look_at(args, floating)
        if kwargs:
            self._look_at(kwargs.values(), floating)
        self.any_floating = bool(floating) and not self.any_device
        if self.any_device:
            for storage in floating:
                REGISTRY.put(storage, Place.DEVICE)

    def _look_at(self, values: Iterable[Any], floating: list[torch.UntypedStorage]) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                self._look_at(value, floating)
            if not isinstance(value, torch.Tensor):
                continue
            self.num_tensors += 1
            storage = storage_of(value)
            if storage is None:
                continue
            self.storages[storage._cdata] = storage
            place = REGISTRY.place_of(storage)
            if place is Place.DEVICE:
                self.any_device = True
            elif place is Place.FLOATING:
                floating.append(storage)
            elif value.dim() > 0 and _REAL.device.__get__(value).type == "cpu":
                self.any_host_array = True


@dataclass(slots=True)
class _Backward:
    """Places that the operators of one backward pass have touched so far."""

    task: int = -1
    saw_device: bool = False
    saw_host: bool = False


class DeviceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator on the CPU and keeps account of the place of its outputs."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator
        self._backward = _Backward()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without a wrapper that costs a tenth of each operator: `install` switches dynamo off."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        inputs = _Inputs(args, kwargs)
        if inputs.any_device and inputs.any_host_array and not _may_mix(func):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:{current_index()} and cpu! (when running {func})"
            )
        if func.namespace == "c10d":
            check_collective(args, _tensors_in(args))
        self._watch_backward(inputs)
        place = self._output_place(func, inputs, kwargs)
        if place is Place.DEVICE and _is_random(func) and kwargs.get("generator") is None:
            with self._device_randomness():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self._record(out, place, inputs)
        return out

    def _output_place(self, func: Any, inputs: _Inputs, kwargs: dict[str, Any]) -> Place:
        """Decide where new storages go; rewrites `device` and `pin_memory` in `kwargs`."""
        if _DESTINATION.place is not None and func is torch.ops.aten._to_copy.default:
            return _DESTINATION.place
        inherited = Place.DEVICE if inputs.any_device else Place.HOST
        if not kwargs:
            return Place.FLOATING if inputs.any_floating else inherited
        device: torch.device | None = kwargs.get("device")
        is_from_python = "pin_memory" in kwargs
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
            if device is None and inherited is Place.DEVICE:
                raise RuntimeError("Only dense CPU tensors can be pinned")
            if device is None or device.type == "cpu":
                return Place.PINNED
        if device is None:
            return Place.FLOATING if inputs.any_floating else inherited
        if device.type == "cuda":
            kwargs["device"] = _CPU
            return Place.DEVICE
        if device.type == "cpu" and not is_from_python:
            if inputs.num_tensors == 0 or inputs.any_floating:
                return self._place_of_creation()
            return inherited
        return Place.HOST

    def _watch_backward(self, inputs: _Inputs) -> None:
        task = torch._C._current_graph_task_id()
        backward = self._backward
        if task != backward.task:
            self._backward = backward = _Backward(task)
        backward.saw_device |= inputs.any_device
        backward.saw_host |= inputs.any_host_array

    def _place_of_creation(self) -> Place:
        """Zero gradients that the engine makes belong to the device if the whole pass does."""
        seen = self._backward
        if seen.task != -1 and seen.saw_device and not seen.saw_host:
            return Place.DEVICE
        return Place.FLOATING

    def _record(self, out: Any, place: Place, inputs: _Inputs) -> None:
        if not inputs.storages and place is Place.HOST:
            return
        for tensor in (out,) if isinstance(out, torch.Tensor) else _tensors_in((out,)):
            storage = storage_of(tensor)
            if storage is None:
                continue
            if storage._cdata in inputs.storages:
                REGISTRY.update_size(storage)
            elif (
                place is not Place.HOST
                and REGISTRY.place_of(storage) is Place.HOST
                and _REAL.device.__get__(tensor).type == "cpu"
            ):
                REGISTRY.put(storage, place)

    def _device_randomness(self) -> _SwappedGenerator:
        return _SwappedGenerator(self._generator)


class _SwappedGenerator:
    """Lets a CPU kernel draw from the device's generator: CUDA's stream of numbers is its own."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        self._host_state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._generator.get_state())

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(self._host_state)
