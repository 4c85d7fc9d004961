"""Tables of `moe.py`: what a variant takes and saves, beside stock and beside the published run.

Pure: what the ranks printed goes in. A step's time is that of the slowest rank; the first two steps
warm up and do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.tables import markdown

Ranks = Sequence[Mapping[str, Any]]
"""What the ranks of a variant printed."""
WARMUP = 2
STOCK = "stock"
PUBLISHED = "bf16-host"
"""The variant that does what the published run did: BF16 moments, with the host's memory at hand
(it went through the page cache)."""
FREED_GB = 42.3
FREED_PART = 0.52
SLOWER = 0.13
"""A third of the published 39 %."""
WORDS = {None: "?", True: "yes", False: "NO"}


def peak(ranks: Ranks, phase: str) -> float | None:
    """Return the most GB that tensors of any rank held in a phase; None if there was none."""
    held = [float(each[f"{phase}_peak_gb"]) for each in ranks if f"{phase}_peak_gb" in each]
    return max(held, default=None)


def step_seconds(ranks: Ranks) -> float:
    """Return the median of the steps that count, of the slowest rank."""
    return max(float(median(each["step_s"][WARMUP:])) for each in ranks)


def exposed_seconds(ranks: Ranks) -> float:
    """Return the same of what training waited for the stores of a rank."""
    return max(float(median(each["exposed_s"][WARMUP:])) for each in ranks)


def moved_gb(ranks: Ranks) -> float:
    """Return what all ranks read and wrote in a step."""
    reports = [report for each in ranks for report in each["reports"][WARMUP:]]
    moved = sum(report["bytes_read"] + report["bytes_written"] for report in reports)
    return float(moved) / 1e9 / len(ranks[0]["reports"][WARMUP:])


def losses(ranks: Ranks) -> list[list[float]]:
    """Return the losses of each rank."""
    return [[float.fromhex(loss) for loss in each["losses"]] for each in ranks]


def gap(ranks: Ranks, stock: Ranks) -> float:
    """Return the largest difference of any loss from stock's, as a part of it."""
    pairs = zip(losses(ranks), losses(stock), strict=True)
    return max(
        abs(ours - theirs) / abs(theirs)
        for mine, other in pairs
        for ours, theirs in zip(mine, other, strict=True)
    )


def agreement(ranks: Ranks, stock: Ranks) -> str:
    """Say how losses and weights compare with stock's."""
    if len(ranks) != len(stock) or len(ranks[0]["losses"]) != len(stock[0]["losses"]):
        return "other ranks or steps"
    is_same = all(
        ours["losses"] == theirs["losses"] and ours["weights"] == theirs["weights"]
        for ours, theirs in zip(ranks, stock, strict=True)
    )
    return "losses and weights equal" if is_same else f"losses within {gap(ranks, stock):.1e}"


def logged(ranks: Ranks) -> bool:
    """Return whether each rank wrote a line for each step of each of its stores."""
    return all(each["log_lines"] == each["stores"] * len(each["step_s"]) for each in ranks)


def memory_table(variants: Mapping[str, Ranks]) -> str:
    """Return what devices held in each phase, and what is freed of stock's step."""
    stock = variants.get(STOCK)
    rows = []
    for name, ranks in variants.items():
        held = [peak(ranks, phase) for phase in ("construction", "step", "save")]
        tiers = [sum(each[f"{tier}_tier_gb"] for each in ranks) for tier in ("disk", "host")]
        rows.append(
            [
                name,
                *("-" if each is None else f"{each:.2f}" for each in held),
                _freed(ranks, stock),
                *(f"{each:.1f}" for each in tiers),
                f"{max(each['step_reserved_gb'] for each in ranks):.2f}",
                next((each["not_saved"] for each in ranks if "not_saved" in each), ""),
            ]
        )
    columns = ("variant", "construction", "step", "save", "freed in the step")
    more = ("disk tier, all ranks", "host tier, all ranks", "reserved in the step", "not saved")
    return markdown((*columns, *more), rows)


