"""A mixture of experts on the GPUs of one host: stock beside streamed, in one command.

    python benchmarks/moe.py [--gpus 8] [--directory DIR] [--only VARIANT,...] [--steps 10]
        [--micro-batches 16] [--host-gb N] [--bucket-numel N] [--save] [--fill-gb N] [--out DIR]
        [-- any Megatron arguments]

Each variant is one process of `moe_rank.py` a GPU: Qwen3-30B-A3B's shape, experts spread over all
GPUs, the same tokens in all variants. All ranks share DIR. Before them, what the disk can do is
measured by itself. Results go to OUT/moe.json; a later call with other variants adds to them, and
the table shows all. To try it on fewer GPUs, give fewer layers: ``--gpus 2 -- --num-layers 4``.
With ``--gpus 2 -- --num-experts 32`` each of two GPUs has the experts, and the tokens for each of
them, that one of eight has; but half of the dense state, where one of eight has an eighth.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory import fill_beforehand
from benchmarks.moe_table import bars_table, disk_table, memory_table, time_table
from benchmarks.processes import NotRunError, machine, run_ranks
from benchmarks.raw_disk import DiskProbe

HERE = Path(__file__).resolve().parent
FLAG = "--stream-optimizer-state-"
FORMATS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": (f"{FLAG}moment-dtype", "bf16"),
    "split": (f"{FLAG}main-storage", "split"),
    "split-bf16": (f"{FLAG}main-storage", "split", f"{FLAG}moment-dtype", "bf16"),
}
TIERS = ("disk", "host")
STOCK = ("stock", "stock-again")
"""The second shows by how much two equal runs differ."""
VARIANTS = (*STOCK, *(f"{name}-{tier}" for tier in TIERS for name in FORMATS))


def streaming_flags(variant: str, args: argparse.Namespace) -> list[str]:
    """Return the flags of a variant; none for stock."""
    if variant in STOCK:
        return []
    formats, _, tier = variant.rpartition("-")
    flags = [f"{FLAG}to-disk", f"{FLAG}dir", str(args.directory / "state"), *FORMATS[formats]]
    if args.bucket_numel is not None:
        flags += [f"{FLAG}bucket-numel", str(args.bucket_numel)]
    if tier == "host":
        flags += [
            f"{FLAG}host-gb",
            "auto" if args.host_gb is None else f"{args.host_gb / args.gpus}",
        ]
    return flags


def commands(variant: str, args: argparse.Namespace) -> list[list[str]]:
    """Return the command line of each rank of a variant."""
    command = [sys.executable, "-W", "ignore", str(HERE / "moe_rank.py")]
    command += ["--steps", str(args.steps), "--micro-batches", str(args.micro_batches)]
    command += ["--save-to", str(args.directory / "checkpoint")] if args.save else []
    command += ["--", *args.megatron, *streaming_flags(variant, args)]
    return [command] * args.gpus


def measure_disk(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the directory's disk gives to plain threads."""
    with DiskProbe([args.directory], int(args.limit_gb * 1e9), args.limit_threads) as probe:
        return asdict(probe.measure(args.limit_seconds))


def run_variant(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a variant; return the results of its ranks, or why there are none."""
    start = time.monotonic()
    entry: dict[str, Any] = {"results": [], "not_run": None}
    try:
        entry["results"] = run_ranks(commands(variant, args), args.out / variant, args.timeout)
    except NotRunError as error:
        entry["not_run"] = str(error)
        print(f"{variant}: NOT RUN: {error}", file=sys.stderr)
    for left in ("checkpoint", "state"):
        shutil.rmtree(args.directory / left, ignore_errors=True)
    # Or the next one would find the disk busy with what this one left in the page cache.
    subprocess.run(["sync"], check=True)
    entry["wall_s"] = round(time.monotonic() - start, 1)
    print(f"{variant}: {entry['wall_s']} s", file=sys.stderr, flush=True)
    return entry


def report(known: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of everything that ran."""
    variants = known["variants"]
    ran = {name: variants[name]["results"] for name in VARIANTS if has_results(variants, name)}
    yield f"GB of each device; of all ranks the most\n\n{memory_table(ran)}"
    yield f"Seconds of a training step\n\n{time_table(ran)}"
    yield f"The disk that all ranks share, GB/s\n\n{disk_table(ran, known.get('disk'))}"
    yield f"Beside the published run (8 H200, BF16 moments)\n\n{bars_table(ran)}"
    for name in VARIANTS:
        if name in variants and not variants[name]["results"]:
            yield f"{name}: not run: {variants[name]['not_run']}"


def has_results(variants: Mapping[str, Any], name: str) -> bool:
    """Return whether a variant ran."""
    return name in variants and bool(variants[name]["results"])


def parsed_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/moe-benchmark"))
    parser.add_argument("--only", help=f"of {', '.join(VARIANTS)}; separated by commas")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=16, help="of each rank in a step")
    parser.add_argument("--host-gb", type=float, help="of all ranks; default: what is free")
    parser.add_argument("--bucket-numel", type=int, help="of all slots of a rank")
    parser.add_argument("--save", action="store_true", help="a checkpoint at the end")
    parser.add_argument("--fill-gb", type=float, help="of memory, first: see memory.fill")
    parser.add_argument("--out", type=Path, default=Path("/tmp/moe-results"))
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of a variant")
    parser.add_argument("--limit-gb", type=float, default=8.0, help="of the file to measure with")
    parser.add_argument("--limit-threads", type=int, default=8)
    parser.add_argument("--limit-seconds", type=float, default=3.0)
    parser.add_argument("megatron", nargs="*", metavar="-- MEGATRON_ARG")
    args = parser.parse_args(arguments)
    args.variants = args.only.split(",") if args.only else list(VARIANTS)
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: expected some of {', '.join(VARIANTS)}")
    if args.steps < 3:
        parser.error(f"--steps {args.steps}: the first two warm up, so give at least 3")
    return args


def main() -> None:
    """Run variants and print the tables of all that were run."""
    args = parsed_arguments()
    for each in (args.out, args.directory):
        each.mkdir(parents=True, exist_ok=True)
    path = args.out / "moe.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"variants": {}}
    if args.fill_gb:
        fill_beforehand(args.fill_gb)
    known |= {"machine": machine(args.directory), "command": sys.argv[1:]}
    known["disk"] = measure_disk(args)
    for variant in (each for each in VARIANTS if each in args.variants):
        known["variants"][variant] = run_variant(variant, args)
        path.write_text(json.dumps(known, indent=1) + "\n")
    print("\n\n".join(report(known)))


if __name__ == "__main__":
    main()
