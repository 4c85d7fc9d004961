"""A CUDA device emulated on the CPU, so that Megatron's CUDA code runs where there is no GPU.

    from tests import emulated_cuda
    emulated_cuda.install()        # before the first import of megatron
    import megatron.core

It is a double of the *device*, of `torch.cuda` and of the NCCL backend. Nothing of Megatron's is
replaced or told that it runs on a CPU: `torch.cuda.is_available()` is True, `tensor.is_cuda` is
True for tensors on the device, and Megatron takes its CUDA branches.

Faked
  * `torch.cuda`: availability, device index and properties (an H200's capability), RNG (a generator
    of its own), memory statistics, streams, events, graphs' capture query, `cudart()`.
  * Devices of tensors, see `tests.emulated_device` and `tests.emulated_tensor`: `device='cuda'`
    makes a tensor that reports `cuda:N`, moving between host and device copies, mixing them in one
    operator raises torch's "Expected all tensors to be on the same device", `numpy()` of a device
    tensor raises.
  * Bytes, see `tests.emulated_memory`: device and pinned host bytes, exact, with peaks.
  * The `nccl` backend, see `tests.emulated_nccl`: gloo under another name.

Not faked: kernels (CPU kernels run, so numbers differ from a GPU's), Megatron, autograd,
`torch.distributed`'s own Python code, checkpoint writers, files.

Cannot be covered
  * Stream order and overlap: everything is synchronous, a missing wait passes.
  * Classes of CUDA errors: touching a freed (`resize_(0)`) storage is SIGSEGV or RuntimeError here
    and an illegal memory access there.
  * NCCL's behaviour: hangs, timeouts, uneven orders of collectives.
  * CUDA graphs, memory pools, IPC, several devices in one process, `torch.Generator('cuda')`,
    autocast for 'cuda', compiled and Triton kernels (`TORCHDYNAMO_DISABLE=1`).
  * C++ sees CPU tensors: `isinstance(t, torch.FloatTensor)` is true on the device too; mixing
    is not noticed inside one composite C++ call, and gradients that
    C++ makes out of nothing have no place until they meet another tensor.

`install()` works on this thread and on every thread started later. There is no uninstalling: use a
process of its own (`tests.rank_pool`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.cuda
import torch.cuda.memory
import torch.cuda.random
import torch.cuda.streams

from tests import emulated_device, emulated_nccl, emulated_streams, emulated_tensor
from tests.emulated_memory import (
    REGISTRY,
    Counter,
    Place,
    max_pinned_memory_allocated,
    pinned_memory_allocated,
    reset_peak_pinned_memory,
)

__all__ = [
    "TOTAL_MEMORY",
    "install",
    "is_installed",
    "max_pinned_memory_allocated",
    "pinned_memory_allocated",
    "reset_peak_pinned_memory",
]

TOTAL_MEMORY = 16 << 30

_GENERATOR = torch.Generator()


@dataclass(frozen=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` tells about the emulated device."""

    name: str = "Emulated CUDA device"
    major: int = 9
    minor: int = 0
    total_memory: int = TOTAL_MEMORY
    multi_processor_count: int = 132
    warp_size: int = 32
    is_integrated: bool = False


class _State:
    """Modes must stay referenced: torch keeps only the innermost one alive."""

    mode: emulated_device.DeviceMode | None = None


def is_installed() -> bool:
    """Return whether this process runs on the emulated device."""
    return _State.mode is not None


def install() -> None:
    """Replace this process's CUDA device by the emulated one. A second call does nothing.

    Raises:
        RuntimeError: if there is a real CUDA device, or if megatron.core was imported before (it
            binds functions of `torch.cuda` at import).
    """
    if is_installed():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("install the emulated CUDA device before importing megatron.core")
    if torch.cuda.is_available():
        raise RuntimeError("this process has a real CUDA device; hide it first")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _patch_device()
    _patch_memory()
    _patch_tensors()
    emulated_nccl.install()
    _enter_modes_in_new_threads()
    _State.mode = emulated_device.DeviceMode(_GENERATOR)
    _State.mode.__enter__()  # type: ignore[no-untyped-call]


