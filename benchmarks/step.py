"""One optimizer step on a GPU: seconds, peak device memory, and a hash of the weights after it.

    python benchmarks/step.py {stock,streamed} [--optimizer adam|muon] [--directory DIR]
        [--keep-cache] [--host-gb N] [--device-gb N] [--ahead-gb N] [--moment-dtype D]
        [--main-storage S] [--io I] [--chunk-mb N] [--engine E] [--steps 3] [--warmup 0]
        [--back-to-back] [--forward-backward-ms N | --forward-backward-io FACTOR]
        [--memory-cap-gb N] [--save] [--limits disk,copies] [--limits-between] [--timeline FILE]

The model is a stack of square matrices under Megatron's DistributedDataParallel and distributed
optimizer, world size 1 or what the environment of `torchrun` says: gradients are random, so that
what is measured is the step. Prints one JSON line. Run one variant a process; compare lines of one
machine and one day.

By default a step follows when the one before is written to the last byte and the page cache has
been dropped. ``--back-to-back``: steps follow at once, on the gradients of the first, and the
time of all is taken until the last byte is written. With a forward and backward time the device
is busy with matrix products between steps, for so many milliseconds, or for FACTOR times what the
disk needs for the bytes of a step. ``--limits`` measures what disk and PCIe can do right before and
right after the steps that count. A disk may be much faster one minute than the next: with
``--limits-between`` the limits are measured before each of these steps, too, when nothing moves,
and each step is compared with its own. A step's time then goes on until all that it began has
ended, writes and reads of the next step, if there is no forward and backward for that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import memory, workload
from benchmarks.measurement import Run
from benchmarks.raw_disk import CHUNK_BYTES, DiskProbe


def budget(text: str) -> float | str:
    """Parse a number of gigabytes, or ``auto``."""
    return text if text == "auto" else float(text)


def parsed_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variant", choices=["stock", "streamed"])
    parser.add_argument("--optimizer", choices=["adam", "muon"], default="adam")
    parser.add_argument("--directory", default="/tmp/step-benchmark")
    parser.add_argument("--bucket-numel", type=int, default=200_000_000)
    parser.add_argument("--matrices", type=int, default=32)
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep-cache", action="store_true", help="leave the page cache warm")
    for name in ("host", "device"):
        parser.add_argument(f"--{name}-gb", type=budget, help=f"of the {name} tier, or auto")
    parser.add_argument("--ahead-gb", type=float, help="pinned for reads ahead and writes behind")
    parser.add_argument("--moment-dtype", choices=["fp32", "bf16", "fp16", "fp8e4m3", "fp8e5m2"])
    parser.add_argument("--main-storage", choices=["fp32", "split"])
    parser.add_argument("--io", choices=["auto", "direct", "buffered"])
    parser.add_argument("--chunk-mb", type=int)
    parser.add_argument("--engine", choices=["threads", "sync"])
    parser.add_argument("--warmup", type=int, default=0, help="steps before those that count")
    parser.add_argument("--back-to-back", action="store_true")
    parser.add_argument("--forward-backward-ms", type=float)
    parser.add_argument("--forward-backward-io", type=float, metavar="FACTOR")
    parser.add_argument("--memory-cap-gb", type=float, help="in a memory cgroup; as root")
    parser.add_argument("--save", action="store_true", help="save and load when all is measured")
    parser.add_argument("--limits", default="", help="disk, copies or both, by commas")
    parser.add_argument("--limits-between", action="store_true", help="before each step, too")
    parser.add_argument("--limit-gb", type=float, default=8.0, help="of files to measure with")
    parser.add_argument("--limit-threads", type=int, default=8)
    parser.add_argument("--limit-seconds", type=float, default=3.0)
    parser.add_argument("--timeline", type=Path, help="of one more step, as JSON")
    args = parser.parse_args()
    args.is_overlapped = bool(args.forward_backward_ms or args.forward_backward_io)
    args.back_to_back |= args.is_overlapped
    if args.forward_backward_io and not (args.warmup and "disk" in args.limits):
        parser.error("--forward-backward-io needs --warmup and --limits disk to know the time")
    return args


def main() -> None:
    """Run one variant."""
    args = parsed_arguments()
    with ExitStack() as stack:
        cap = args.memory_cap_gb
        group = stack.enter_context(memory.memory_group(int(cap * 1e9)) if cap else nullcontext())
        rank = workload.start_process_group()
        probe = None
        if "disk" in args.limits.split(",") and rank == 0:
            directories = [Path(each) for each in args.directory.split(",")]
            for each in directories:
                each.mkdir(parents=True, exist_ok=True)
            chunk = args.chunk_mb << 20 if args.chunk_mb else CHUNK_BYTES
            probe = stack.enter_context(
                DiskProbe(directories, int(args.limit_gb * 1e9), args.limit_threads, chunk)
            )
        run = Run(args, group)
        run.construct()
        run.measure(probe)
        if args.save and run.stores:
            run.save_and_load()
            run.note_weights()
        if args.timeline and run.stores:
            run.timeline(args.timeline)
        run.finish()
        run.result["rank"] = rank
        run.result["step_median_s"] = round(statistics.median(run.result["step_s"]), 4)
        print(json.dumps(run.result), flush=True)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
