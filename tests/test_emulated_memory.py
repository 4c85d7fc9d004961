"""Bytes on the emulated device and in pinned host memory are counted exactly.

Like `test_emulated_cuda`, each claim runs inside a rank. Counters that return zero prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import emulated_cuda
from tests.rank_pool import RankPool

KIB = 1024

# For what torch's stubs leave out or leave untyped.
_cuda: Any = torch.cuda


def device_counters_are_exact() -> None:
    start = torch.cuda.memory_allocated()
    tensor = torch.empty(KIB, device="cuda")
    view = tensor[10:]
    del tensor
    assert torch.cuda.memory_allocated() - start == 4 * KIB
    storage = view.untyped_storage()
    storage.resize_(0)
    assert torch.cuda.memory_allocated() == start
    storage.resize_(4 * KIB)
    assert torch.cuda.memory_allocated() - start == 4 * KIB
    assert view.is_cuda
    del view, storage
    assert torch.cuda.memory_allocated() == start
    host = torch.empty(KIB)
    assert torch.cuda.memory_allocated() == start
    del host


def peak_is_exact() -> None:
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one = torch.empty(KIB, dtype=torch.uint8, device="cuda")
    two = one + one
    del one
    three = two.float()  # 1 KiB and 4 KiB live
    del two
    assert torch.cuda.max_memory_allocated() - start == 5 * KIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() - start == 4 * KIB
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated()
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == start + 4 * KIB
    assert torch.cuda.mem_get_info() == (
        emulated_cuda.TOTAL_MEMORY - start - 4 * KIB,
        emulated_cuda.TOTAL_MEMORY,
    )
    assert "Allocated memory" in torch.cuda.memory_summary()
    del three


def autograd_holds_memory_until_backward() -> None:
    weight = torch.nn.Parameter(torch.ones(KIB, device="cuda"))
    start = torch.cuda.memory_allocated()
    loss = (weight * 2).exp().sum()
    assert torch.cuda.memory_allocated() - start == 4 * KIB + 4  # exp's output, and the loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.cuda.memory_allocated() - start == 4 * KIB + 4  # now the gradient
    weight.grad = None
    assert torch.cuda.memory_allocated() - start == 4


def moving_to_host_frees_the_device() -> None:
    start = torch.cuda.memory_allocated()
    tensor = torch.zeros(KIB, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    tensor.data = tensor.data.cpu()
    assert torch.cuda.memory_allocated() == start
    assert torch.cuda.max_memory_allocated() - start == 4 * KIB  # the host copy is not counted
    assert tensor.tolist() == [0.0] * KIB


def pinned_memory_is_told_apart_and_counted() -> None:
    start = emulated_cuda.pinned_memory_allocated()
    emulated_cuda.reset_peak_pinned_memory()
    pinned = [
        torch.empty(KIB, dtype=torch.uint8, pin_memory=True),
        torch.zeros(KIB, dtype=torch.uint8).pin_memory(),
        torch.tensor([1] * KIB, dtype=torch.uint8, pin_memory=True),
    ]
    assert all(tensor.is_pinned() and not tensor.is_cuda for tensor in pinned)
    assert pinned[0][5:].is_pinned()
    assert pinned[0].pin_memory() is pinned[0]
    assert not torch.zeros(3).is_pinned()
    assert not pinned[0].clone().is_pinned()
    assert emulated_cuda.pinned_memory_allocated() - start == 3 * KIB
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - start == 3 * KIB
    del pinned
    assert emulated_cuda.pinned_memory_allocated() == start
    assert emulated_cuda.max_pinned_memory_allocated() - start == 3 * KIB
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.zeros(3, device="cuda").pin_memory()


def registered_host_memory_is_counted() -> None:
    start = emulated_cuda.pinned_memory_allocated()
    tensor, runtime = torch.zeros(KIB), _cuda.cudart()
    assert runtime.cudaHostRegister(tensor.data_ptr(), 4 * KIB, 0) == 0
    assert emulated_cuda.pinned_memory_allocated() - start == 4 * KIB
    assert runtime.cudaHostUnregister(tensor.data_ptr()) == 0
    assert runtime.cudaHostUnregister(tensor.data_ptr()) != 0
    assert emulated_cuda.pinned_memory_allocated() == start


@pytest.mark.parametrize(
    "claim",
    [
        device_counters_are_exact,
        peak_is_exact,
        autograd_holds_memory_until_backward,
        moving_to_host_frees_the_device,
        pinned_memory_is_told_apart_and_counted,
        registered_host_memory_is_counted,
    ],
)
def test_emulated_memory(claim: Callable[[], None], ranks: RankPool) -> None:
    """Each claim holds in a rank of its own."""
    ranks.run(claim)