def patch(owner: Any, name: str, value: Any) -> None:
    """Set `owner.name`, which must exist: a name that torch dropped must not pass unnoticed."""
    if not hasattr(owner, name):
        raise AttributeError(f"{owner!r} has no {name!r} to emulate; read torch's release notes")
    setattr(owner, name, value)


def _patch_cuda(name: str, value: Any) -> None:
    """Set `torch.cuda.name` and the same name in the submodule that `torch.cuda` took it from."""
    original = getattr(torch.cuda, name)
    patch(torch.cuda, name, value)
    for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        if getattr(module, name, None) is original:
            setattr(module, name, value)


# ------------------------------------------------------------------------------------ the device


def _device_count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _set_device(device: Any) -> None:
    index = torch.cuda._utils._get_device_index(device, optional=True)
    if index >= _device_count():
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    if index >= 0:
        emulated_device.set_index(index)


def _exchange_device(index: int) -> int:
    previous = emulated_device.current_index()
    if index >= 0:
        emulated_device.set_index(index)
    return previous if index >= 0 else -1


def _get_device_properties(device: Any = None) -> DeviceProperties:
    return DeviceProperties()


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: the work that this would wait for, free or trace does not exist."""


class _Generators:
    """`torch.cuda.default_generators`: one process has one device, whatever its index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return _GENERATOR

    def __len__(self) -> int:
        return _device_count()


class _CudaRuntime:
    """The few functions of the CUDA runtime that `torch.cuda.cudart()` is used for."""

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        """Count a host range as pinned; returns cudaErrorHostMemoryAlreadyRegistered twice."""
        if pointer in self._registered:
            return 712
        self._registered[pointer] = nbytes
        REGISTRY.counters[Place.PINNED].change(nbytes, 1)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        """Undo `cudaHostRegister`; returns cudaErrorHostMemoryNotRegistered if there was none."""
        nbytes = self._registered.pop(pointer, None)
        if nbytes is None:
            return 713
        REGISTRY.counters[Place.PINNED].change(-nbytes, -1)
        return 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        """Return free and total bytes."""
        return _mem_get_info()

    cudaProfilerStart = cudaProfilerStop = staticmethod(lambda: 0)


_RUNTIME = _CudaRuntime()


def _patch_device() -> None:
    # With these two `_lazy_init` returns at once, also when C++ calls it. There is no driver whose
    # state a fork could lose.
    patch(torch.cuda, "_initialized", True)
    patch(torch.cuda, "_is_in_bad_fork", lambda: False)
    for name, value in {
        "is_available": lambda: True,
        "device_count": _device_count,
        "current_device": emulated_device.current_index,
        "set_device": _set_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "get_device_properties": _get_device_properties,
        "default_generators": _Generators(),
        "cudart": lambda: _RUNTIME,
        "synchronize": _nothing,
        "ipc_collect": _nothing,
        "_sleep": lambda cycles: time.sleep(cycles / 2e9),
        "is_current_stream_capturing": lambda: False,
        "Stream": emulated_streams.Stream,
        "Event": emulated_streams.Event,
        "current_stream": emulated_streams.current_stream,
        "default_stream": emulated_streams.default_stream,
        "set_stream": emulated_streams.set_stream,
    }.items():
        _patch_cuda(name, value)
    for name, value in {
        "range_push": lambda message: 0,
        "range_pop": lambda: 0,
        "range_start": lambda message: 0,
        "range_end": _nothing,
        "mark": _nothing,
    }.items():
        patch(torch.cuda.nvtx, name, value)


# ------------------------------------------------------------------------------------ the memory


def _as_statistic(current: int, peak: int, allocated: int, freed: int) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": allocated, "freed": freed}


