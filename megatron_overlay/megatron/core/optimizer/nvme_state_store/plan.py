"""How much memory, disk and time streaming takes for a model, before anything is bought or started.

    python -m megatron.core.optimizer.nvme_state_store plan --params 744e9 --tp 8 --pp 4 --gpu gb300
    python -m megatron.core.optimizer.nvme_state_store plan --hf-config config.json --dp 8 --ep 8
    python -m megatron.core.optimizer.nvme_state_store plan --dp 8 -- --num-layers 32 ...

Sizes in GB are 10^9 bytes. What a rank has is counted by `plan_model`, bytes by `plan_memory`, time
by `plan_time`; docs/planning.md has worked examples, and says what was compared with measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from .config import DEFAULT_BUCKET_NUMEL, GB, StoreConfig, gigabytes, store_config
from .plan_choices import ALL_FORMATS, SHOWN_FORMATS, Question, rows
from .plan_figure import draw
from .plan_hf import read_hf_config
from .plan_megatron import megatron_architecture, megatron_flags
from .plan_memory import GRAD_BYTES, Machine
from .plan_model import Model, model_of, model_of_numbers
from .plan_ranks import OPTIMIZERS, Parallel, largest_rank
from .plan_text import as_json, as_text
from .plan_time import UPDATE_PARAMS_PER_S, Rates, read_probe

DESCRIPTION = "Plan bytes, time and flags for a model and a machine, with and without streaming."

GPU_GB = {
    **{"a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141},
    **{"b200": 180, "gb200": 186, "gb300": 276},
}
"""GPUs by name, as they are sold; GB300: what a published run says it has."""
_STREAM = "stream-optimizer-state-"
_STREAM_DEFAULTS: Mapping[str, object] = {
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
_PARALLEL = {
    "dp": "data-parallel-size",  # no argument of Megatron's: it follows from the world size
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
    model.add_argument("--params", type=_count, metavar="N", help="all params, such as 744e9")
    model.add_argument(
        "--expert-params", type=_count, default=0, metavar="N", help="those of experts (0)"
    )
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="a config.json")
    model.add_argument(
        "megatron", nargs="*", metavar="-- ARGUMENT", help="Megatron's arguments, read leniently"
    )
    split = parser.add_argument_group("how it is split (what is left out is in Megatron's, or 1)")
    for name in _PARALLEL:
        split.add_argument(f"--{name}", type=_count, metavar="N")
    split.add_argument("--optimizer", choices=OPTIMIZERS, help="adam")
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
    for name, default in _STREAM_DEFAULTS.items():
        if name in ("io", "chunk-mb", "engine"):
            continue  # they change neither bytes nor this model of time
        kind: Callable[[str], object] = str
        if name.endswith("-gb"):
            kind = gigabytes
        elif isinstance(default, int):
            kind = int
        flags.add_argument(f"--{_STREAM}{name}", type=kind, metavar="VALUE")
    out = parser.add_argument_group("output")
    out.add_argument("--all", action="store_true", help="all formats, not only the usual ones")
    out.add_argument("--json", action="store_true", help="print JSON: bytes, seconds; all formats")
    out.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the bytes of a GPU (matplotlib)"
    )


def _count(text: str) -> int:
    value = float(text)
    if not 0 <= value < math.inf or value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, such as 8 or 744e9")
    return int(value)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number")
    return value


_count.__name__, _positive.__name__ = "whole number", "positive number"  # in argparse's messages


def run(arguments: argparse.Namespace) -> int:
    """Print a plan; return 2 if what was asked for makes no sense, else 0."""
    try:
        warnings: list[str] = []
        question = _question(arguments, warnings)
        choices = rows(question)
        if arguments.png is not None:
            draw(question, choices, arguments.png)
    except ValueError as error:
        sys.stderr.write(f"plan: error: {error}\n")
        return 2
    if arguments.json:
        text = json.dumps(as_json(question, choices, warnings), indent=2) + "\n"
    else:
        text = as_text(question, choices, warnings)
    sys.stdout.write(text)
    return 0


def _question(arguments: argparse.Namespace, warnings: list[str]) -> Question:
    """Return what is asked for.

    Raises:
        ValueError: something is missing, there twice, or not usable.
    """
    flags = megatron_flags(arguments.megatron)
    model = _model(arguments, flags, warnings)
    sizes = {name: _parallel_size(arguments, flags, name) for name in _PARALLEL}
    parallel = Parallel(**{name: size or 1 for name, size in sizes.items()})
    if sizes["etp"] is None:
        parallel = Parallel(**{**vars(parallel), "etp": parallel.tp})
    optimizer = arguments.optimizer or flags.get("optimizer", "adam")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {optimizer}: expected one of {', '.join(OPTIMIZERS)}")
    if optimizer == "muon" and not model.layers:
        warnings.append("--optimizer muon with --params: a slot must hold the largest matrix")
    config, given = _config(arguments, flags)
    grads = arguments.grads or ("bf16" if "grad-reduce-in-bf16" in flags else "fp32")
    inner = "muon" if optimizer == "muon" else arguments.inner
    return Question(
        model=model,
        parallel=parallel,
        optimizer=optimizer,
        grads=grads,
        inner=arguments.inner,
        rank=largest_rank(model, parallel, optimizer),
        machine=_machine(arguments, parallel),
        rates=_rates(arguments, inner),
        between=arguments.forward_backward_s,
        endurance=None if arguments.endurance_tb is None else arguments.endurance_tb * 1e12,
        config=config,
        formats=_formats(config, given, is_all=arguments.all or arguments.json),
        are_tiers_given=bool({"host-gb", "device-gb"} & given),
        has_directory="dir" in given,
    )


def _model(arguments: argparse.Namespace, flags: dict[str, str], warnings: list[str]) -> Model:
    described = {"num-layers", "hidden-size", "num-attention-heads"} & set(flags)
    sources = (arguments.params is not None, arguments.hf_config is not None, bool(described))
    if sum(sources) != 1:
        raise ValueError(
            f"{sum(sources)} descriptions of the model: expected one of --params, --hf-config, and "
            "Megatron's --num-layers, --hidden-size, ... after --"
        )
    if arguments.params is not None:
        return model_of_numbers(arguments.params, arguments.expert_params)
    if arguments.expert_params:
        raise ValueError("--expert-params: expected with --params only; else they are counted")
    if arguments.hf_config is not None:
        architecture, found = read_hf_config(arguments.hf_config)
    else:
        architecture, found = megatron_architecture(flags)
    warnings += found
    return model_of(architecture)


def _parallel_size(
    arguments: argparse.Namespace, flags: Mapping[str, str], name: str
) -> int | None:
    """Return a size; None if it is not given. Zero is refused by `Parallel`."""
    given: int | None = getattr(arguments, name)
    text = flags.get(_PARALLEL[name])
    if given is None and text is not None:
        if not text.isdecimal():
            raise ValueError(f"-- --{_PARALLEL[name]} {text}: expected a whole number")
        given = int(text)
    if given == 0:
        raise ValueError(f"--{name} 0: expected a positive number")
    return given


def _machine(arguments: argparse.Namespace, parallel: Parallel) -> Machine:
    if arguments.gpus_per_node == 0:
        raise ValueError("--gpus-per-node 0: expected a positive number")
    if arguments.gpu is not None and arguments.gpu_gb is not None:
        raise ValueError(f"--gpu {arguments.gpu} and --gpu-gb {arguments.gpu_gb:g}: expected one")
    gpu_gb = arguments.gpu_gb if arguments.gpu is None else GPU_GB[arguments.gpu]
    return Machine(
        min(arguments.gpus_per_node, parallel.world),
        _nbytes(gpu_gb),
        _nbytes(arguments.host_gb),
        _nbytes(arguments.disk_gb),
        _nbytes(arguments.activation_gb) or 0,
    )


def _nbytes(number_of_gb: float | None) -> int | None:
    return None if number_of_gb is None else int(number_of_gb * GB)


def _rates(arguments: argparse.Namespace, inner: str) -> Rates:
    read = write = None
    disk = None if arguments.disk_gb_per_s is None else arguments.disk_gb_per_s * 1e9
    if arguments.probe is not None:
        if disk is not None:
            raise ValueError(f"--probe {arguments.probe} and --disk-gb-per-s: expected one")
        disk, read, write = read_probe(arguments.probe)
    pcie = None if arguments.pcie_gb_per_s is None else arguments.pcie_gb_per_s * 1e9
    update = arguments.update_params_per_s or UPDATE_PARAMS_PER_S[inner]
    return Rates(disk, read, write, pcie, update)


def _formats(config: StoreConfig, given: set[str], *, is_all: bool) -> tuple[tuple[str, str], ...]:
    """Return the formats to be compared: all, the usual ones, or what was given."""
    is_given = bool({"main-storage", "moment-dtype"} & given)
    return tuple(
        (main_storage, moment_dtype)
        for main_storage, moment_dtype in (ALL_FORMATS if is_all or is_given else SHOWN_FORMATS)
        if "main-storage" not in given or main_storage == config.main_storage
        if "moment-dtype" not in given or moment_dtype == config.moment_dtype
    )


def _config(
    arguments: argparse.Namespace, flags: Mapping[str, str]
) -> tuple[StoreConfig, set[str]]:
    """Return the settings of the store, and the names of those that were given."""
    values = dict(_STREAM_DEFAULTS)
    given = set()
    for name, default in _STREAM_DEFAULTS.items():
        value = getattr(arguments, f"{_STREAM}{name}".replace("-", "_"), None)
        text = flags.get(f"{_STREAM}{name}")
        if value is None and text is not None:
            value = _parsed(name, text, default)
        if value is not None:
            values[name] = value
            given.add(name)
    fields = {f"{_STREAM}{name}".replace("-", "_"): value for name, value in values.items()}
    return store_config(argparse.Namespace(**fields)), given


def _parsed(name: str, text: str, default: object) -> object:
    """Parse a setting among Megatron's arguments; `store_config` says what is wrong with it."""
    try:
        if name.endswith("-gb"):
            return gigabytes(text)
        return int(text) if isinstance(default, int) else text
    except ValueError:
        return text
