"""Bytes of a rank on the device, in pinned host memory and on disk, stock and streamed.

Buckets, formats and tiers come from the modules that the store uses; the rest is the formula of
`staging`. On the device:

    both          params 2, gradients 4 an element; BF16 gradients take 2, and 4 for each element
                  of the shard in the step, when Megatron makes them FP32
    stock         main params and state, FP32, of the shard
                  + torch's AdamW: 4 bytes for each element of the shard (measured: 8.6 GB for
                    2.147 B params, 2026-11-29); Transformer Engine's FusedAdam: nothing
    streamed      device tier + slots + FP32 copies of what is stored otherwise
                  + torch's AdamW: 4 bytes for each element of the largest bucket
    Muon, both    16 bytes for each element of the largest matrix, for Newton-Schulz (measured:
                  1.1 GB for 8192 x 8192, 2026-11-30)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..budgets import Budgets, Memory, resolve_budgets
from ..config import MIN_HOST_SLOTS, NUM_DEVICE_SLOTS, StoreConfig
from ..formats import FP32, main_format, moment_format
from ..layout import MAIN, Layout, make_layout, make_whole_layout
from ..placement import Placement, Tier, place_buckets
from .machine import DeviceBytes, Machine
from .ranks import Rank, Share

PARAM_BYTES = 2
GRAD_BYTES = {"fp32": 4, "bf16": 2}
_FP32_BYTES = 4
_NEWTON_SCHULZ_BYTES = 16


@dataclass(frozen=True)
class StorePlan:
    """One store of a rank.

    Attributes:
        layout: its buckets.
        placement: their tiers.
        num_host_slots: slots of the disk tier.
    """

    layout: Layout
    placement: Placement
    num_host_slots: int

    @property
    def device_slot_nbytes(self) -> int:
        """Bytes of its device slots: of `Staging`."""
        away = len(self.placement.places) - len(self.placement.indices(Tier.DEVICE))
        pairs = zip(self.layout.formats, self.layout.slot_numels, strict=True)
        decoded = sum(_FP32_BYTES * numel for each, numel in pairs if each != FP32)
        return min(NUM_DEVICE_SLOTS, away) * self.layout.slot_nbytes + decoded

    @property
    def host_slot_nbytes(self) -> int:
        """Bytes of its host slots."""
        return self.num_host_slots * self.layout.slot_nbytes

    @property
    def away_nbytes(self) -> int:
        """Bytes that cross PCIe in a step, each way."""
        return self.layout.nbytes - self.placement.device_nbytes

    @property
    def read_nbytes(self) -> int:
        """Bytes that a step reads: none if each bucket on disk has a host slot of its own."""
        on_disk = len(self.placement.indices(Tier.DISK))
        return 0 if self.num_host_slots >= on_disk else self.placement.disk_nbytes

    @property
    def behind_nbytes(self) -> int:
        """Bytes that may be written behind a step, and as many read before it, if any are."""
        return min(self.placement.disk_nbytes, self.host_slot_nbytes)


@dataclass(frozen=True)
class Streamed:
    """All stores of a rank.

    Attributes:
        config: the settings.
        stores: one after the other in a step.
        device: the bytes on its GPU.
        most_host_slot_nbytes: of its host slots, however much is on disk.
    """

    config: StoreConfig
    stores: tuple[StorePlan, ...]
    device: DeviceBytes
    most_host_slot_nbytes: int

    def is_like(self, other: Streamed) -> bool:
        """Whether the same bytes are in the same places, whatever budgets led there."""
        return (self.stores, self.device) == (other.stores, other.device)

    @property
    def state_nbytes(self) -> int:
        """Bytes of state, wherever they are."""
        return sum(store.layout.nbytes for store in self.stores)

    @property
    def host_tier_nbytes(self) -> int:
        """Bytes of the host tier."""
        return sum(store.placement.host_nbytes for store in self.stores)

    @property
    def host_nbytes(self) -> int:
        """Pinned bytes: host tier and host slots."""
        return self.host_tier_nbytes + sum(store.host_slot_nbytes for store in self.stores)

    @property
    def disk_nbytes(self) -> int:
        """Bytes on disk."""
        return sum(store.placement.disk_nbytes for store in self.stores)

    @property
    def read_nbytes(self) -> int:
        """Bytes that a step reads."""
        return sum(store.read_nbytes for store in self.stores)

    @property
    def behind_nbytes(self) -> int:
        """Bytes that may be written behind a step."""
        return sum(store.behind_nbytes for store in self.stores)

    @property
    def ahead_nbytes(self) -> int:
        """Bytes that may be read ahead of a step."""
        return sum(store.behind_nbytes for store in self.stores if store.read_nbytes)

    @property
    def away_nbytes(self) -> int:
        """Bytes that cross PCIe in a step, each way."""
        return sum(store.away_nbytes for store in self.stores)

    @property
    def bucket_nbytes(self) -> int:
        """Bytes of the largest bucket."""
        return max((store.layout.slot_nbytes for store in self.stores), default=0)

    def lacks(self, machine: Machine) -> list[str]:
        """Return of what there is too little: ``GPU``, ``host``, ``disk``."""
        # The store asks for slots, too, if nothing turns out to be on disk: `budgets`.
        asked = min(self.config.host_bytes or 0, self.state_nbytes) + self.most_host_slot_nbytes
        pairs = (
            ("GPU", self.device.total, machine.gpu_bytes),
            ("host", asked * machine.gpus, machine.host_bytes),
            ("host", self.host_nbytes * machine.gpus, machine.usable_host_bytes),
            ("disk", self.disk_nbytes * machine.gpus, machine.disk_bytes),
        )
        lacking = [name for name, needed, there in pairs if there is not None and needed > there]
        return list(dict.fromkeys(lacking))


def stock_device_bytes(rank: Rank, grads: str, inner: str, machine: Machine) -> DeviceBytes:
    """Return what a stock run has on a GPU: see the module's docstring."""
    state = sum(_FP32_BYTES * (1 + len(each.state_keys)) * each.numel for each in rank.shares)
    temporary = _FP32_BYTES * rank.main_params if inner == "torch" else 0
    return _device_bytes(rank, grads, machine, state, 0, temporary)


