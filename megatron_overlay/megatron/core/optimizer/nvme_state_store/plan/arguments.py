"""The command line of a plan: its arguments, and the numbers in them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path

from ..config import DEFAULT_BUCKET_NUMEL, gigabytes
from .memory import GRAD_BYTES
from .ranks import OPTIMIZERS

GPU_GB = {
    **{"a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141},
    **{"b200": 180, "gb200": 186, "gb300": 276},
}
"""GPUs by name, as they are sold; GB300: what a published run says it has."""
STREAM_PREFIX = "stream-optimizer-state-"
STREAM_DEFAULTS: Mapping[str, object] = {
    "dir": None,
    "moment-dtype": "fp32",
    "main-storage": "fp32",
    "host-gb": 0.0,
    "device-gb": 0.0,
    "ahead-gb": 0.0,
    "bucket-numel": DEFAULT_BUCKET_NUMEL,
    "io": "auto",
    "chunk-mb": 8,
    "engine": "threads",
}
PARALLEL = {
    "dp": "",  # no argument of Megatron's: it follows from the world size
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    model = parser.add_argument_group(
        "model: one of --params, --hf-config, -- MEGATRON'S ARGUMENTS"
    )
    model.add_argument("--params", type=_params, metavar="N", help="all of them: 744e9, 744B, 1.5t")
    model.add_argument(
        "--expert-params", type=_params, default=0, metavar="N", help="those of experts (0)"
    )
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="a config.json")
    model.add_argument(
        "megatron", nargs="*", metavar="-- ARGUMENT", help="Megatron's arguments, as for training"
    )
    split = parser.add_argument_group("how it is split (what is left out is in Megatron's, or 1)")
    for name in PARALLEL:
        split.add_argument(f"--{name}", type=_count, metavar="N")
    split.add_argument("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (adam)")
    split.add_argument("--grads", choices=tuple(GRAD_BYTES), help="dtype of gradients (fp32)")
    split.add_argument(
        "--inner",
        choices=("te", "torch"),
        default="te",
        help="whose Adam: Transformer Engine's or torch's (%(default)s)",
    )
    machine = parser.add_argument_group("machine (what is left out is not compared)")
    machine.add_argument(
        "--gpus-per-node", type=_count, default=8, metavar="N", help="(%(default)s)"
    )
    names = ", ".join(f"{name} {size}" for name, size in GPU_GB.items())
    machine.add_argument("--gpu", choices=tuple(GPU_GB), help=f"GB of each: {names}")
    for name, text in (
        ("--gpu-gb", "memory of a GPU"),
        ("--host-gb", "memory of a node; a tenth, and at least 8 GB, stay free"),
        ("--disk-gb", "space in the directories of a node"),
        (
            "--activation-gb",
            "of a GPU, for activations, CUDA and libraries; the rest may hold state",
        ),
    ):
        machine.add_argument(name, type=_positive, metavar="GB", help=text)
    speed = parser.add_argument_group("speed (what is left out is not predicted)")
    speed.add_argument(
        "--disk-gb-per-s", type=_positive, metavar="GB/S", help="mixed, of a node: `probe`"
    )
    speed.add_argument(
        "--probe", type=Path, metavar="FILE", help="what `probe DIR... --json` printed"
    )
    speed.add_argument(
        "--pcie-gb-per-s", type=_positive, metavar="GB/S", help="of a GPU, each way, both at once"
    )
    speed.add_argument(
        "--update-params-per-s", type=_positive, metavar="N", help="of a GPU (an H200's)"
    )
    speed.add_argument(
        "--forward-backward-s", type=_positive, metavar="S", help="from one step to the next"
    )
    speed.add_argument(
        "--endurance-tb", type=_positive, metavar="TB", help="TBW of the disks of a node together"
    )
    flags = parser.add_argument_group("settings of the store (what is left out is suggested)")
    for name, default in STREAM_DEFAULTS.items():
        if name in ("io", "chunk-mb", "engine"):
            continue  # they change neither bytes nor this model of time
        kind: Callable[[str], object] = str
        if name.endswith("-gb"):
            kind = _budget
        elif isinstance(default, int):
            kind = _count
        flags.add_argument(f"--{STREAM_PREFIX}{name}", type=kind, metavar="VALUE")
    out = parser.add_argument_group("output")
    out.add_argument("--all", action="store_true", help="all formats, not only the usual ones")
    out.add_argument("--json", action="store_true", help="print JSON: bytes, seconds; all formats")
    out.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the bytes of a GPU (matplotlib)"
    )


_SUFFIXES = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e\d{1,2})?([kmbt]?)", re.IGNORECASE)


def _whole(text: str, expected: str) -> int:
    match = _NUMBER.fullmatch(text)
    value = Decimal(0)
    if match:
        value = Decimal(match[1] + (match[2] or "")).scaleb(_SUFFIXES[match[3].lower()])
    if not match or value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
    return int(value)


def _params(text: str) -> int:
    return _whole(text, "a whole number of params, such as 8e9, 8b, 744B or 1.5t")


def _count(text: str) -> int:
    if text[-1:].isalpha():
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, such as 8")
    return _whole(text, "a whole number, such as 8")


def _positive(text: str) -> float:
    expected = f"{text}: expected a positive number in the unit that --help names, such as 80"
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(expected) from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(expected)
    return value


def _budget(text: str) -> float | str:
    try:
        return gigabytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of GB, or auto") from None
