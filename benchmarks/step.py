"""Time and device memory of an optimizer step, stock or streamed, on a real GPU.

    python benchmarks/step.py stock
    python benchmarks/step.py streamed --directory /local/nvme [--bucket-numel N] [--keep-cache]

The model is a stack of square matrices under Megatron's DistributedDataParallel and distributed
optimizer, world size 1: no forward or backward, gradients are random, so that what is measured is
the step. Prints one JSON line. Run one variant a process; compare lines of one machine and one day.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch


def build(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return model, optimizer and config of a run."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MegatronModule, TransformerConfig

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    transformer = TransformerConfig(
        num_layers=1, hidden_size=args.side, num_attention_heads=1, bf16=True
    )

    class Stack(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config=transformer)
            self.matrices = torch.nn.ParameterList(
                torch.nn.Parameter(
                    torch.randn(args.side, args.side, device="cuda", dtype=torch.bfloat16) * 0.02
                )
                for _ in range(args.matrices)
            )

    module = Stack()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(transformer, ddp, module)
    streaming: dict[str, Any] = {}
    if args.variant == "streamed":
        streaming = {
            "stream_optimizer_state_to_disk": True,
            "stream_optimizer_state_dir": args.directory,
            "stream_optimizer_state_bucket_numel": args.bucket_numel,
            "defer_main_param_initialization": True,
        }
    config = OptimizerConfig(
        optimizer="adam", bf16=True, lr=1e-3, use_distributed_optimizer=True, **streaming
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    optimizer = get_megatron_optimizer(config, [model])
    torch.cuda.synchronize()
    return model, optimizer, time.monotonic() - start


def page_cache_bytes() -> int:
    """Return what the page cache of this machine holds."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["Cached"].split()[0]) * 1024


def main() -> None:
    """Run one variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variant", choices=["stock", "streamed"])
    parser.add_argument("--directory", default="/tmp/step-benchmark")
    parser.add_argument("--bucket-numel", type=int, default=200_000_000)
    parser.add_argument("--matrices", type=int, default=32)
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep-cache", action="store_true", help="leave the page cache warm")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    model, optimizer, init_s = build(args)
    init_peak = torch.cuda.max_memory_allocated()
    generator = torch.Generator("cuda").manual_seed(0)
    steps, peaks = [], []
    for _ in range(args.steps):
        for buffer in model.buffers:
            buffer.grad_data.normal_(generator=generator).mul_(1e-3)
        if not args.keep_cache:
            # Numbers out of the page cache say nothing about a disk.
            subprocess.run(["sync"], check=True)
            Path("/proc/sys/vm/drop_caches").write_text("1")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        optimizer.step()
        torch.cuda.synchronize()
        steps.append(round(time.monotonic() - start, 3))
        peaks.append(torch.cuda.max_memory_allocated())
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().view(torch.int16).numpy().tobytes())
    result = {
        "variant": args.variant,
        "params": sum(param.numel() for param in model.parameters()),
        "inner": type(optimizer.optimizer).__name__,
        "init_s": round(init_s, 2),
        "init_peak_gb": round(init_peak / 1e9, 2),
        "step_s": steps,
        "step_peak_gb": round(max(peaks) / 1e9, 2),
        "between_steps_gb": round(torch.cuda.memory_allocated() / 1e9, 2),
        "page_cache_gb": round(page_cache_bytes() / 1e9, 2),
        "weights_sha256": digest.hexdigest()[:16],
    }
    if args.variant == "streamed":
        store = optimizer._nvme_state_store
        moved = store.counters
        result |= {
            "disk_gb": round(store.layout.nbytes / 1e9, 2),
            "buckets": len(store.layout.buckets),
            "read_gb": round(moved.bytes_read / 1e9, 2),
            "wrote_gb": round(moved.bytes_written / 1e9, 2),
            "read_s": round(moved.read_seconds, 2),
            "write_s": round(moved.write_seconds, 2),
        }
        store.close()
    print(json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
