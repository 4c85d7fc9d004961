"""Budgets are what is free, or what was asked for if it is there; all ranks are refused alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from megatron.core.optimizer.nvme_state_store.budgets import (
    DEVICE_RESERVE,
    HOST_RESERVE,
    MIN_HOST_RESERVE_BYTES,
    Budgets,
    Memory,
    host_memory,
    resolve_budgets,
)
from megatron.core.optimizer.nvme_state_store.config import GB, StoreConfig

# ---------------------------------------------------------------------------------- what a host has

MEMINFO = """MemTotal:       1000 kB
MemFree:         100 kB
MemAvailable:    600 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
"""
FREE, TOTAL = 600 * 1024, 1000 * 1024
V1_UNLIMITED = 9223372036854771712
V2_STAT = "anon 10\nfile 99\nactive_file 20\ninactive_file 30\nshmem 5\n"
V1_STAT = (
    "cache 99\nactive_file 1\ninactive_file 2\nhierarchical_memory_limit 7\n"
    "total_cache 99\ntotal_active_file 20\ntotal_inactive_file 30\n"
)
CACHE = 50
"""Of both: page cache, without shared memory."""


def v2(group: str, limit: object, usage: object, stat: str | None = V2_STAT) -> dict[str, str]:
    """Return the files of a cgroup of version 2, by path."""
    files = {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n"}
    if stat is not None:
        files["memory.stat"] = stat
    return {f"sys/fs/cgroup/{group}/{name}": text for name, text in files.items()}


def v1(group: str, limit: object, usage: object, stat: str | None = V1_STAT) -> dict[str, str]:
    """Return the files of a cgroup of version 1, by path."""
    files = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n"}
    if stat is not None:
        files["memory.stat"] = stat
    return {f"sys/fs/cgroup/memory/{group}/{name}": text for name, text in files.items()}


def machine(root: Path, *groups: Mapping[str, str], cgroup: str | None = None) -> Path:
    """Make ``proc`` and ``sys`` of a machine below ``root``."""
    files = {"proc/meminfo": MEMINFO}
    if cgroup is not None:
        files["proc/self/cgroup"] = cgroup
    for each in (files, *groups):
        for name, text in each.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root


def test_without_a_cgroup_the_machine_counts(tmp_path: Path) -> None:
    """What is available, not what is free: page cache can be had."""
    assert host_memory(machine(tmp_path)) == (FREE, TOTAL)
    assert host_memory(machine(tmp_path, cgroup="0::/\n")) == (FREE, TOTAL)
    assert host_memory(machine(tmp_path, cgroup="")) == (FREE, TOTAL)


def test_where_a_cgroup_is_held_up_counts_like_its_limit(tmp_path: Path) -> None:
    """Above `memory.high` a process is not killed but waits."""
    group = v2("job", "max", 100) | {"sys/fs/cgroup/job/memory.high": "400\n"}
    root = machine(tmp_path, group, cgroup="0::/job\n")

    assert host_memory(root) == (400 - 100 + CACHE, 400)


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_below_the_machine_counts_and_its_page_cache_can_be_had(
    version: int, tmp_path: Path
) -> None:
    """The kernel takes that back before it kills anybody."""
    make, line = ((v1, "5:cpu,memory:/job\n1:name=x:/y\n"), (v2, "0::/job\n"))[version - 1]
    root = machine(tmp_path, make("job", 400_000, 150_000), cgroup=line)
    assert host_memory(root) == (400_000 - 150_000 + CACHE, 400_000)


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_that_is_full_has_nothing(version: int, tmp_path: Path) -> None:
    """Usage may be above a limit that was lowered; nothing is not less than nothing."""
    make, line = ((v1, "5:memory:/job\n"), (v2, "0::/job\n"))[version - 1]
    root = machine(tmp_path, make("job", 400_000, 500_000), cgroup=line)
    assert host_memory(root) == (0, 400_000)


@pytest.mark.parametrize(
    ("group", "line"),
    [
        (v2("job", "max", 900_000), "0::/job\n"),
        (v2("job", TOTAL, 900_000), "0::/job\n"),
        (v1("job", V1_UNLIMITED, 900_000), "5:memory:/job\n"),
        (v1("job", TOTAL + 1, 900_000), "5:memory:/job\n"),
        # Controllers of other things, and groups of other processes.
        (v1("job", 1000, 100), "5:cpu:/job\n4:memoryless:/job\n"),
        (v1("other", 1000, 100), "5:memory:/job\n"),
        (v2("other", 1000, 100), "0::/job\n"),
    ],
)
def test_a_limit_that_limits_nothing_is_passed_over(
    group: Mapping[str, str], line: str, tmp_path: Path
) -> None:
    assert host_memory(machine(tmp_path, group, cgroup=line)) == (FREE, TOTAL)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("inner", [300_000, None])
@pytest.mark.parametrize(
    ("outer", "usage", "expected"),
    [
        (400_000, 390_000, 10_000 + CACHE),  # a neighbour has used up the outer one
        (400_000, 100_000, None),
        (200_000, 100_000, 100_000 + CACHE),
    ],
)
def test_of_nested_limits_the_tightest_counts(
    version: int, inner: int | None, outer: int, usage: int, expected: int | None, tmp_path: Path
) -> None:
    """For what is free and for the whole, each by itself."""
    make, line = ((v1, "5:memory:/a/b/c\n"), (v2, "0::/a/b/c\n"))[version - 1]
    unlimited = (V1_UNLIMITED, "max")[version - 1]
    root = machine(
        tmp_path,
        make("a", outer, usage),
        make("a/b", unlimited, usage),
        make("a/b/c", inner or unlimited, 50_000),
        cgroup=line,
    )
    free, total = host_memory(root)
    assert total == min(outer, inner or outer)
    of_inner = FREE if inner is None else inner - 50_000 + CACHE
    assert free == min(of_inner, outer - usage + CACHE)
    assert expected is None or free == expected


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_group_under_another_name(version: int, tmp_path: Path) -> None:
    """As the root of what is mounted there."""
    make, line = ((v1, "5:memory:/docker/0123\n"), (v2, "0::/docker/0123\n"))[version - 1]
    root = machine(tmp_path, make("", 400_000, 150_000), cgroup=line)
    assert host_memory(root) == (250_000 + CACHE, 400_000)


def test_a_machine_of_both_versions_has_its_memory_in_one(tmp_path: Path) -> None:
    """Systemd's hybrid: version 2 is there, without a memory controller."""
    root = machine(tmp_path, v1("job", 400_000, 150_000), cgroup="0::/job\n4:memory:/job\n")
    assert host_memory(root) == (250_000 + CACHE, 400_000)


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_that_is_not_told_is_not_counted_on(version: int, tmp_path: Path) -> None:
    """Some sandboxes have limits and no statistics: less is taken then, and nothing fails."""
    make, line = ((v1, "5:memory:/job\n"), (v2, "0::/job\n"))[version - 1]
    root = machine(tmp_path, make("job", 400_000, 150_000, None), cgroup=line)
    assert host_memory(root) == (250_000, 400_000)


