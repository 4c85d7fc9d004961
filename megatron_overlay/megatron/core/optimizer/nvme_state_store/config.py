"""What a user sets, with defaults and the checks that need nothing but the configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_BUCKET_NUMEL = 200_000_000
"""Elements over all slots: 2.4 GB of FP32 main params and two moments on the device."""

_ON = "--stream-optimizer-state-to-disk"


@dataclass(frozen=True)
class StoreConfig:
    """Validated settings of a store.

    Attributes:
        directory: base directory below which each rank makes its private one.
        bucket_numel: cap of a bucket in elements, over all slots together.
    """

    directory: Path
    bucket_numel: int = DEFAULT_BUCKET_NUMEL


def default_directory() -> Path:
    """Return ``$SCRATCH`` or ``/scratch``, with a directory of this user's below it."""
    return Path(os.environ.get("SCRATCH") or "/scratch") / f"megatron_optimizer_state_{os.getuid()}"


def store_config(config: Any) -> StoreConfig:
    """Return the store's settings from an ``OptimizerConfig``.

    Raises:
        ValueError: a value is not usable.
    """
    chosen = config.stream_optimizer_state_dir
    if chosen and "," in chosen:
        raise ValueError(
            f"--stream-optimizer-state-dir {chosen}: several directories are not supported yet; "
            "give one"
        )
    numel = config.stream_optimizer_state_bucket_numel
    if not isinstance(numel, int) or numel < 1:
        raise ValueError(
            f"--stream-optimizer-state-bucket-numel {numel}: expected a positive number of elements"
        )
    return StoreConfig(Path(chosen) if chosen else default_directory(), numel)


# Field of OptimizerConfig, why it is refused, and what to do instead. What they must be called:
# Tripwire: ../optimizer_config.py::OptimizerConfig.use_precision_aware_optimizer
# Tripwire: ../optimizer_config.py::OptimizerConfig.optimizer_cpu_offload
# Tripwire: ../optimizer_config.py::OptimizerConfig.optimizer_cuda_graph
# Tripwire: ../optimizer_config.py::OptimizerConfig.reuse_grad_buf_for_mxfp8_param_ag
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (
        "use_precision_aware_optimizer",
        "FusedAdam then owns main params and moments in its own dtypes, out of the store's reach",
        "leave out --use-precision-aware-optimizer",
    ),
    (
        "optimizer_cpu_offload",
        "the state would live in two places; HybridDeviceOptimizer clones evicted main params",
        "leave out --optimizer-cpu-offload: the store replaces it",
    ),
    (
        "optimizer_cuda_graph",
        "a captured graph silently replays freed addresses, and file I/O cannot be captured",
        "leave out --optimizer-cuda-graph",
    ),
    (
        "reuse_grad_buf_for_mxfp8_param_ag",
        "it copies all main params at once after the step, when they are on disk",
        "leave out --reuse-grad-buf-for-mxfp8-param-ag",
    ),
)


def validate_optimizer_config(config: Any) -> None:
    """Check an ``OptimizerConfig``; called at the end of its ``__post_init__``.

    Raises:
        ValueError: streaming and deferral do not go together, or another setting would read state
            that is on disk; the message names the setting, the reason and what to do.
    """
    if not config.stream_optimizer_state_to_disk:
        if config.defer_main_param_initialization:
            raise ValueError(
                "defer_main_param_initialization needs stream_optimizer_state_to_disk: without a "
                "store nothing would ever initialize the FP32 main params"
            )
        return
    if not config.defer_main_param_initialization:
        raise ValueError(
            "stream_optimizer_state_to_disk needs defer_main_param_initialization: without it the "
            "whole FP32 state is on the GPU during construction"
        )
    store_config(config)
    # Tripwire: ../distrib_optimizer.py::DistributedOptimizer.__init__
    if config.optimizer == "sgd" and config.use_distributed_optimizer:
        raise ValueError(
            f"{_ON} cannot be used with --optimizer sgd under the distributed optimizer: Megatron "
            "itself refuses that, since it could not be checkpointed; leave out "
            "--use-distributed-optimizer"
        )
    if not (config.bf16 or config.fp16):
        raise ValueError(
            f"{_ON} needs 16-bit params: with FP32 params there are no main params to stream; add "
            "--bf16 or --fp16"
        )
    for name, reason, cure in _REFUSED:
        if getattr(config, name):
            raise ValueError(f"{_ON} cannot be used with {name}: {reason}; {cure}")
