"""Methods of tensors and storages that name a device, for the emulated device.

C++ sees CPU tensors only: left to itself it would report "cpu", make `.cpu()` an alias, and try to
reach a driver for `.cuda()`. So these methods answer before C++ does. They are class attributes, so
they hold in every thread and in every mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.emulated_device import current_index, move
from tests.emulated_memory import REGISTRY, Place, place_of

# The methods to fall back on. Any: torch's stubs leave out much of them.
_REAL: Any = torch._C.TensorBase
_REAL_STORAGE: Any = torch._C.StorageBase
_CPU = torch.device("cpu")


def _device(self: torch.Tensor) -> torch.device:
    real: torch.device = _REAL.device.__get__(self)
    if real.type == "cpu" and place_of(self) is Place.DEVICE:
        return torch.device("cuda", current_index())
    return real


def _is_cuda(self: torch.Tensor) -> bool:
    return _device(self).type == "cuda"


def _is_cpu(self: torch.Tensor) -> bool:
    return _device(self).type == "cpu"


def _get_device(self: torch.Tensor) -> int:
    device = _device(self)
    return -1 if device.type == "cpu" else device.index or 0


def _place_named(device: torch.device) -> Place:
    return Place.DEVICE if device.type == "cuda" else Place.HOST


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    copy = kwargs.pop("copy", False)
    other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("other")
    if other is not None:
        device, dtype = other.device, other.dtype
        memory_format = kwargs.get("memory_format")
    else:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    dtype = self.dtype if dtype is None else dtype
    memory_format = torch.preserve_format if memory_format is None else memory_format
    here = _device(self)
    if device is None or device.type == here.type:
        stayed: torch.Tensor = _REAL.to(self, dtype, copy=copy, memory_format=memory_format)
        return stayed
    if {device.type, here.type} == {"cpu", "cuda"}:
        return move(self, _place_named(device), dtype, memory_format)
    moved: torch.Tensor = _REAL.to(self, device, dtype, copy=copy, memory_format=memory_format)
    return moved


def _cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = torch.preserve_format,
) -> torch.Tensor:
    return self if _is_cuda(self) else move(self, Place.DEVICE, None, memory_format)


def _cpu(self: torch.Tensor, memory_format: Any = torch.preserve_format) -> torch.Tensor:
    if _is_cuda(self):
        return move(self, Place.HOST, None, memory_format)
    host: torch.Tensor = _REAL.cpu(self)
    return host


DTYPE_OF_TYPE_NAME = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


def _type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:
    if dtype is None:
        name: str = _REAL.type(self)
        return name.replace("torch.", "torch.cuda.", 1) if _is_cuda(self) else name
    if isinstance(dtype, torch.dtype):
        return self.to(dtype)
    name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    device = "cuda" if name.startswith("torch.cuda.") else "cpu"
    return self.to(device, DTYPE_OF_TYPE_NAME[name.rsplit(".", 1)[1]])


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if _is_cuda(self):
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
    return self if _is_pinned(self) else move(self, Place.PINNED)


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return place_of(self) is Place.PINNED


def _numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    if _is_cuda(self):
        if not force:
            raise TypeError(
                f"can't convert {_device(self)} device type tensor to numpy. Use Tensor.cpu() to "
                "copy the tensor to host memory first."
            )
        return self.detach().cpu().numpy()
    return _REAL.numpy(self, force=force)


def _new(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = _REAL.new(self, *args, **kwargs)
    if _is_cuda(self) and REGISTRY.place_of(out.untyped_storage()) is not Place.DEVICE:
        REGISTRY.put(out.untyped_storage(), Place.DEVICE)
    return out


def _new_tensor(
    self: torch.Tensor,
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    **_: Any,
) -> torch.Tensor:
    device = _device(self) if device is None else device
    return torch.tensor(data, dtype=dtype or self.dtype, device=device, requires_grad=requires_grad)


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """Accept and ignore: every emulated stream is synchronous."""


TENSOR_PATCHES: dict[str, Any] = {
    "device": property(_device),
    "is_cuda": property(_is_cuda),
    "is_cpu": property(_is_cpu),
    "get_device": _get_device,
    "to": _to,
    "cuda": _cuda,
    "cpu": _cpu,
    "type": _type,
    "pin_memory": _pin_memory,
    "is_pinned": _is_pinned,
    "numpy": _numpy,
    "new": _new,
    "new_tensor": _new_tensor,
    "record_stream": _record_stream,
}


# ------------------------------------------------------ torch.tensor, torch.as_tensor, storages


def _normalised(device: Any) -> torch.device:
    if device is None:
        return torch.get_default_device()
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def make_tensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `torch.tensor`, which copies with dispatch modes switched off."""

    @functools.wraps(original)
    def tensor(
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        if device is None and isinstance(data, torch.Tensor):
            device = data.device
        where = _normalised(device)
        if where.type not in ("cpu", "cuda"):
            return original(data, dtype=dtype, device=where, requires_grad=requires_grad)
        out = original(data, dtype=dtype, device=_CPU)
        if where.type == "cuda":
            out = move(out, Place.DEVICE)
        elif pin_memory:
            out = move(out, Place.PINNED)
        return out.requires_grad_(requires_grad)

    return tensor


def make_as_tensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `torch.as_tensor`: an alias when place and dtype agree, else a copy."""

    @functools.wraps(original)
    def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            return data.to(device=data.device if device is None else device, dtype=dtype)
        where = _normalised(device)
        if where.type not in ("cpu", "cuda"):
            return original(data, dtype=dtype, device=where)
        return original(data, dtype=dtype, device=_CPU).to(where)

    return as_tensor


def _storage_new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    where = _CPU if device is None else _normalised(device)
    if where.type != "cuda":
        if device is not None:
            kwargs["device"] = device
        return _REAL_STORAGE.__new__(cls, *args, **kwargs)
    storage = _REAL_STORAGE.__new__(cls, *args, **kwargs)
    REGISTRY.put(storage, Place.DEVICE)
    return storage


def _storage_device(self: torch.UntypedStorage) -> torch.device:
    if REGISTRY.place_of(self) is Place.DEVICE:
        return torch.device("cuda", current_index())
    real: torch.device = _REAL_STORAGE.device.__get__(self)
    return real


def _storage_resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    _REAL_STORAGE.resize_(self, size)
    REGISTRY.update_size(self)
    return self


STORAGE_PATCHES: dict[str, Any] = {
    "__new__": staticmethod(_storage_new),
    "device": property(_storage_device),
    "resize_": _storage_resize,
}
