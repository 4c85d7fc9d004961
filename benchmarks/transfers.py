"""Transfers with begin and end, and the rate at which they moved bytes within a window of time.

Threads and streams neither begin nor end together. What lies partly outside of a window counts in
proportion, so that the window can be one in which all of them are busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that moved from one moment to another; ``kind`` tells directions apart."""

    kind: str
    begin_s: float
    end_s: float
    nbytes: int


def bytes_within(transfers: Iterable[Transfer], begin_s: float, end_s: float) -> float:
    """Return the bytes that moved in the window; each transfer moves at an even rate."""
    moved = 0.0
    for each in transfers:
        inside = min(each.end_s, end_s) - max(each.begin_s, begin_s)
        if inside > 0:
            moved += each.nbytes * inside / (each.end_s - each.begin_s)
    return moved


def gigabytes_per_second(
    transfers: Sequence[Transfer], begin_s: float, end_s: float
) -> dict[str, float]:
    """Return the rate of each kind of transfer in the window, and their ``total``."""
    if end_s <= begin_s:
        raise ValueError(f"a window from {begin_s} to {end_s} is empty: make the transfers longer")
    kinds = sorted({each.kind for each in transfers})
    rates = {
        kind: bytes_within((e for e in transfers if e.kind == kind), begin_s, end_s)
        / (end_s - begin_s)
        / 1e9
        for kind in kinds
    }
    return {**rates, "total": sum(rates.values())}


def common_window(transfers: Sequence[Transfer]) -> tuple[float, float]:
    """Return begin and end of the time in which every kind is busy."""
    kinds = {each.kind for each in transfers}
    begins = [min(e.begin_s for e in transfers if e.kind == kind) for kind in kinds]
    ends = [max(e.end_s for e in transfers if e.kind == kind) for kind in kinds]
    return max(begins), min(ends)
