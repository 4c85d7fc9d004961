"""What could be chosen: formats and tiers side by side, the best that fits, and its flags."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import DEFAULT_BUCKET_NUMEL, GB, NUM_DEVICE_SLOTS, StoreConfig
from ..formats import MAIN_STORAGES, MOMENT_DTYPES
from .architecture import Architecture
from .machine import DeviceBytes, Machine
from .memory import Streamed, most_host_slot_nbytes, stock_device_bytes, stream
from .model import Model
from .ranks import Parallel, Rank
from .rates import Rates
from .splits import Stages, rank_of
from .step_time import StepTime, step_time, written_per_day

SHOWN_FORMATS = (
    *(("fp32", "fp32"), ("split", "fp32"), ("fp32", "bf16")),
    *(("split", "bf16"), ("split", "fp8e4m3")),
)
"""(main storage, moment dtype): those of the table in docs/running.md."""
ALL_FORMATS = tuple(itertools.product(MAIN_STORAGES, MOMENT_DTYPES))
LOSS = {"fp32": 0, "bf16": 1, "fp16": 1, "fp8e4m3": 2, "fp8e5m2": 3}
"""How much is lost of moments: only their order counts."""
_GRAIN = GB // 10
"""Budgets are suggested in tenths of a GB."""


@dataclass(frozen=True)
class Question:
    """What a plan is asked for.

    Attributes:
        model: its params.
        architecture: its sizes, if more than the number of params is known.
        stages: how layers go to the stages of a pipeline.
        parallel: how it is split.
        optimizer: one of `ranks.OPTIMIZERS`.
        grads: dtype of gradients.
        inner: whose Adam it is: ``te`` or ``torch``.
        rank: the one with the most state.
        machine: a node, with as many GPUs as are used there.
        gpus_per_node: that it has.
        rates: of its paths.
        between: seconds of forward and backward, if they are known.
        endurance: bytes that the disks of a node may take in their life, if that is known.
        config: the settings that were given; defaults elsewhere.
        formats: (main storage, moment dtype) to be compared.
        accepted_formats: all that go with the model params.
        are_tiers_given: the budgets in ``config`` are to be taken as they are.
        has_directory: one was given.
    """

    model: Model
    architecture: Architecture | None
    stages: Stages
    parallel: Parallel
    optimizer: str
    grads: str
    inner: str
    rank: Rank
    machine: Machine
    gpus_per_node: int
    rates: Rates
    between: float | None
    endurance: float | None
    config: StoreConfig
    formats: tuple[tuple[str, str], ...]
    accepted_formats: tuple[tuple[str, str], ...]
    are_tiers_given: bool
    has_directory: bool

    @property
    def stock(self) -> DeviceBytes:
        """What a stock run has on a GPU."""
        return stock_device_bytes(self.rank, self.grads, self.inner, self.machine)

    def split(self, parallel: Parallel) -> Question:
        """Return the same question for another split.

        Raises:
            ValueError: Megatron would not split the model so.
        """
        rank = rank_of(self.model, self.architecture, self.stages, parallel, self.optimizer)
        machine = replace(self.machine, gpus=min(self.gpus_per_node, parallel.world))
        return replace(self, parallel=parallel, rank=rank, machine=machine)


@dataclass(frozen=True)
class Row:
    """One choice of formats and tiers.

    Attributes:
        streamed: its bytes.
        time: its step.
        lacks: of what there is too little.
        written_per_day: bytes that the disks of a node take.
    """

    streamed: Streamed
    time: StepTime
    lacks: tuple[str, ...]
    written_per_day: float | None

    @property
    def tiers(self) -> str:
        """Which tiers hold state, joined by plus signs."""
        s = self.streamed
        sizes = (("device", s.device.state), ("host", s.host_tier_nbytes), ("disk", s.disk_nbytes))
        return "+".join(name for name, nbytes in sizes if nbytes) or "none"

    @property
    def name(self) -> str:
        """Formats and tiers, for people."""
        config = self.streamed.config
        return f"main {config.main_storage}, moments {config.moment_dtype}, {self.tiers}"

    @property
    def loss(self) -> int:
        """How much is lost of the moments; 0: nothing."""
        return LOSS[self.streamed.config.moment_dtype]

    @property
    def waits(self) -> float:
        """Seconds that training waits for it; infinite if that is not known."""
        known = self.time.step if self.time.exposed is None else self.time.exposed
        return math.inf if known is None else known


def rows(question: Question) -> list[Row]:
    """Return every choice, by formats, in the order disk, host, device.

    Raises:
        ValueError: a given budget does not go with the machine.
    """
    found: list[Row] = []
    for main_storage, moment_dtype in question.formats:
        config = replace(question.config, main_storage=main_storage, moment_dtype=moment_dtype)
        choices = [config] if question.are_tiers_given else _tier_choices(question, config)
        for choice in choices:
            row = _row(question, choice)
            if all(not row.streamed.is_like(each.streamed) for each in found):
                found.append(row)
    return found


def _row(question: Question, config: StoreConfig) -> Row:
    q = question
    streamed = stream(q.rank, config, q.grads, q.inner, q.machine)
    time = step_time(streamed, q.rank, q.machine, q.rates, q.between)
    wear = written_per_day(streamed, q.machine, time, q.between)
    return Row(streamed, time, tuple(streamed.lacks(q.machine)), wear)


def _tier_choices(question: Question, config: StoreConfig) -> list[StoreConfig]:
    """Return settings with nothing in memory, then as much as the host and then the GPU has."""
    q = question
    nothing = replace(config, device_bytes=0, host_bytes=0)
    bare = stream(q.rank, nothing, q.grads, q.inner, q.machine)
    state = bare.state_nbytes
    choices = [nothing]
    usable = q.machine.usable_host_bytes
    if usable is not None:
        # As at a start of the store: with slots, although none are needed if nothing is on disk.
        mine = usable // q.machine.gpus - most_host_slot_nbytes(q.rank, nothing)
        choices.append(replace(nothing, host_bytes=_budget(mine, state)))
    if q.machine.gpu_bytes is not None and q.machine.reserve_bytes:
        free = q.machine.gpu_bytes - bare.device.total
        device = replace(choices[-1], device_bytes=_budget(free, state))
        choices.append(_trimmed(question, device))
    return choices


def _trimmed(question: Question, config: StoreConfig) -> StoreConfig:
    """Return settings that pin no more for the host tier than it holds, if nothing is on disk.

    The device's budget is filled first: what it took, the host need not hold.
    """
    q = question
    streamed = stream(q.rank, config, q.grads, q.inner, q.machine)
    if streamed.disk_nbytes or not config.host_bytes:
        return config
    # Stores have their parts of a budget, and no bucket is cut: a bucket each may be needed more.
    for more in (0, streamed.bucket_nbytes * len(streamed.stores)):
        enough = -(-(streamed.host_tier_nbytes + more) // _GRAIN) * _GRAIN
        tried = replace(config, host_bytes=min(config.host_bytes, enough))
        if not stream(q.rank, tried, q.grads, q.inner, q.machine).disk_nbytes:
            return tried
    return config


def _budget(free: int, state: int) -> int:
    """Return a budget in whole grains: what is free, but not more than all state needs."""
    return max(min(free // _GRAIN, -(-state // _GRAIN)), 0) * _GRAIN


def best(choices: Sequence[Row]) -> Row | None:
    """Return the best that fits: the least loss, then the least waiting, then the fewest bytes."""
    fitting = [row for row in choices if not row.lacks]
    return min(fitting, key=_cost, default=None)


def _cost(row: Row) -> tuple[float, ...]:
    s = row.streamed
    return (row.loss, row.waits, s.disk_nbytes, s.host_nbytes, s.device.total)


def faster(choices: Sequence[Row], than: Row) -> Row | None:
    """Return what would fit and take less than 0.8 of the time, at the least loss; None if none."""
    quick = [row for row in choices if not row.lacks and row.waits < 0.8 * than.waits]
    return min(quick, key=_cost, default=None)


def flags(question: Question, row: Row) -> list[str]:
    """Return Megatron's flags for a choice, each with its value."""
    config = row.streamed.config
    found = [] if question.optimizer in ("sgd", "muon") else ["--use-distributed-optimizer"]
    prefix = "--stream-optimizer-state"
    found.append(f"{prefix}-to-disk")
    if row.streamed.disk_nbytes:
        # A place holder, if there is no better: the default is no local disk on many machines.
        given = ",".join(map(str, config.directories)) if question.has_directory else "/local/nvme"
        found.append(f"{prefix}-dir {given}")
    if config.main_storage != "fp32":
        found.append(f"{prefix}-main-storage {config.main_storage}")
    if config.moment_dtype != "fp32":
        found.append(f"{prefix}-moment-dtype {config.moment_dtype}")
    for name, budget in (
        ("host", config.host_bytes),
        ("device", config.device_bytes),
        ("ahead", config.ahead_bytes),
    ):
        if budget != 0:
            found.append(f"{prefix}-{name}-gb {'auto' if budget is None else f'{budget / GB:g}'}")
    if config.bucket_numel != DEFAULT_BUCKET_NUMEL // NUM_DEVICE_SLOTS:
        found.append(f"{prefix}-bucket-numel {config.bucket_numel * NUM_DEVICE_SLOTS}")
    return found