def test_a_limit_without_usage_is_passed_over(tmp_path: Path) -> None:
    """Nothing can be said of it."""
    files = v2("job", 400_000, "")
    assert host_memory(machine(tmp_path, files, cgroup="0::/job\n")) == (FREE, TOTAL)


def test_this_machine_has_memory() -> None:
    free, total = host_memory()
    assert 0 < free <= total


# -------------------------------------------------------------------------------- what a rank takes


def ranks(
    nodes: str,
    host_free: int = 1000 * GB,
    slot: int = 0,
    state: int = 500 * GB,
    device_free: int = 130 * GB,
) -> dict[int, Memory]:
    """Return ranks on nodes that are called by one letter each."""
    return {
        rank: Memory(
            node=node,
            hostname=f"host of {node}",
            host_free=host_free,
            host_total=1000 * GB,
            device_free=device_free,
            device_total=140 * GB,
            slot_nbytes=slot,
            state_nbytes=state,
        )
        for rank, node in enumerate(nodes)
    }


def configured(host: int | None = 0, device: int | None = 0) -> StoreConfig:
    return StoreConfig((Path("/x"),), host_bytes=host, device_bytes=device)


def test_a_number_is_what_it_says() -> None:
    """Also for a rank whose node has room for more."""
    memory = ranks("aab")
    for rank in memory:
        assert resolve_budgets(configured(7 * GB, 3 * GB), rank, memory) == Budgets(3 * GB, 7 * GB)
        assert resolve_budgets(configured(), rank, memory) == Budgets(0, 0)


@pytest.mark.parametrize("nodes", ["a", "aaaa", "aaaabbbb", "ab", "aab"])
@pytest.mark.parametrize("slot", [0, 10 * GB])
def test_auto_shares_a_node_among_its_ranks_and_leaves_the_reserve(nodes: str, slot: int) -> None:
    """With the slots of all of them; what other nodes have does not matter."""
    memory = ranks(nodes, slot=slot)
    budgets = {rank: resolve_budgets(configured(None), rank, memory) for rank in memory}
    for node in set(nodes):
        here = [rank for rank in memory if nodes[rank] == node]
        pinned = sum(budgets[rank].host + slot for rank in here)
        assert 0 <= 1000 * GB - int(HOST_RESERVE * 1000 * GB) - pinned < len(here)
        assert len({budgets[rank] for rank in here}) == 1