def _bytes_of(counter: Counter) -> dict[str, int]:
    return _as_statistic(
        counter.nbytes,
        counter.peak_nbytes,
        counter.total_allocated_nbytes,
        counter.total_freed_nbytes,
    )


def _blocks_of(counter: Counter) -> dict[str, int]:
    return _as_statistic(
        counter.num_storages,
        counter.peak_num_storages,
        counter.total_allocated_storages,
        counter.total_allocated_storages - counter.num_storages,
    )


def _device_statistics(device: Any = None) -> dict[str, Any]:
    """What `torch.cuda.memory_stats` flattens. Nothing is cached: reserved equals allocated."""
    counter = REGISTRY.counters[Place.DEVICE]
    nothing = _as_statistic(0, 0, 0, 0)
    statistics: dict[str, Any] = {"num_alloc_retries": 0, "num_ooms": 0, "max_split_size": -1}
    for names, value in (
        ("allocated_bytes reserved_bytes active_bytes requested_bytes", _bytes_of(counter)),
        ("allocation segment active", _blocks_of(counter)),
        ("inactive_split inactive_split_bytes", nothing),
    ):
        for name in names.split():
            statistics[name] = {"all": value, "large_pool": value, "small_pool": nothing}
    oversize = {"oversize_allocations": nothing, "oversize_segments": nothing}
    return {**statistics, **oversize}


def _host_statistics() -> dict[str, Any]:
    """What `torch.cuda.host_memory_stats` flattens: pinned host memory."""
    counter = REGISTRY.counters[Place.PINNED]
    nbytes, blocks = _bytes_of(counter), _blocks_of(counter)
    return {
        "allocated_bytes": nbytes,
        "active_bytes": nbytes,
        "allocations": blocks,
        "active_requests": blocks,
    }


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    return TOTAL_MEMORY - REGISTRY.counters[Place.DEVICE].nbytes, TOTAL_MEMORY


def _reset_peak(device: Any = None) -> None:
    REGISTRY.counters[Place.DEVICE].reset_peak()


def _patch_memory() -> None:
    for name, value in {
        "memory_stats_as_nested_dict": _device_statistics,
        "host_memory_stats_as_nested_dict": _host_statistics,
        "reset_peak_memory_stats": _reset_peak,
        "reset_peak_host_memory_stats": reset_peak_pinned_memory,
        "mem_get_info": _mem_get_info,
        "empty_cache": _nothing,
        "memory_snapshot": lambda *_, **__: [],
    }.items():
        _patch_cuda(name, value)


# ----------------------------------------------------------------------------------- the tensors


class _LegacyTensorType(type):
    """`torch.cuda.FloatTensor` and its kin: constructors, and classes for `isinstance`."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype
        )

    def __call__(cls, *args: Any) -> torch.Tensor:
        host_type = getattr(torch, cls.__name__)
        made: torch.Tensor = host_type(*args).to("cuda")
        return made


def _patch_tensors() -> None:
    for name, dtype in emulated_tensor.DTYPE_OF_TYPE_NAME.items():
        legacy = _LegacyTensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        patch(torch.cuda, name, legacy)
    for name, value in emulated_tensor.TENSOR_PATCHES.items():
        patch(torch.Tensor, name, value)
    for name, value in emulated_tensor.STORAGE_PATCHES.items():
        patch(torch.UntypedStorage, name, value)
    patch(torch, "tensor", emulated_tensor.make_tensor(torch.tensor))
    patch(torch, "as_tensor", emulated_tensor.make_as_tensor(torch.as_tensor))


def _enter_modes_in_new_threads() -> None:
    """Dispatch modes belong to a thread, a device to the process."""
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def _bootstrap_inner(self: threading.Thread) -> None:
        with emulated_device.DeviceMode(_GENERATOR):
            bootstrap(self)

    patch(threading.Thread, "_bootstrap_inner", _bootstrap_inner)
