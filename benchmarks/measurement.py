"""One process's measurement of steps: construct, warm up, measure, save and load, draw, finish."""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory, workload
from benchmarks.raw_disk import DiskProbe

FIELDS = ("host_gb", "device_gb", "ahead_gb", "moment_dtype", "main_storage", "io", "chunk_mb")
"""Options that are fields of Megatron's config with a prefix; None leaves Megatron's default."""
REPORT = (
    *("seconds", "bytes_read", "bytes_written", "bytes_uploaded", "bytes_downloaded"),
    *("read_wait", "write_wait", "upload", "update", "publish", "download"),
)
"""Fields of a store's report of a step."""
FLOAT32_ADAM_BYTES = 12


def streaming_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of Megatron's ``OptimizerConfig`` that turn streaming on."""
    if args.variant == "stock":
        return {}
    chosen = {name: getattr(args, name) for name in (*FIELDS, "engine")}
    return {
        "stream_optimizer_state_to_disk": True,
        "stream_optimizer_state_dir": args.directory,
        "stream_optimizer_state_bucket_numel": args.bucket_numel,
        "defer_main_param_initialization": True,
        **{f"stream_optimizer_state_{k}": v for k, v in chosen.items() if v is not None},
    }


class Run:
    """One process's measurement; phases are called in order by `main`.

    Attributes:
        result: what is printed.
    """

    def __init__(self, args: argparse.Namespace, group: memory.MemoryGroup | None) -> None:
        self.result: dict[str, Any] = {
            "variant": args.variant,
            "optimizer": args.optimizer,
            "moment_dtype": args.moment_dtype,
            "main_storage": args.main_storage,
        }
        self._args = args
        self._group = group
        self._host: list[tuple[int, int, str]] = []
        self._num_steps = 0
        self._seconds: dict[str, float] = {}

    def construct(self) -> None:
        """Make model and optimizer."""
        args = self._args
        self.model = workload.make_model(args.optimizer, args.matrices, args.side)
        self._generator = torch.Generator("cuda").manual_seed(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        self.optimizer = workload.make_optimizer(args.optimizer, self.model, streaming_fields(args))
        torch.cuda.synchronize()
        self.result |= {
            "params": sum(param.numel() for param in self.model.parameters()),
            "inner": list(workload.inner_names(self.optimizer)),
            "init_s": round(time.monotonic() - start, 2),
            "init_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        }
        self._matmuls = workload.Matmuls(args.side) if args.is_overlapped else None
        self._charge_pinned()

    def _charge_pinned(self) -> None:
        """Take pinned memory off the limit where the kernel does not charge it to the group."""
        if self._group is None:
            return
        stats = torch.cuda.host_memory_stats()
        pinned = stats.get("allocated_bytes.current", 0)
        pinned = max(pinned, sum(store.placement.host_nbytes for store in self.stores))
        is_charged = self._group.held()["anonymous"] >= pinned
        self.result["pinned_is_charged"] = is_charged
        if not is_charged:
            self._group.set_limit(int(self._args.memory_cap_gb * 1e9) - pinned)

    @property
    def stores(self) -> list[Any]:
        """The stores of this rank."""
        return list(self.optimizer._stores()) if self._args.variant == "streamed" else []

    def drain(self) -> None:
        """Block until every byte is written."""
        for store in self.stores:
            store.drain()

    def step(self, at_rest: Callable[[], None] | None = None) -> dict[str, Any]:
        """Prepare and make one step.

        Args:
            at_rest: called before it, after forward and backward; its time does not count. Without
                these, the step's time goes on until nothing moves any more.
        """
        args = self._args
        if not args.back_to_back or not self._num_steps:
            workload.fill_gradients(self.model, self._generator)
        if not args.back_to_back and not args.keep_cache:
            # Numbers out of the page cache say nothing about a disk.
            subprocess.run(["sync"], check=True)
            Path("/proc/sys/vm/drop_caches").write_text("1")
        torch.cuda.current_stream().synchronize()
        begin = time.monotonic()
        if self._matmuls is not None:
            self._matmuls.run(self._seconds.get("forward_backward", 0.0))
        calls, paused = memory.transferred(), time.monotonic()
        if at_rest is not None:
            at_rest()
        moved_at_rest = _since(calls)
        calls, start = memory.transferred(), time.monotonic()
        begin += start - paused
        self.optimizer.step()
        torch.cuda.current_stream().synchronize()  # not those on which bytes go home
        end = time.monotonic()
        found: dict[str, Any] = {
            "start": start,
            "exposed_s": end - start,
            "iteration_s": end - begin,
            "reports": [store.last_step for store in self.stores],
            "moved_at_rest": moved_at_rest,
        }
        self._num_steps += 1
        self._host.append(memory.host_memory())
        if not args.back_to_back:
            self.drain()
            found["drain_s"] = time.monotonic() - end
        elif at_rest is not None and self._matmuls is None:
            self.drain()
            found["whole_s"] = memory.wait_for_quiet() - start
            found["whole_gb"] = sum(_since(calls).values()) / 1e9
        return found

    def steps(
        self, count: int, at_rest: Callable[[], None] | None = None
    ) -> tuple[list[dict[str, Any]], float]:
        """Make steps; return what is known of each, and seconds until the last byte is written."""
        start = time.monotonic()
        found = [self.step(at_rest) for _ in range(count)]
        end = found[-1]["start"] + found[-1]["exposed_s"]
        self.drain()
        found[-1].setdefault("drain_s", time.monotonic() - end)
        seconds = time.monotonic() - start
        torch.cuda.synchronize()
        for each in found:
            each["report"] = summed_reports(each.pop("reports"))
        return found, seconds

    def measure(self, probe: DiskProbe | None) -> None:
        """Make the steps that count, between measurements of the limits."""
        args = self._args
        if args.warmup:
            warm, _ = self.steps(args.warmup)
            self.result["warmup_s"] = [round(each["exposed_s"], 3) for each in warm]
        self.note_weights()
        is_needed = not args.limits_between or args.forward_backward_io
        limits = [self._limits(probe)] if is_needed else []
        self._seconds["forward_backward"] = (args.forward_backward_ms or 0) / 1e3
        if args.forward_backward_io:
            report = warm[-1]["report"]
            moved = report["bytes_read"] + report["bytes_written"]
            moved *= torch.distributed.get_world_size()  # they share the disk
            self._seconds["forward_backward"] = (
                args.forward_backward_io * moved / limits[0]["disk"]["mixed"] / 1e9
            )
        if args.limits_between:
            limits.clear()  # those before the first step are measured right before it
        torch.cuda.reset_peak_memory_stats()
        calls = memory.transferred()
        between = functools.partial(self._note_limits, probe, limits)
        made, seconds = self.steps(args.steps, between if args.limits_between else None)
        moved = _since(calls)
        for each in made:
            moved = {name: moved[name] - each["moved_at_rest"][name] for name in moved}
        peak = torch.cuda.max_memory_allocated()
        is_back_to_back = args.back_to_back and not args.limits_between
        self.result |= {
            "step_s": [round(each["exposed_s"], 4) for each in made],
            "iteration_s": [round(each["iteration_s"], 4) for each in made],
            "drain_s": [round(each["drain_s"], 4) for each in made if "drain_s" in each],
            "back_to_back_s": round(seconds / args.steps, 4) if is_back_to_back else None,
            "whole_s": [round(each["whole_s"], 4) for each in made if "whole_s" in each],
            "whole_gb": [round(each["whole_gb"], 3) for each in made if "whole_gb" in each],
            "forward_backward_s": round(self._seconds["forward_backward"], 3),
            "calls_read_gb": round(moved["read"] / 1e9 / args.steps, 3),
            "calls_wrote_gb": round(moved["written"] / 1e9 / args.steps, 3),
            "reports": [each["report"] for each in made],
            "limits": [*limits, self._limits(probe)],
            "step_peak_gb": round(peak / 1e9, 2),
            "between_steps_gb": round(torch.cuda.memory_allocated() / 1e9, 2),
        }
        self.note_weights()

    def note_weights(self) -> None:
        """Hash the weights; by number of steps, so that variants can be compared."""
        self.result["weights_sha256"] = workload.weights_digest(self.model)
        after = self.result.setdefault("weights_after", {})
        after[str(self._num_steps)] = self.result["weights_sha256"]

    def _note_limits(self, probe: DiskProbe | None, limits: list[dict[str, Any]]) -> None:
        limits.append(self._limits(probe))

    def _limits(self, probe: DiskProbe | None) -> dict[str, Any]:
        """Measure what is asked for, the disk on one rank and copies on all of them at once."""
        found: dict[str, Any] = {}
        chosen = self._args.limits.split(",")
        if chosen == [""]:
            return found
        memory.wait_for_quiet()
        torch.distributed.barrier()
        if probe is not None:
            found["disk"] = asdict(probe.measure(self._args.limit_seconds, ["mixed", "balanced"]))
        torch.distributed.barrier()
        if "copies" in chosen:
            from benchmarks.raw_copies import measure_copies

            found["copies"] = asdict(measure_copies(device=False))
            torch.cuda.empty_cache()
        torch.distributed.barrier()
        return found

    def save_and_load(self) -> None:
        """Save, load, and note seconds and peaks; the weights must be the same after it."""
        directory = Path(tempfile.mkdtemp(prefix="saved-", dir=self._args.directory.split(",")[0]))
        try:
            for name, call in (
                ("save", self.optimizer.save_stores),
                ("load", self.optimizer.load_stores),
            ):
                torch.cuda.reset_peak_memory_stats()
                start = time.monotonic()
                call(directory)
                torch.cuda.synchronize()
                self.result[f"{name}_s"] = round(time.monotonic() - start, 2)
                peak = torch.cuda.max_memory_allocated()
                self.result[f"{name}_peak_gb"] = round(peak / 1e9, 2)
        finally:
            shutil.rmtree(directory)

    def timeline(self, path: Path) -> None:
        """Make one more step after a first one of the same kind, and write when did what."""
        self.step()
        with memory.DeviceSampler() as sampler:
            step = self.step()
        self.drain()
        spans = [span for report in step["reports"] for span in report.spans()]
        content = {
            "exposed_s": step["exposed_s"],
            "spans": [list(span) for span in sorted(spans, key=lambda span: span[2:])],
            "device_bytes": [[at - step["start"], held] for at, held in sampler.samples],
            "model_bytes": workload.buffer_bytes(self.model),
            "slot_bytes": self._slot_bytes(),
        }
        path.write_text(json.dumps(content) + "\n")

    def _slot_bytes(self) -> int:
        """Return what the cap allows all device slots together; more only for a larger matrix."""
        largest = sum(int(store.layout.slot_numels[0]) for store in self.stores)
        cap = self._args.bucket_numel if self.stores else 0
        return FLOAT32_ADAM_BYTES * max(largest, min(cap, int(self.result["params"])))

    def finish(self) -> None:
        """Note what the stores and the host hold, and remove the files."""
        held = self._host
        self.result |= {
            "model_gb": round(workload.buffer_bytes(self.model) / 1e9, 3),
            "matmuls_gb": round(self._matmuls.nbytes / 1e9, 3) if self._matmuls else 0.0,
            "slots_gb": round(self._slot_bytes() / 1e9, 3),
            "host_anonymous_gb": round(max(each[0] for each in held) / 1e9, 2),
            "host_page_cache_gb": round(max(each[1] for each in held) / 1e9, 2),
            "host_source": held[-1][2],
        }
        if self._group is not None:
            self.result["memory_group"] = self._group.summary()
        if self.stores:
            self.result |= dict(store_rows(self.stores))
        for store in self.stores:
            store.close()


def _since(before: dict[str, int]) -> dict[str, int]:
    """Return what system calls have moved since ``before``."""
    return {name: count - before[name] for name, count in memory.transferred().items()}


def summed_reports(reports: list[Any]) -> dict[str, float]:
    """Return the fields of a step's reports, summed over the stores of a rank."""
    return {name: round(sum(getattr(each, name) for each in reports), 6) for name in REPORT}


def store_rows(stores: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what the stores hold and have moved since they were made."""
    moved = [store.counters for store in stores]
    yield "state_gb", round(sum(store.layout.nbytes for store in stores) / 1e9, 3)
    yield "buckets", [len(store.layout.buckets) for store in stores]
    yield "read_gb", round(sum(each.bytes_read for each in moved) / 1e9, 2)
    yield "wrote_gb", round(sum(each.bytes_written for each in moved) / 1e9, 2)
    yield "read_s", round(sum(each.read_seconds for each in moved), 2)
    yield "write_s", round(sum(each.write_seconds for each in moved), 2)
    for tier in ("disk", "host", "device"):
        held = sum(getattr(store.placement, f"{tier}_nbytes") for store in stores)
        yield f"{tier}_gb", round(held / 1e9, 3)
