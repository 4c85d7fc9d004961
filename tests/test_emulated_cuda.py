"""What the emulated device does, each claim checked inside a rank.

pytest's own process stays without the double: a test passes a function to a rank, whose assertions
come back as `RanksFailed`.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import emulated_cuda
from tests.rank_pool import RankPool

KIB = 1024

# For what torch's stubs leave out or leave untyped.
_cuda: Any = torch.cuda


def test_pytest_process_is_not_emulated(ranks: RankPool) -> None:
    """The double lives in ranks only."""
    assert not emulated_cuda.is_installed()
    assert not hasattr(torch.Tensor.cpu, "__wrapped__")
    assert ranks.run(emulated_cuda.is_installed) == [True]


# ------------------------------------------------------------------------------ device identity


def identity_follows_the_storage() -> None:
    tensor = torch.zeros(4, 4, device="cuda")
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert tensor.device == torch.device("cuda", 0)
    assert tensor.get_device() == 0
    assert tensor.type() == "torch.cuda.FloatTensor"
    views = [tensor[1:], tensor.view(-1), tensor.t(), tensor.detach(), tensor.data]
    assert all(view.is_cuda for view in views)
    assert torch.nn.Parameter(tensor).is_cuda
    assert tensor.untyped_storage().device.type == "cuda"
    assert copy.deepcopy(tensor).is_cuda
    assert pickle.loads(pickle.dumps(tensor)).is_cuda
    assert not torch.zeros(4).is_cuda


def data_assignment_moves_identity() -> None:
    param = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    param.data = param.data.cpu()
    assert not param.is_cuda
    param.data = param.data.cuda()
    assert param.is_cuda


def every_way_of_making_reports_its_device() -> None:
    on_device = [
        torch.empty(2, device="cuda"),
        torch.ones(2, device="cuda:0"),
        torch.full((2,), 1.0, device=torch.cuda.current_device()),
        torch.arange(2, device=torch.device("cuda")),
        torch.tensor([1.0, 2.0], device="cuda"),
        torch.as_tensor([1.0, 2.0], device="cuda"),
        _cuda.FloatTensor([1.0, 2.0]),
        torch.zeros(2).type(_cuda.HalfTensor),
        torch.zeros(2).to("cuda", torch.bfloat16),
        torch.zeros(2).to(torch.zeros(1, device="cuda")),
    ]
    like = on_device[0]
    on_device += [like.new_zeros(2), like.new_tensor([1.0]), torch.zeros_like(like), like.half()]
    on_device += [torch.nn.functional.one_hot(on_device[3], 2), like + 1, like * torch.tensor(2.0)]
    assert [tensor.device.type for tensor in on_device] == ["cuda"] * len(on_device)
    on_host = [torch.empty_like(like, device="cpu"), like.cpu(), torch.zeros(2), torch.eye(2)]
    assert [tensor.device.type for tensor in on_host] == ["cpu"] * len(on_host)
    assert torch.empty(2, device="meta").device.type == "meta"
    assert isinstance(like, _cuda.FloatTensor)
    assert not isinstance(on_host[0], _cuda.FloatTensor)


class _TwoOutputs(torch.autograd.Function):
    """Its backward gets a zero gradient that the engine makes for the unused output."""

    places: list[str]

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return left * 2, right * 3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch = torch.ones(3, device="cuda")
        _TwoOutputs.places = [each.device.type for each in (*grads, scratch)]
        return grads[0] * scratch, grads[1] * scratch


def gradients_are_where_their_tensors_are() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 3, device="cuda"))
    host_weight = torch.nn.Parameter(torch.randn(3, 3))
    torch.nn.functional.softmax(weight @ host_weight.cuda(), -1)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert host_weight.grad is not None
    assert weight.grad.is_cuda
    assert not host_weight.grad.is_cuda
    left, right = (torch.nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2))
    two_outputs: Any = _TwoOutputs
    two_outputs.apply(left, right)[0].sum().backward()
    assert _TwoOutputs.places == ["cuda"] * 3
    assert left.grad is not None
    assert right.grad is not None
    assert left.grad.is_cuda
    assert right.grad.is_cuda


def threads_have_the_device() -> None:
    seen: list[str] = []

    def work() -> None:
        tensor = torch.ones(3, device="cuda") * 2
        seen.extend([tensor.device.type, tensor.cpu().device.type])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["cuda", "cpu"]


def saved_tensors_keep_their_place() -> None:
    file = io.BytesIO()
    torch.save(torch.arange(3.0, device="cuda"), file)
    file.seek(0)
    assert torch.load(file).is_cuda
    file.seek(0)
    assert not torch.load(file, map_location="cpu").is_cuda


# ------------------------------------------------------------------------- copies and mixing


def moving_copies_and_staying_aliases() -> None:
    host = torch.zeros(4)
    device = host.cuda()
    host.fill_(1)
    assert device.tolist() == [0.0] * 4
    back = device.cpu()
    device.fill_(2)
    assert back.tolist() == [0.0] * 4
    there = torch.empty(4, device="cuda").copy_(host)
    host.fill_(3)
    assert there.tolist() == [1.0] * 4
    assert device.cuda() is device
    assert device.to("cuda") is device
    assert host.cpu() is host
    assert device.to("cuda", copy=True).data_ptr() != device.data_ptr()


def modules_move() -> None:
    module = torch.nn.Linear(2, 2)
    before = module.weight.data_ptr()
    assert module.cuda().weight.is_cuda
    assert module.weight.data_ptr() != before
    assert module(torch.ones(2, device="cuda")).is_cuda
    assert not module.to("cpu").weight.is_cuda


def mixing_places_is_refused() -> None:
    device, host = torch.zeros(3, device="cuda"), torch.zeros(3)
    for mix in (
        lambda: device + host,
        lambda: host.add_(device),
        lambda: torch.cat([device, host]),
        lambda: device @ host,
        lambda: torch._foreach_add_([device], [host]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix()
    assert (device + torch.tensor(1.0)).is_cuda  # scalars may mix
    assert device[torch.tensor([0])].is_cuda  # host indices may
    host.copy_(device)
    assert not host.is_cuda


def numpy_refuses_device_tensors() -> None:
    tensor = torch.zeros(3, device="cuda")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        tensor.numpy()
    with pytest.raises(TypeError, match="can't convert"):
        np.asarray(tensor)
    assert tensor.cpu().numpy().shape == (3,)


# --------------------------------------------------------------- streams, randomness, torch.cuda


def streams_and_events_answer_as_cuda_does() -> None:
    stream, outer = _cuda.Stream(), torch.cuda.current_stream()
    start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        start.record()
        time.sleep(0.02)
        end.record(stream)
    assert torch.cuda.current_stream() == outer == torch.cuda.default_stream()
    stream.wait_event(end)
    stream.wait_stream(outer)
    outer.record_event().synchronize()
    torch.zeros(3, device="cuda").record_stream(stream)
    assert stream.query()
    assert end.query()
    assert 20 <= start.elapsed_time(end) < 2000
    with pytest.raises(ValueError, match="enable_timing"):
        _cuda.Event().elapsed_time(end)


def device_randomness_is_its_own() -> None:
    torch.manual_seed(1)
    host = torch.rand(3)
    torch.manual_seed(1)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert torch.equal(torch.rand(3), host)  # the device drew nothing from the host's numbers
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.cuda.manual_seed(7)
    dropped = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device="cuda")), dropped)


def device_is_described() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.get_device_properties(0).total_memory == emulated_cuda.TOTAL_MEMORY
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.device(0), torch.cuda.nvtx.range("nothing"):
        assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.cuda.set_device(1)


def install_comes_before_megatron() -> None:
    emulated_cuda._State.mode = None  # as if it had not been installed
    with pytest.raises(RuntimeError, match="before importing megatron"):
        emulated_cuda.install()


@pytest.mark.parametrize(
    "claim",
    [
        identity_follows_the_storage,
        data_assignment_moves_identity,
        every_way_of_making_reports_its_device,
        gradients_are_where_their_tensors_are,
        threads_have_the_device,
        saved_tensors_keep_their_place,
        moving_copies_and_staying_aliases,
        modules_move,
        mixing_places_is_refused,
        numpy_refuses_device_tensors,
        streams_and_events_answer_as_cuda_does,
        device_randomness_is_its_own,
        device_is_described,
        install_comes_before_megatron,
    ],
)
def test_emulated_device(claim: Callable[[], None], ranks: RankPool) -> None:
    """Each claim holds in a rank of its own."""
    ranks.run(claim)


# ---------------------------------------------------------------------------------------- nccl


def collectives_on_nccl() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    assert dist.get_backend() == "nccl"
    assert torch.zeros(1, device="cuda").device == torch.device("cuda", rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.full((4,), rank + 1.0, dtype=dtype, device="cuda")
        shard = torch.empty(2, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(shard, tensor, op=dist.ReduceOp.AVG)
        assert shard.tolist() == [1.5, 1.5]
        whole = torch.empty(8, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(whole, tensor)
        assert whole.tolist() == [1.0] * 4 + [2.0] * 4
    parts = [torch.empty(size, device="cuda") for size in (1, 2)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank), device="cuda"))
    assert [part.tolist() for part in parts] == [[0.0], [1.0, 1.0]]
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    gloo = dist.new_group(backend="gloo")
    assert dist.get_backend(gloo) == "gloo"
    dist.all_reduce(torch.ones(1), group=gloo)


def test_nccl_groups_reduce_gather_and_refuse_host_tensors(ranks: RankPool) -> None:
    """Gloo under the name of nccl does what Megatron asks, and keeps NCCL's rule on devices."""
    ranks.run(collectives_on_nccl, world_size=2)
