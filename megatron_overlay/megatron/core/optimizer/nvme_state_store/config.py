"""What a user sets, with defaults and the checks that need nothing but the configuration."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from .formats import main_format, moment_format

DEFAULT_BUCKET_NUMEL = 200_000_000
"""Elements over all slots: 2.4 GB of FP32 main params and two moments on the device."""
NUM_DEVICE_SLOTS = 4
"""One each for upload, update and download, and one that is between two of them."""
MIN_HOST_SLOTS = 4
"""So that reads and writes are always under way while a bucket is on the device."""
MIN_PART = Fraction(1, 32)
"""Of the slots of a rank, for a small store beside a large one: by default buckets of 19 MB, or
requests and kernels would be too small to pay."""
IO_KINDS = ("auto", "direct", "buffered")
ENGINES = ("threads", "sync")
GB = 10**9

_ON = "--stream-optimizer-state-to-disk"


@dataclass(frozen=True)
class StoreConfig:
    """Validated settings of a store.

    Attributes:
        directories: base directories below which each rank makes its private ones; buckets of the
            disk tier are striped over them.
        bucket_numel: cap of a bucket in elements; all stores of a rank together have this.
        moment_dtype: one of `formats.MOMENT_DTYPES`.
        main_storage: one of `formats.MAIN_STORAGES`.
        host_bytes: pinned memory of this rank for buckets that stay there; None: what is free.
        device_bytes: device memory likewise.
        ahead_bytes: pinned memory for reads ahead of a step and writes behind it, likewise.
        io: one of `IO_KINDS`.
        chunk_bytes: largest transfer of one call.
        engine: one of `ENGINES`.
    """

    directories: tuple[Path, ...]
    bucket_numel: int = DEFAULT_BUCKET_NUMEL // NUM_DEVICE_SLOTS
    moment_dtype: str = "fp32"
    main_storage: str = "fp32"
    host_bytes: int | None = 0
    device_bytes: int | None = 0
    ahead_bytes: int = 0
    io: str = "auto"
    chunk_bytes: int = 8 << 20
    engine: str = "threads"

    def part(self, part: Fraction) -> StoreConfig:
        """Return the settings of a store that has this part of a rank's state.

        What a user sets is what a rank takes, however many stores its optimizers have: a mixture of
        experts has two, of the dense params and of the experts.
        """
        return replace(
            self,
            bucket_numel=max(int(self.bucket_numel * max(part, MIN_PART)), 1),
            ahead_bytes=int(self.ahead_bytes * part),
        )


def default_directory() -> Path:
    """Return ``$SCRATCH`` or ``/scratch``, with a directory of this user's below it."""
    return Path(os.environ.get("SCRATCH") or "/scratch") / f"megatron_optimizer_state_{os.getuid()}"


def gigabytes(text: str) -> float | str:
    """Parse a budget of the command line: a number of GB, or ``auto``.

    Raises:
        ValueError: it is neither.
    """
    return text if text == "auto" else float(text)


def store_config(config: Any) -> StoreConfig:
    """Return the store's settings from an ``OptimizerConfig``.

    Raises:
        ValueError: a value is not usable.
    """
    numel = config.stream_optimizer_state_bucket_numel
    if not _is_whole(numel) or numel < 1:
        raise ValueError(
            f"--stream-optimizer-state-bucket-numel {numel}: expected a positive number of elements"
        )
    chunk = config.stream_optimizer_state_chunk_mb
    if not _is_whole(chunk) or chunk < 1:
        raise ValueError(
            f"--stream-optimizer-state-chunk-mb {chunk}: expected a positive number of MiB"
        )
    main_format(config.stream_optimizer_state_main_storage)
    moment_format("exp_avg", config.stream_optimizer_state_moment_dtype)
    return StoreConfig(
        directories=_directories(config.stream_optimizer_state_dir),
        bucket_numel=max(numel // NUM_DEVICE_SLOTS, 1),
        moment_dtype=config.stream_optimizer_state_moment_dtype,
        main_storage=config.stream_optimizer_state_main_storage,
        host_bytes=_budget("host-gb", config.stream_optimizer_state_host_gb),
        device_bytes=_budget("device-gb", config.stream_optimizer_state_device_gb),
        ahead_bytes=_bytes("ahead-gb", config.stream_optimizer_state_ahead_gb, "a number of GB"),
        io=_choice("io", config.stream_optimizer_state_io, IO_KINDS),
        chunk_bytes=chunk << 20,
        engine=_choice("engine", config.stream_optimizer_state_engine, ENGINES),
    )


def _directories(chosen: Any) -> tuple[Path, ...]:
    if chosen is None or chosen == "":
        return (default_directory(),)
    if not isinstance(chosen, str):
        raise ValueError(
            f"--stream-optimizer-state-dir {chosen}: expected a string of directories, separated "
            f"by commas, not a {type(chosen).__name__}"
        )
    directories = tuple(Path(each) for each in chosen.split(",") if each)
    if len({os.path.realpath(each) for each in directories}) != chosen.count(",") + 1:
        raise ValueError(
            f"--stream-optimizer-state-dir {chosen}: expected different directories, separated by "
            "single commas"
        )
    return directories


def _budget(flag: str, value: Any) -> int | None:
    return None if value == "auto" else _bytes(flag, value, "a number of GB, or auto")


def _bytes(flag: str, value: Any, expected: str) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value * GB < math.inf:
        raise ValueError(f"--stream-optimizer-state-{flag} {value}: expected {expected}")
    return int(value * GB)


def _choice(flag: str, value: Any, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        raise ValueError(
            f"--stream-optimizer-state-{flag} {value}: expected one of {', '.join(accepted)}"
        )
    return str(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
    if config.stream_optimizer_state_main_storage == "split" and not config.bf16:
        raise ValueError(
            "--stream-optimizer-state-main-storage split needs --bf16: the model params are to be "
            "the upper half of the main params; use fp32"
        )
    for name, reason, cure in _REFUSED:
        if getattr(config, name):
            raise ValueError(f"{_ON} cannot be used with {name}: {reason}; {cure}")