def _freed(ranks: Ranks, stock: Ranks | None) -> str:
    if stock is None or ranks is stock:
        return "-"
    freed, whole = freed_gb(ranks, stock)
    return f"{freed:.2f} ({freed / whole:.0%})"


def freed_gb(ranks: Ranks, stock: Ranks) -> tuple[float, float]:
    """Return what is freed of stock's peak in the step, and that peak, in GB."""
    ours, theirs = peak(ranks, "step"), peak(stock, "step")
    assert ours is not None and theirs is not None, "every run has steps"
    return theirs - ours, theirs


def time_table(variants: Mapping[str, Ranks]) -> str:
    """Return times of a step, beside stock's, and whether it is the same training."""
    stock = variants.get(STOCK)
    rows = []
    for name, ranks in variants.items():
        seconds = step_seconds(ranks)
        is_other = stock is not None and ranks is not stock
        rows.append(
            [
                name,
                f"{seconds:.3f}",
                f"{seconds / step_seconds(stock) - 1:+.1%}" if is_other and stock else "-",
                f"{exposed_seconds(ranks):.3f}",
                agreement(ranks, stock) if is_other and stock else "-",
                f"{WORDS[logged(ranks)]} ({min(each['log_lines'] for each in ranks)})",
                str(ranks[0]["inner"]),
            ]
        )
    columns = ("variant", "step s", "beside stock", "of it in the stores s", "beside stock")
    return markdown((*columns, "log lines on all ranks (fewest)", "inner optimizer"), rows)


def disk_table(variants: Mapping[str, Ranks], limit: Mapping[str, Any] | None) -> str:
    """Return what all ranks moved together, and at which rate while a step of a store went on.

    Of a variant that spends little of its time in the stores, the rate says little: what is read
    ahead and written behind goes on outside of it.
    """
    rows = []
    for name, ranks in variants.items():
        moved = moved_gb(ranks)
        if not moved:
            continue
        rate = moved / step_seconds(ranks)
        inside = moved / exposed_seconds(ranks)
        parts = [f"{inside / limit['balanced']:.2f}"] if limit and limit["balanced"] else ["?"]
        of_rank = sorted(moved_gb([each]) for each in ranks)
        spread = f"{of_rank[0]:.2f} to {of_rank[-1]:.2f}"
        rows.append([name, f"{moved:.1f}", spread, f"{rate:.2f}", f"{inside:.2f}", *parts])
    if limit:
        rates = (limit[name] for name in ("read", "write", "mixed", "balanced"))
        told = ", ".join(f"{rate:.2f}" for rate in rates if rate is not None)
        rows.append([f"plain threads: read, write, mixed, balanced: {told}"])
    columns = ("variant", "GB of a step, all ranks", "GB of a rank", "over the training step")
    return markdown((*columns, "over the stores' steps", "of balanced"), rows)


def bars_table(variants: Mapping[str, Ranks]) -> str:
    """Return what the published run freed and cost, and what ours does."""
    stock, ours = variants.get(STOCK), variants.get(PUBLISHED)
    if stock is None or ours is None:
        return f"needs {STOCK} and {PUBLISHED}"
    freed, whole = freed_gb(ours, stock)
    slower = step_seconds(ours) / step_seconds(stock) - 1
    rows = [
        ["freed GB", "42.3", f"{freed:.2f}", f">= {FREED_GB}", WORDS[freed >= FREED_GB]],
        [
            *("freed part of the peak", "52 %", f"{freed / whole:.0%}"),
            *(f">= {FREED_PART:.0%}", WORDS[freed / whole >= FREED_PART]),
        ],
        ["training step", "+39 %", f"{slower:+.1%}", f"<= {SLOWER:+.0%}", WORDS[slower <= SLOWER]],
    ]
    return markdown(("what", "published", f"ours, {PUBLISHED}", "bar", "met"), rows)
