"""What the step benchmark trains: a stack of matrices, random gradients, matmuls in between."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch


def start_process_group() -> int:
    """Start NCCL with the ranks that the environment tells of, else alone; return the rank."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    rank = int(os.environ.get("RANK", "0"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group(
        "nccl", rank=rank, world_size=int(os.environ.get("WORLD_SIZE", "1"))
    )
    return rank


def make_model(optimizer: str, matrices: int, side: int) -> Any:
    """Return square matrices under Megatron's DistributedDataParallel.

    For Muon a vector joins them, or the Adam beside it would have nothing.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MegatronModule, TransformerConfig
    from megatron.training.training import wrap_model_chunks_with_ddp

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    transformer = TransformerConfig(
        num_layers=1, hidden_size=side, num_attention_heads=1, bf16=True
    )
    is_muon = optimizer == "muon"

    class Stack(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config=transformer)
            shapes = [(side, side)] * matrices + [(side,)] * is_muon
            self.stack = torch.nn.ParameterList(
                torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02)
                for shape in shapes
            )

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    models = wrap_model_chunks_with_ddp(
        [Stack()], transformer, ddp, use_layer_wise_distributed_optimizer=is_muon
    )
    return models[0]


def make_optimizer(optimizer: str, model: Any, streaming: dict[str, Any]) -> Any:
    """Return Megatron's optimizer; ``streaming`` are fields of its config."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_muon = optimizer == "muon"
    config = OptimizerConfig(
        optimizer=optimizer,
        bf16=True,
        lr=1e-3,
        use_distributed_optimizer=not is_muon,
        use_layer_wise_distributed_optimizer=is_muon,
        **streaming,
    )
    return get_megatron_optimizer(config, [model])


def inner_names(optimizer: Any) -> Iterator[str]:
    """Yield the classes of torch's kind that do the arithmetic, however deeply chained."""
    if hasattr(optimizer, "chained_optimizers"):
        for each in optimizer.chained_optimizers:
            yield from inner_names(each)
    else:
        inner = optimizer.optimizer
        yield type(getattr(inner, "master", inner)).__name__


def buffer_bytes(model: Any) -> int:
    """Return the bytes of params and gradients."""
    tensors = [t for buffer in model.buffers for t in (buffer.param_data, buffer.grad_data)]
    held: int = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if any(buffer.param_data is None for buffer in model.buffers):
        held += sum(param.nbytes for param in model.parameters())
    return held


def fill_gradients(model: Any, generator: torch.Generator) -> None:
    """Draw new gradients."""
    for buffer in model.buffers:
        buffer.grad_data.normal_(generator=generator).mul_(1e-3)


def weights_digest(model: Any) -> str:
    """Return a hash of all params."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


class Matmuls:
    """Keeps the device busy, in place of a forward and a backward pass.

    Args:
        side: of the square matrices, BF16.
    """

    _IN_A_BATCH = 8

    def __init__(self, side: int) -> None:
        self._factors = [
            torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        ]
        self._product = torch.empty_like(self._factors[0])

    @property
    def nbytes(self) -> int:
        """What it holds on the device."""
        return 3 * self._product.nbytes

    def run(self, seconds: float) -> None:
        """Multiply for about so long. Two batches are under way at a time, so it is never idle."""
        end = time.monotonic() + seconds
        marks: list[torch.cuda.Event] = []
        while time.monotonic() < end:
            for _ in range(self._IN_A_BATCH):
                torch.mm(*self._factors, out=self._product)
            marks.append(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
            marks[-1].record()
            if len(marks) > 1:
                marks.pop(0).synchronize()
        torch.cuda.current_stream().synchronize()
