"""Time and memory of an optimizer step, stock or streamed, on a real GPU.

    python benchmarks/step.py stock [--optimizer adam|muon]
    python benchmarks/step.py streamed --directory /local/nvme [--bucket-numel N] [--keep-cache]

The model is a stack of square matrices under Megatron's DistributedDataParallel and distributed
optimizer, world size 1: no forward or backward, gradients are random, so that what is measured is
the step. For Muon a vector joins them, or the Adam beside it would have nothing. Prints one JSON
line. Run one variant a process; compare lines of one machine and one day.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def build(args: argparse.Namespace) -> tuple[Any, Any, float]:
    """Return model, optimizer and the seconds that it took to construct."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MegatronModule, TransformerConfig
    from megatron.training.training import wrap_model_chunks_with_ddp

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    transformer = TransformerConfig(
        num_layers=1, hidden_size=args.side, num_attention_heads=1, bf16=True
    )
    is_muon = args.optimizer == "muon"

    class Stack(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config=transformer)
            shapes = [(args.side, args.side)] * args.matrices + [(args.side,)] * is_muon
            self.stack = torch.nn.ParameterList(
                torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02)
                for shape in shapes
            )

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    models = wrap_model_chunks_with_ddp(
        [Stack()], transformer, ddp, use_layer_wise_distributed_optimizer=is_muon
    )
    streaming: dict[str, Any] = {}
    if args.variant == "streamed":
        streaming = {
            "stream_optimizer_state_to_disk": True,
            "stream_optimizer_state_dir": args.directory,
            "stream_optimizer_state_bucket_numel": args.bucket_numel,
            "defer_main_param_initialization": True,
        }
    config = OptimizerConfig(
        optimizer=args.optimizer,
        bf16=True,
        lr=1e-3,
        use_distributed_optimizer=not is_muon,
        use_layer_wise_distributed_optimizer=is_muon,
        **streaming,
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    optimizer = get_megatron_optimizer(config, models)
    torch.cuda.synchronize()
    return models[0], optimizer, time.monotonic() - start


def inner_names(optimizer: Any) -> Iterator[str]:
    """Yield the classes of torch's kind that do the arithmetic, however deeply chained."""
    if hasattr(optimizer, "chained_optimizers"):
        for each in optimizer.chained_optimizers:
            yield from inner_names(each)
    else:
        inner = optimizer.optimizer
        yield type(getattr(inner, "master", inner)).__name__


def kibibyte_rows(path: str) -> dict[str, int]:
    """Return the rows `NAME: NUMBER kB` of a file in /proc, in bytes."""
    rows = (line.split() for line in Path(path).read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def memory_stat() -> Path | None:
    """Return `memory.stat` of this process's cgroup, of version 1 or 2, if there is one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("memory", ""):
            mount = Path("/sys/fs/cgroup", controllers)
            for directory in (mount / group.lstrip("/"), mount):  # a container may see but the last
                if (directory / "memory.stat").exists():
                    return directory / "memory.stat"
    return None


def host_memory() -> tuple[int, int, str]:
    """Return the bytes of anonymous memory and of page cache, and where these numbers are from."""
    stat = memory_stat()
    if stat is None:
        anonymous = kibibyte_rows("/proc/self/status")["RssAnon"]
        cached = kibibyte_rows("/proc/meminfo")["Cached"]
        return anonymous, cached, "RssAnon of /proc/self/status, Cached of /proc/meminfo"
    rows = dict(line.split() for line in stat.read_text().splitlines())
    names = ("anon", "file") if "anon" in rows else ("total_rss", "total_cache")
    return int(rows[names[0]]), int(rows[names[1]]), f"{' and '.join(names)} of {stat}"


def main() -> None:
    """Run one variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variant", choices=["stock", "streamed"])
    parser.add_argument("--optimizer", choices=["adam", "muon"], default="adam")
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
    steps, peaks, host = [], [], []
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
        host.append(host_memory())
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().view(torch.int16).numpy().tobytes())
    result = {
        "variant": args.variant,
        "optimizer": args.optimizer,
        "params": sum(param.numel() for param in model.parameters()),
        "inner": list(inner_names(optimizer)),
        "init_s": round(init_s, 2),
        "init_peak_gb": round(init_peak / 1e9, 2),
        "step_s": steps,
        "step_peak_gb": round(max(peaks) / 1e9, 2),
        "between_steps_gb": round(torch.cuda.memory_allocated() / 1e9, 2),
        "host_anonymous_gb": round(max(each[0] for each in host) / 1e9, 2),
        "host_page_cache_gb": round(max(each[1] for each in host) / 1e9, 2),
        "host_source": host[-1][2],
        "weights_sha256": digest.hexdigest()[:16],
    }
    if args.variant == "streamed":
        stores = list(optimizer._stores())
        moved = [store.counters for store in stores]
        result |= {
            "disk_gb": round(sum(store.layout.nbytes for store in stores) / 1e9, 2),
            "buckets": [len(store.layout.buckets) for store in stores],
            "read_gb": round(sum(each.bytes_read for each in moved) / 1e9, 2),
            "wrote_gb": round(sum(each.bytes_written for each in moved) / 1e9, 2),
            "read_s": round(sum(each.read_seconds for each in moved), 2),
            "write_s": round(sum(each.write_seconds for each in moved), 2),
        }
        for store in stores:
            store.close()
    print(json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
