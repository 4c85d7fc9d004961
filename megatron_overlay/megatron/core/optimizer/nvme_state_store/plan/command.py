"""How much memory, disk and time streaming takes for a model, before anything is bought or started.

    python -m megatron.core.optimizer.nvme_state_store plan --params 744e9 --tp 8 --pp 4 --gpu gb300
    python -m megatron.core.optimizer.nvme_state_store plan --hf-config config.json --dp 8 --ep 8
    python -m megatron.core.optimizer.nvme_state_store plan --dp 8 -- --num-layers 32 ...

Sizes in GB are 10^9 bytes. What a rank has is counted by `model` and `ranks`, bytes by `memory`,
time by `step_time`; docs/planning.md has worked examples, and says what was compared with
measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

from ..config import GB, StoreConfig, gigabytes, store_config, validate_optimizer_config
from .architecture import Architecture
from .arguments import (
    GPU_GB,
    PARALLEL,
    STREAM_DEFAULTS,
    STREAM_PREFIX,
    add_arguments,
)
from .choices import ALL_FORMATS, SHOWN_FORMATS, Question, best, rows
from .figure import draw
from .hf import read_hf_config
from .machine import Machine
from .megatron import megatron_architecture
from .megatron_words import megatron_flags
from .model import Model, model_of, model_of_numbers
from .ranks import Parallel, refuse_optimizer
from .rates import UPDATE_PARAMS_PER_S, Rates, read_probe
from .splits import rank_of, refuse_impossible, stages_of
from .text import as_json, as_text

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = (
    "Plan bytes, time and flags for a model and a machine, with and without streaming. Exits with "
    "1 if nothing fits, with 2 if what is asked for makes no sense."
)


def run(arguments: argparse.Namespace) -> int:
    """Print a plan; return 0, 1 if nothing fits, or 2 if what was asked for makes no sense."""
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
    return int(best(choices) is None)


def _question(arguments: argparse.Namespace, warnings: list[str]) -> Question:
    """Return what is asked for.

    Raises:
        ValueError: something is missing, there twice, or not usable.
    """
    flags = megatron_flags(arguments.megatron)
    warnings += _overridden(arguments, flags)
    described = _described(arguments, flags, warnings)
    model, architecture = described.model, described.architecture
    sizes = {name: _parallel_size(arguments, flags, name) for name in PARALLEL}
    parallel = Parallel(**{name: size or 1 for name, size in sizes.items()})
    if sizes["etp"] is None:
        parallel = Parallel(**{**vars(parallel), "etp": parallel.tp})
    optimizer = arguments.optimizer or flags.get("optimizer", "adam")
    refuse_optimizer(optimizer)
    stages = stages_of(flags)
    warnings += stages.warnings
    if flags.get("muon-scalar-optimizer", "adam") != "adam":
        warnings.append("-- --muon-scalar-optimizer: what is no matrix is counted as Adam's")
    if optimizer == "muon" and not model.layers:
        warnings.append("--optimizer muon with --params: a slot must hold the largest matrix")
    config, given = _config(arguments, flags, optimizer)
    grads = arguments.grads or ("bf16" if "grad-reduce-in-bf16" in flags else "fp32")
    inner = "muon" if optimizer == "muon" else arguments.inner
    machine = _machine(arguments)
    # Split main params are what BF16 params lack.
    accepted = tuple(each for each in ALL_FORMATS if each[0] != "split" or "fp16" not in flags)
    return Question(
        model=model,
        architecture=architecture,
        stages=stages,
        parallel=parallel,
        optimizer=optimizer,
        grads=grads,
        inner=arguments.inner,
        rank=rank_of(model, architecture, stages, parallel, optimizer),
        machine=replace(machine, gpus=min(machine.gpus, parallel.world)),
        gpus_per_node=machine.gpus,
        rates=_rates(arguments, inner),
        between=arguments.forward_backward_s,
        endurance=None if arguments.endurance_tb is None else arguments.endurance_tb * 1e12,
        config=config,
        formats=_formats(config, given, accepted, is_all=arguments.all or arguments.json),
        accepted_formats=accepted,
        are_tiers_given=bool({"host-gb", "device-gb"} & given),
        has_directory="dir" in given,
    )


@dataclass(frozen=True)
class _Described:
    """A model, with its sizes if more than the number of params is known."""

    model: Model
    architecture: Architecture | None = None


def _described(
    arguments: argparse.Namespace, flags: dict[str, str], warnings: list[str]
) -> _Described:
    described = {"num-layers", "hidden-size", "num-attention-heads"} & set(flags)
    sources = (arguments.params is not None, arguments.hf_config is not None, bool(described))
    if sum(sources) != 1:
        raise ValueError(
            f"{sum(sources)} descriptions of the model: expected one of --params, --hf-config, and "
            "Megatron's --num-layers, --hidden-size, ... after --"
        )
    if arguments.params is not None:
        return _Described(model_of_numbers(arguments.params, arguments.expert_params))
    if arguments.expert_params:
        raise ValueError("--expert-params: expected with --params only; else they are counted")
    if arguments.hf_config is not None:
        architecture, found = read_hf_config(arguments.hf_config)
    else:
        architecture, found = megatron_architecture(flags)
    warnings += found
    refuse_impossible(architecture)
    return _Described(model_of(architecture), architecture)


def _overridden(arguments: argparse.Namespace, flags: Mapping[str, str]) -> Iterator[str]:
    """Yield which of Megatron's arguments give way to this command's own."""
    defaults: dict[str, object] = {**dict.fromkeys(PARALLEL, 1), "optimizer": "adam"}
    defaults |= {f"{STREAM_PREFIX}{name}": each for name, each in STREAM_DEFAULTS.items()}
    for name, default in defaults.items():
        other = PARALLEL.get(name, name)
        value, text = getattr(arguments, name.replace("-", "_"), None), flags.get(other)
        if value is not None and text is not None and _parsed(name, text, default) != value:
            yield f"--{name} {value} is planned with, not -- --{other} {text}"


def _parallel_size(
    arguments: argparse.Namespace, flags: Mapping[str, str], name: str
) -> int | None:
    """Return a size; None if it is not given. Zero is refused by `Parallel`."""
    given: int | None = getattr(arguments, name)
    text = flags.get(PARALLEL[name])
    if given is None and text is not None:
        if not text.isdecimal():
            raise ValueError(f"-- --{PARALLEL[name]} {text}: expected a whole number")
        given = int(text)
    if given == 0:
        raise ValueError(f"--{name} 0: expected a positive number")
    return given


def _machine(arguments: argparse.Namespace) -> Machine:
    if arguments.gpus_per_node == 0:
        raise ValueError("--gpus-per-node 0: expected a positive number")
    if arguments.gpu is not None and arguments.gpu_gb is not None:
        raise ValueError(f"--gpu {arguments.gpu} and --gpu-gb {arguments.gpu_gb:g}: expected one")
    gpu_gb = arguments.gpu_gb if arguments.gpu is None else GPU_GB[arguments.gpu]
    return Machine(
        arguments.gpus_per_node,
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


def _formats(
    config: StoreConfig,
    given: set[str],
    accepted: tuple[tuple[str, str], ...],
    *,
    is_all: bool,
) -> tuple[tuple[str, str], ...]:
    """Return the formats to be compared: all, the usual ones, or what was given."""
    is_given = bool({"main-storage", "moment-dtype"} & given)
    return tuple(
        (main_storage, moment_dtype)
        for main_storage, moment_dtype in (ALL_FORMATS if is_all or is_given else SHOWN_FORMATS)
        if (main_storage, moment_dtype) in accepted
        if "main-storage" not in given or main_storage == config.main_storage
        if "moment-dtype" not in given or moment_dtype == config.moment_dtype
    )


_REFUSABLE = (
    *("use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload"),
    *("optimizer_cuda_graph", "reuse_grad_buf_for_mxfp8_param_ag"),
)
"""What `validate_optimizer_config` looks at; Megatron's arguments have these names."""


