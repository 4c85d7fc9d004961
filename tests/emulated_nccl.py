"""The `nccl` backend of the emulated device: gloo under another name.

Groups asked for with `nccl` run on gloo, answer "nccl" to `get_backend`, and refuse host tensors,
as NCCL does. Gloo's limit that NCCL does not have is lifted: `all_gather` of unequal sizes. All
else that Megatron asks for (AVG, bf16 and fp16, coalescing, all-to-all with split sizes) gloo does
in torch 2.11.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.emulated_memory import Place, place_of

# What each group was asked to be, by its name in `torch.distributed`.
_ASKED_FOR: dict[str, str] = {}


def _as_gloo(backend: str) -> str:
    return "gloo" if "nccl" in backend.lower() else backend


def _remember(group: Any, backend: str) -> None:
    if isinstance(group, dist.ProcessGroup) and "nccl" in backend.lower():
        _ASKED_FOR[group.group_name] = backend.lower()


def _asked_for(group: Any) -> str | None:
    """Return the backend string with nccl that `group` was made with, if it was."""
    group = dist.group.WORLD if group is None else group
    return _ASKED_FOR.get(group.group_name) if isinstance(group, dist.ProcessGroup) else None


def _init_process_group(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        asked_for = "cpu:gloo,cuda:nccl" if backend is None else backend
        kwargs.update(device_id=None, pg_options=None)
        original(_as_gloo(asked_for), *args, **kwargs)
        _remember(dist.group.WORLD, asked_for)

    return init_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        asked_for = backend or _asked_for(None) or dist.get_backend()
        kwargs.update(device_id=None)
        if args:  # pg_options, of NCCL's own class
            args = (None, *args[1:])
        else:
            kwargs.update(pg_options=None)
        group = original(ranks, timeout, _as_gloo(asked_for), *args, **kwargs)
        _remember(group, asked_for)
        return group

    return new_group


def _get_backend(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def get_backend(group: Any = None) -> str:
        return _asked_for(group) or original(group)

    return get_backend


def _device_types(original: property) -> property:
    """Wrap `_device_types`, by which torch places the tensors of object collectives."""

    def device_types(group: dist.ProcessGroup) -> Iterable[torch.device]:
        asked_for = _asked_for(group)
        if asked_for is None:
            types: Iterable[torch.device] = original.__get__(group)
            return types
        names = ("cpu", "cuda") if "gloo" in asked_for else ("cuda",)
        return [torch.device(name) for name in names]

    return property(device_types)


class _Done:
    """A work handle for a collective that is over."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL gathers unequal sizes, gloo does not; broadcasts take its place."""

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({out.shape for out in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        group = dist.group.WORLD if group is None else group
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, out in zip(dist.get_process_group_ranks(group), tensor_list, strict=True):
            dist.broadcast(out, rank, group=group)
        return _Done() if async_op else None

    return all_gather


def check_collective(args: tuple[Any, ...], tensors: Iterable[torch.Tensor]) -> None:
    """Refuse host tensors in a group that was asked for with nccl alone.

    Args:
        args: arguments of a `c10d` operator; one is the boxed process group.
        tensors: the tensors among them.
    """
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            if not arg._type().qualified_name().endswith(".ProcessGroup"):
                continue
            if _ASKED_FOR.get(dist.ProcessGroup.unbox(arg).group_name) != "nccl":
                return
            for tensor in tensors:
                if place_of(tensor) in (Place.HOST, Place.PINNED):
                    raise RuntimeError("No backend type associated with device type cpu")
            return


def _replace(name: str, wrap: Callable[[Any], Any]) -> None:
    value = wrap(getattr(dist, name))
    for module in (dist, c10d):
        if not hasattr(module, name):
            raise AttributeError(f"{module.__name__} has no {name!r} to emulate")
        setattr(module, name, value)


def install() -> None:
    """Make `torch.distributed` run nccl groups on gloo."""
    _replace("init_process_group", _init_process_group)
    _replace("new_group", _new_group)
    _replace("get_backend", _get_backend)
    _replace("all_gather", _all_gather)
    group_class: Any = dist.ProcessGroup
    group_class._device_types = _device_types(group_class._device_types)
