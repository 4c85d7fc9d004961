"""How many bytes of state this rank keeps in host and device memory.

A number in the configuration is what it says; ``auto`` is what is free when the optimizer is made,
less a reserve. Nothing is pinned that is not there: pinned pages cannot be swapped out, so what is
too much ends in the kernel killing a process, hours later.

    host      `HOST_RESERVE` of the memory, and at least `MIN_HOST_RESERVE_BYTES`, stay free for all
              else (data loading, page cache of a checkpoint); the ranks of a node share the rest
    device    `DEVICE_RESERVE` of the memory stays free: activations are not there yet
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .config import GB, StoreConfig

HOST_RESERVE = 0.1
MIN_HOST_RESERVE_BYTES = 8 * GB
DEVICE_RESERVE = 0.5


@dataclass(frozen=True)
class Memory:
    """What one rank sees before any rank has taken memory for its state.

    Attributes:
        node: tells its node from others; containers of one share it.
        hostname: how people call it.
        host_free: bytes that can be had on the node, or in the cgroup if that has less.
        host_total: bytes of the node or cgroup.
        device_free: bytes of its device.
        device_total: likewise.
        slot_nbytes: pinned bytes that it needs whatever its budget is.
        state_nbytes: bytes of its state.
    """

    node: str
    hostname: str
    host_free: int
    host_total: int
    device_free: int
    device_total: int
    slot_nbytes: int
    state_nbytes: int


@dataclass(frozen=True)
class Budgets:
    """Bytes of state that this rank keeps in memory."""

    device: int
    host: int

    def share(self, part: int, whole: int) -> Budgets:
        """Return what is due to a store that has ``part`` of the ``whole`` bytes of a rank."""
        if part == whole:
            return self
        return Budgets(self.device * part // whole, self.host * part // whole)


def resolve_budgets(config: StoreConfig, rank: int, memory: Mapping[int, Memory]) -> Budgets:
    """Return the budgets of a rank.

    Args:
        config: what the user asked for; the same on all ranks.
        rank: this one.
        memory: of all ranks, taken before any of them used some of it.

    Raises:
        ValueError: the ranks of a node ask for more than can be had; on all ranks alike.
    """
    for node in sorted({each.node for each in memory.values()}):
        _require_host_memory(config, [each for each in memory.values() if each.node == node])
    mine = memory[rank]
    ranks = [each for each in memory.values() if each.node == mine.node]
    device = config.device_bytes
    if device is None:
        device = max(0, mine.device_free - int(DEVICE_RESERVE * mine.device_total))
    host = config.host_bytes
    if host is None:
        slots = sum(each.slot_nbytes for each in ranks)
        host = max(0, (_usable(ranks) - slots) // len(ranks))
    return Budgets(device, host)


def _usable(ranks: list[Memory]) -> int:
    """Return the host bytes of a node beyond the reserve."""
    total = min(each.host_total for each in ranks)
    reserve = max(int(HOST_RESERVE * total), MIN_HOST_RESERVE_BYTES)
    return min(each.host_free for each in ranks) - reserve


def _require_host_memory(config: StoreConfig, ranks: list[Memory]) -> None:
    wanted = config.host_bytes or 0
    asked = sum(min(wanted, each.state_nbytes) + each.slot_nbytes for each in ranks)
    free = min(each.host_free for each in ranks)
    if asked > free:
        flag = "auto" if config.host_bytes is None else f"{config.host_bytes / GB:g}"
        raise ValueError(
            f"--stream-optimizer-state-host-gb {flag}: with slots the {len(ranks)} ranks of "
            f"{ranks[0].node} would pin {asked / GB:.3f} GB of host memory, and {free / GB:.3f} GB "
            "can be had; use less, or less of --stream-optimizer-state-ahead-gb or -bucket-numel"
        )


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes of host memory that can be had, and all of them: (free, total).

    A cgroup's limit counts if it is lower than the machine's memory. Of what a cgroup uses, page
    cache can be had: the kernel takes it back before it kills anybody.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    rows = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    known = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}
    free, total = known["MemAvailable"], known["MemTotal"]
    for directory, limit_name, usage_name in _cgroups(root):
        limit = _number(directory / limit_name)
        usage = _number(directory / usage_name)
        if limit is None or usage is None or limit >= known["MemTotal"]:
            continue
        total = min(total, limit)
        free = min(free, limit - usage + _page_cache(directory))
    return max(free, 0), total


def _cgroups(root: Path) -> list[tuple[Path, str, str]]:
    """Return the memory cgroups of this process, innermost first, with the names of their files."""
    found: list[tuple[Path, str, str]] = []
    limits: tuple[str, ...]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            # Above the second, a process is held up until it has given memory back.
            mount, limits = root / "sys/fs/cgroup", ("memory.max", "memory.high")
            usage = "memory.current"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limits, usage = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        directory = mount / group.lstrip("/")
        # A container may see only the last of these, and under another name.
        for each in (directory, *directory.parents):
            if not each.is_relative_to(mount):
                break
            if (each / limits[0]).exists():
                found += [(each, limit, usage) for limit in limits]
    return found


def _page_cache(directory: Path) -> int:
    """Return the bytes of page cache that a cgroup is charged for; 0 if that cannot be read."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines)
    # Version 1 has a sum of the groups below under names of its own.
    prefix = "" if "file" in stat else "total_"
    return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _number(path: Path) -> int | None:
    """Return the number in a file of a cgroup; None for ``max`` or if it cannot be read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None
