"""What streaming did in a step, for TensorBoard, W&B and frameworks, under names that stay.

`training_log` of Megatron's calls `log_metrics`; a framework calls `metrics` of the outermost
optimizer. Numbers are those of one rank, and of its stores together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from .config import GB
from .placement import Placement
from .report import StepReport

PREFIX = "nvme-state-store/"


class _Store(Protocol):
    """What is asked of a store."""

    last_step: StepReport

    @property
    def placement(self) -> Placement:
        """Where its buckets live."""
        ...


def metrics_of(stores: Iterable[_Store]) -> dict[str, float]:
    """Return what the last step of a rank's stores did, by name; empty without stores.

    Seconds of ``step`` are what training waited for; those of the verbs overlap. Bytes are GB of
    10^9 bytes: what was moved in the step, and what lives in each tier.
    """
    found: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        found[PREFIX + name] = found.get(PREFIX + name, 0.0) + value

    for store in stores:
        step, placement = store.last_step, store.placement
        add("step-seconds", step.seconds)
        for verb in ("read_wait", "upload", "update", "publish", "download", "write_wait"):
            add(f"{verb.replace('_', '-')}-seconds", getattr(step, verb))
        for what in ("read", "written", "uploaded", "downloaded"):
            add(f"{what}-gb", getattr(step, f"bytes_{what}") / GB)
        add("page-cache-gb", (step.bytes_cached or 0) / GB)
        add("disk-tier-gb", placement.disk_nbytes / GB)
        add("host-tier-gb", placement.host_nbytes / GB)
        add("device-tier-gb", placement.device_nbytes / GB)
    return found


def log_metrics(optimizer: Any, iteration: int, interval: int, writer: Any, wandb: Any) -> None:
    """Give the metrics of a streamed optimizer to Megatron's writers, if it is their turn.

    Args:
        optimizer: the outermost one.
        iteration: that has just ended.
        interval: iterations from one log to the next.
        writer: TensorBoard's, or None: most ranks have none.
        wandb: W&B's module, or None.
    """
    if iteration % interval or not (writer or wandb):
        return
    metrics = optimizer.metrics()
    if writer:
        for name, value in metrics.items():
            writer.add_scalar(name, value, iteration)
    if wandb and metrics:
        wandb.log(metrics, iteration)