def test_auto_goes_by_the_rank_that_sees_least() -> None:
    """Ranks of a node may be in cgroups of their own, or have been slower to look."""
    memory = ranks("aa") | {2: ranks("a", host_free=500 * GB)[0]}
    budgets = {resolve_budgets(configured(None), rank, memory).host for rank in memory}
    assert budgets == {400 * GB // 3}


def test_the_reserve_of_a_small_host_is_not_a_small_share() -> None:
    """A tenth of 20 GB would be gone with the first checkpoint."""
    small = Memory("a", "a", 20 * GB, 20 * GB, 0, 0, 0, 100 * GB)
    assert resolve_budgets(configured(None), 0, {0: small}).host == (
        20 * GB - MIN_HOST_RESERVE_BYTES
    )


def test_auto_on_a_host_without_room_keeps_nothing_there() -> None:
    """Not a negative budget."""
    memory = ranks("aa", host_free=50 * GB, slot=20 * GB)
    assert resolve_budgets(configured(None), 1, memory).host == 0


@pytest.mark.parametrize(("free", "expected"), [(130, 60), (80, 10), (70, 0), (5, 0)])
def test_auto_leaves_room_on_the_device(free: int, expected: int) -> None:
    """Activations are not there yet."""
    assert DEVICE_RESERVE == 0.5
    memory = ranks("aa", device_free=free * GB)
    assert resolve_budgets(configured(0, None), 1, memory) == Budgets(expected * GB, 0)


def refusals(config: StoreConfig, memory: Mapping[int, Memory]) -> list[str]:
    """Return what each rank is told."""
    found = []
    for rank in memory:
        with pytest.raises(ValueError, match="--stream-optimizer-state-host-gb") as caught:
            resolve_budgets(config, rank, memory)
        found.append(str(caught.value))
    return found


def test_more_than_a_node_has_is_refused_by_name_and_on_all_ranks_alike() -> None:
    """Also on those of nodes that have enough: else these would wait for the others for ever."""
    memory = ranks("aabbbb", slot=10 * GB)
    resolve_budgets(configured(240 * GB), 0, memory)

    (told,) = set(refusals(configured(241 * GB), memory))

    assert "--stream-optimizer-state-host-gb 241: with slots the 4 ranks of b would pin" in told
    assert "would pin 1004.000 GB of host memory, and 1000.000 GB can be had" in told


def test_what_the_state_does_not_need_is_not_asked_for() -> None:
    """A generous number is no over-commitment."""
    memory = ranks("aaaa", state=100 * GB, slot=10 * GB)
    resolve_budgets(configured(10_000 * GB), 0, memory)
    assert (
        "would pin 1040.000 GB"
        in refusals(configured(10_000 * GB), ranks("aaaa", state=250 * GB, slot=10 * GB))[0]
    )


@pytest.mark.parametrize(("host", "flag"), [(0, "0"), (None, "auto")])
def test_slots_alone_may_be_more_than_a_node_has(host: int | None, flag: str) -> None:
    """They are pinned whatever the budget is; the message says what makes them smaller."""
    memory = ranks("aaaa", host_free=39 * GB, slot=10 * GB)
    (told,) = set(refusals(configured(host), memory))
    assert re.search(rf"host-gb {flag}: .* would pin 40.000 GB .* 39.000 GB can be had", told)
    assert "--stream-optimizer-state-ahead-gb or -bucket-numel" in told
    resolve_budgets(configured(host), 0, ranks("aaa", host_free=39 * GB, slot=10 * GB))


@pytest.mark.parametrize("parts", [(1,), (3, 5), (1, 1, 1), (0, 7), (7, 0, 0), (0, 0)])
@pytest.mark.parametrize("budget", [0, 1, 1000, 2**60])
def test_stores_of_a_rank_share_its_budget_by_their_bytes(
    parts: tuple[int, ...], budget: int
) -> None:
    """All of it but for a few bytes, and never more; an empty one has no use for any."""
    whole = sum(parts)
    shares = [Budgets(budget, 2 * budget).share(part, whole) for part in parts]
    if whole:
        assert 0 <= budget - sum(share.device for share in shares) < len(parts)
        assert 0 <= 2 * budget - sum(share.host for share in shares) < len(parts)
    for part, share in zip(parts, shares, strict=True):
        if whole:
            assert share.device == budget * part // whole
            assert share.host == 2 * budget * part // whole