def _device_bytes(
    rank: Rank, grads: str, machine: Machine, state: int, slots: int, temporary: int
) -> DeviceBytes:
    copies = 0 if grads == "fp32" else _FP32_BYTES * rank.main_params
    return DeviceBytes(
        params=PARAM_BYTES * rank.params,
        grads=GRAD_BYTES[grads] * rank.params + copies,
        state=state,
        slots=slots,
        temporary=max(temporary, _NEWTON_SCHULZ_BYTES * rank.largest_matrix),
        reserve=machine.reserve_bytes,
    )


def store_layouts(rank: Rank, config: StoreConfig) -> list[tuple[StoreConfig, Layout]]:
    """Return the settings and the layout of each store, which share the slots of a rank."""
    alone = [layout_of(share, config).nbytes for share in rank.shares]
    parts = [config.part(Fraction(nbytes, max(sum(alone), 1))) for nbytes in alone]
    return [(part, layout_of(share, part)) for share, part in zip(rank.shares, parts, strict=True)]


def layout_of(share: Share, config: StoreConfig) -> Layout:
    """Return the layout that a store makes of a share, whose entries are taken as one."""
    return _layout_of(share, config.bucket_numel, config.main_storage, config.moment_dtype)


@functools.lru_cache(maxsize=64)  # every choice of tiers has the same one
def _layout_of(share: Share, numel: int, main_storage: str, moment_dtype: str) -> Layout:
    formats = [main_format(main_storage)]
    formats += [moment_format(key, moment_dtype) for key in share.state_keys]
    if share.matrices:
        sizes = [[each] * len(formats) for each in share.matrices]
        groups = [0] * len(sizes)
        return make_whole_layout(sizes, groups, numel, share.state_keys, formats)
    return make_layout([share.numel], numel, share.state_keys, formats)


def num_host_slots(config: StoreConfig, layout: Layout, on_disk: int) -> int:
    """Return what `working_set`, which needs torch, comes to for so many buckets on disk."""
    wanted = config.ahead_bytes // max(layout.slot_nbytes, 1)
    return min(on_disk, max(MIN_HOST_SLOTS, wanted))


def stream(rank: Rank, config: StoreConfig, grads: str, inner: str, machine: Machine) -> Streamed:
    """Plan all stores of a rank.

    Raises:
        ValueError: a budget is ``auto`` and the memory it is a part of is not known, or the ranks
            of a node would pin more than it has.
    """
    layouts = [layout for _, layout in store_layouts(rank, config)]
    budgets = _budgets(rank, layouts, config, grads, machine)
    whole = sum(layout.nbytes for layout in layouts)
    stores = []
    for part, layout in store_layouts(rank, config):
        mine = budgets.share(layout.nbytes, whole)
        placement = place_buckets(layout, mine.device, mine.host, len(config.directories))
        slots = num_host_slots(part, layout, len(placement.indices(Tier.DISK)))
        stores.append(StorePlan(layout, placement, slots))
    temporary = max((_FP32_BYTES * each.slot_numels[MAIN] for each in layouts), default=0)
    device = _device_bytes(
        rank,
        grads,
        machine,
        sum(store.placement.device_nbytes for store in stores),
        sum(store.device_slot_nbytes for store in stores),
        temporary if inner == "torch" else 0,
    )
    return Streamed(config, tuple(stores), device, most_host_slot_nbytes(rank, config))


def most_host_slot_nbytes(rank: Rank, config: StoreConfig) -> int:
    """Return the pinned bytes that host slots take, however much is on disk."""
    return sum(
        num_host_slots(part, layout, len(layout.buckets)) * layout.slot_nbytes
        for part, layout in store_layouts(rank, config)
    )


def _budgets(
    rank: Rank, layouts: Sequence[Layout], config: StoreConfig, grads: str, machine: Machine
) -> Budgets:
    """Return the budgets of a rank; ``auto`` as at a start on a machine that does nothing else."""
    if config.host_bytes is not None and config.device_bytes is not None:
        return Budgets(config.device_bytes, config.host_bytes)
    for flag, budget, known, needed in (
        ("host-gb", config.host_bytes, machine.host_bytes, "--host-gb"),
        ("device-gb", config.device_bytes, machine.gpu_bytes, "--gpu or --gpu-gb"),
    ):
        if budget is None and known is None:
            raise ValueError(f"--stream-optimizer-state-{flag} auto: expected {needed} with it")
    host, gpu = machine.host_bytes or 0, machine.gpu_bytes or 0
    memory = Memory(
        node="node",
        hostname="the node",
        host_free=host,
        host_total=host,
        device_free=max(gpu - (PARAM_BYTES + GRAD_BYTES[grads]) * rank.params, 0),
        device_total=gpu,
        slot_nbytes=most_host_slot_nbytes(rank, config),
        state_nbytes=sum(layout.nbytes for layout in layouts),
    )
    if config.host_bytes is None or machine.host_bytes is not None:
        return resolve_budgets(config, 0, dict.fromkeys(range(machine.gpus), memory))
    return Budgets(max(0, memory.device_free - gpu // 2), config.host_bytes)
