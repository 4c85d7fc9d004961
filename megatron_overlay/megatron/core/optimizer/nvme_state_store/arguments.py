"""Megatron's command line: the flags of the store, and what cannot be used with them."""

from __future__ import annotations

import argparse
from typing import Any

from .config import DEFAULT_BUCKET_NUMEL, ENGINES, IO_KINDS, gigabytes
from .formats import MAIN_STORAGES, MOMENT_DTYPES

_ON = "--stream-optimizer-state-to-disk"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags; each sets the `OptimizerConfig` field of its name."""
    group = parser.add_argument_group(title="optimizer state streaming")
    group.add_argument(
        _ON,
        action="store_true",
        help="Keep FP32 main params and optimizer moments in files on a local disk and stream "
        "them through the optimizer step.",
    )
    group.add_argument(
        "--stream-optimizer-state-dir",
        help="Directories on local disks, separated by commas, over which the state is striped; "
        "each rank makes a private one below each and removes it at exit (default: $SCRATCH or "
        "/scratch, with megatron_optimizer_state_<uid> below it).",
    )
    group.add_argument(
        "--stream-optimizer-state-moment-dtype",
        default="fp32",
        choices=MOMENT_DTYPES,
        help="How moments are stored; updates are FP32. fp16 and fp8 have a scale for each 64 "
        "elements. Default %(default)s.",
    )
    group.add_argument(
        "--stream-optimizer-state-main-storage",
        default="fp32",
        choices=MAIN_STORAGES,
        help="How main params are stored: split stores only what the BF16 model params lack, "
        "without any loss. Default %(default)s.",
    )
    group.add_argument(
        "--stream-optimizer-state-host-gb",
        type=gigabytes,
        default=0.0,
        help="State that stays in pinned host memory, in GB (10^9 bytes) of each rank, or auto: "
        "what is free, shared by the ranks of the node. Default %(default)s.",
    )
    group.add_argument(
        "--stream-optimizer-state-device-gb",
        type=gigabytes,
        default=0.0,
        help="State that stays on the device, in GB of each rank, or auto: half of what is free "
        "when the optimizer is made. Default %(default)s.",
    )
    group.add_argument(
        "--stream-optimizer-state-ahead-gb",
        type=float,
        default=0.0,
        help="Pinned host memory of each rank for reads ahead of a step and writes behind it, in "
        "GB; there are always slots for a few buckets. Default %(default)s.",
    )
    group.add_argument(
        "--stream-optimizer-state-bucket-numel",
        type=int,
        default=DEFAULT_BUCKET_NUMEL,
        help="Cap of what is on the device at once, in elements of 12 bytes; default %(default)s.",
    )
    group.add_argument(
        "--stream-optimizer-state-io",
        default="auto",
        choices=IO_KINDS,
        help="Whether files are read and written past the page cache: auto falls back to buffered, "
        "with a warning. Default %(default)s.",
    )
    group.add_argument(
        "--stream-optimizer-state-chunk-mb",
        type=int,
        default=8,
        help="Largest transfer of one call, in MiB; default %(default)s.",
    )
    group.add_argument(
        "--stream-optimizer-state-engine",
        default="threads",
        choices=ENGINES,
        help="threads: all verbs of a step at once. sync: each transfer when it is asked for, as a "
        "reference; same results. Default %(default)s.",
    )
    return parser


_DEFAULTS: dict[str, Any] = {
    name: value
    for name, value in vars(add_arguments(argparse.ArgumentParser()).parse_args([])).items()
    if name != _ON[2:].replace("-", "_")
}

# Argument, why it is refused, and what to do instead. What they must be called upstream:
# Tripwire: ../../transformer/transformer_config.py::TransformerConfig.qk_clip
# Tripwire: ../../../training/config/training_config.py::CheckpointConfig.ckpt_convert_format
# Tripwire: ../../../training/config/training_config.py::CheckpointConfig.dist_ckpt_optim_fully_reshardable
# Tripwire: ../../../training/arguments.py::validate_args@args.fp8_param_gather,args.fp4_param_gather
# Tripwire: ../../../training/config/training_config.py::CheckpointConfig.stream_ckpt_dequant
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (
        "fp4_param_gather",
        "two of its values share a byte, also of two ranks; it needs a GPU to be measured on",
        "leave out --fp4-param-gather",
    ),
    (
        "overlap_param_gather_with_optimizer_step",
        "Megatron allows it with --ckpt-format torch only, which would serialise tensors that are "
        "on disk",
        "leave out --overlap-param-gather-with-optimizer-step",
    ),
    ("use_megatron_fsdp", "Megatron-FSDP owns the optimizer's weights", "leave it out"),
    ("use_torch_fsdp2", "FSDP2 owns the optimizer's weights", "leave it out"),
    (
        "qk_clip",
        "it reads and writes main params after the step",
        "leave out --qk-clip",
    ),
    (
        "ckpt_convert_format",
        "conversion writes the optimizer's tensors, which are on disk",
        "convert in a run without streaming",
    ),
    (
        "dist_ckpt_optim_fully_reshardable",
        "the streamed state is saved in a format of its own, for the same topology",
        "leave out --dist-ckpt-optim-fully-reshardable",
    ),
)


def validate_arguments(args: Any) -> None:
    """Check Megatron's parsed arguments, and switch on what streaming needs.

    Raises:
        ValueError: another argument cannot be used with streaming; the message names it, the
            reason and what to do.
    """
    args.defer_main_param_initialization = args.stream_optimizer_state_to_disk
    if not args.stream_optimizer_state_to_disk:
        for name, default in _DEFAULTS.items():
            if getattr(args, name) != default:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} has no effect without {_ON}")
        return
    for name, reason, cure in _REFUSED:
        if getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{_ON} cannot be used with {flag}: {reason}; {cure}")
    if args.fp8_param_gather and args.fp8_recipe == "delayed" and args.stream_ckpt_dequant:
        raise ValueError(
            f"{_ON} cannot be used with --fp8-param-gather --fp8-recipe delayed without "
            "--no-stream-ckpt-dequant: a load would cast weights before it knows their scales, and "
            "they would not be those of the main params; add --no-stream-ckpt-dequant"
        )
    if args.fp8_param_gather and args.stream_optimizer_state_main_storage == "split":
        raise ValueError(
            "--stream-optimizer-state-main-storage split cannot be used with --fp8-param-gather: "
            "8-bit model params are not the upper half of the main params; use fp32"
        )
    if args.fp8_param_gather and args.fp8_recipe == "mxfp8":
        raise ValueError(
            f"{_ON} cannot be used with --fp8-param-gather --fp8-recipe mxfp8: its params are "
            "gathered in the memory of the gradients, which the step still reads; use --fp8-recipe "
            "blockwise, or leave out --fp8-param-gather"
        )
    if args.ckpt_format != "torch_dist":
        raise ValueError(
            f"{_ON} cannot be used with --ckpt-format {args.ckpt_format}: it serialises tensors "
            "that are on disk, silently; use --ckpt-format torch_dist"
        )
    if args.non_persistent_ckpt_type == "local":
        raise ValueError(
            f"{_ON} cannot be used with --non-persistent-ckpt-type local: a local checkpoint "
            "would lack the optimizer state; use global"
        )