def _config(
    arguments: argparse.Namespace, flags: Mapping[str, str], optimizer: str
) -> tuple[StoreConfig, set[str]]:
    """Return the settings of the store, and the names of those that were given.

    Raises:
        ValueError: training with them would be refused at its start.
    """
    values = dict(STREAM_DEFAULTS)
    given = set()
    for name, default in STREAM_DEFAULTS.items():
        value = getattr(arguments, f"{STREAM_PREFIX}{name}".replace("-", "_"), None)
        text = flags.get(f"{STREAM_PREFIX}{name}")
        if value is None and text is not None:
            value = _parsed(name, text, default)
        if value is not None:
            values[name] = value
            given.add(name)
    fields = {f"{STREAM_PREFIX}{name}".replace("-", "_"): value for name, value in values.items()}
    config = store_config(SimpleNamespace(**fields))
    validate_optimizer_config(
        SimpleNamespace(
            **fields,
            stream_optimizer_state_to_disk=True,
            defer_main_param_initialization=True,
            optimizer=optimizer,
            bf16="fp16" not in flags,
            fp16="fp16" in flags,
            **{name: name.replace("_", "-") in flags for name in _REFUSABLE},
        )
    )
    return config, given


def _parsed(name: str, text: str, default: object) -> object:
    """Parse a setting among Megatron's arguments; `store_config` says what is wrong with it."""
    try:
        if name.endswith("-gb"):
            return gigabytes(text)
        return int(text) if isinstance(default, int) else text
    except ValueError:
        return text
