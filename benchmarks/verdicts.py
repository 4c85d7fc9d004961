"""What a case of the engine's table came to: its limits, its bar, and the arithmetic.

Pure: what `step.py` printed goes in, verdicts come out. Rates are in GB/s (1e9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from typing import Any

Result = Mapping[str, Any]
"""What one process of `step.py` printed."""
Results = Mapping[str, Sequence[Result]]
"""Of each case that ran, the result of every rank."""
COMPARED_AFTER = "3"
"""Steps after which the weights of stock and of FP32 cases must be equal bit for bit."""


@dataclass(frozen=True)
class Judgement:
    """A number and the bar that it must reach.

    Attributes:
        value: None if what it needs was not measured.
        bar: what it is compared with.
        is_least: the value must be at least the bar, else at most.
        unit: what the numbers are.
    """

    value: float | None
    bar: float
    is_least: bool
    unit: str

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is reached; None if nobody knows."""
        if self.value is None:
            return None
        return self.value >= self.bar if self.is_least else self.value <= self.bar

    def __str__(self) -> str:
        value = "?" if self.value is None else f"{self.value:.3f}"
        return f"{value} {'>=' if self.is_least else '<='} {self.bar:.3f} {self.unit}"


@dataclass(frozen=True)
class Bound:
    """The least time in which a step's bytes can move, by one limit.

    Attributes:
        kind: ``disk mixed``, ``disk balanced`` or ``copies``.
        moved_gb: bytes of a step, of all ranks.
        limits: as measured before the first step, maybe between steps, and after the last one.
    """

    kind: str
    moved_gb: float
    limits: tuple[float, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Between two measurements: virtual disks drift, so the mean of before and after."""
        return tuple(mean(pair) for pair in pairwise(self.limits))

    @property
    def rate(self) -> float:
        """Of all the time."""
        return mean(self.rates)


@dataclass(frozen=True)
class Verdict:
    """One line of the table.

    Attributes:
        case: its name.
        step_s: of a step that the next follows at once, to its last byte; the slowest rank's.
        exposed_s: what training waits for.
        iteration_s: with what stands for forward and backward.
        moved_gb: bytes of a step on the disk and, as the store tells, to the device and back.
        bounds: of every limit that was measured.
        fraction: the largest bound's time over that of the step, where steps follow at once, and
            where each has limits of its own: the mean of steps.
        balanced_fraction: the same, when half of the disk's bytes are read and half written.
        peak_gb: the most that a device held.
        allowed_gb: params, grads, slots and the device tier.
        has_stock_weights: whether they equal stock's; None if they need not, or no one knows.
        judgement: about the bar.
    """

    case: str
    step_s: float
    exposed_s: float
    iteration_s: float
    moved_gb: dict[str, float]
    bounds: tuple[Bound, ...]
    fraction: float | None
    balanced_fraction: float | None
    peak_gb: float
    allowed_gb: float
    has_stock_weights: bool | None = None
    judgement: Judgement | None = None

    def bound(self, kind: str) -> Bound | None:
        """Return the bound of this kind, if it was measured."""
        return next((each for each in self.bounds if each.kind == kind), None)


Judge = Callable[[Verdict, Sequence[Result], Results], Judgement]
"""Compares with the bar: gets a verdict without judgement, the results of its ranks, and of all."""


def step_seconds(result: Result) -> float:
    """Return the time of a step that the next one follows at once, to its last byte."""
    return float(result["back_to_back_s"] or mean(result.get("whole_s") or result["step_s"]))


def moved_gb(ranks: Sequence[Result]) -> dict[str, float]:
    """Return what a step moves: system calls tell of the disk, the store of the device."""
    names = ("bytes_uploaded", "bytes_downloaded")
    return {
        "disk": sum(float(each["calls_read_gb"] + each["calls_wrote_gb"]) for each in ranks),
        "copies": sum(
            mean(float(sum(report[name] for name in names)) for report in each["reports"]) / 1e9
            for each in ranks
        ),
    }


def bounds_of(ranks: Sequence[Result], moved: Mapping[str, float]) -> tuple[Bound, ...]:
    """Return a bound for every limit that was measured."""
    found = []
    limits = [each["limits"] for each in ranks]
    if "disk" in limits[0][0]:  # the ranks share it, and the first one tells
        for name in ("mixed", "balanced"):
            disk = tuple(float(each["disk"][name]) for each in limits[0])
            found.append(Bound(f"disk {name}", moved["disk"], disk))
    if "copies" in limits[0][0]:  # measured by all ranks at once
        at_once = zip(*limits, strict=True)
        copies = tuple(sum(float(each["copies"]["duplex"]) for each in rank) for rank in at_once)
        found.append(Bound("copies", moved["copies"], copies))
    return tuple(found)


def fraction_of(ranks: Sequence[Result], bounds: Sequence[Bound]) -> float | None:
    """Return the least time of a step over its time, by the bound that takes longest."""
    if not bounds or any(each["forward_backward_s"] for each in ranks):
        return None
    if not ranks[0].get("whole_s"):
        seconds = max(step_seconds(each) for each in ranks)
        return max(each.moved_gb / each.rate for each in bounds) / seconds
    fractions = []
    for number in range(len(ranks[0]["whole_s"])):
        seconds = max(float(each["whole_s"][number]) for each in ranks)
        disk = sum(float(each["whole_gb"][number]) for each in ranks)
        least = max(
            (disk if each.kind.startswith("disk") else each.moved_gb) / each.rates[number]
            for each in bounds
        )
        fractions.append(least / seconds)
    return mean(fractions)


def verdict(name: str, results: Results, judge: Judge | None = None) -> Verdict:
    """Compare a case that ran with its limits and its bar."""
    ranks = results[name]
    seconds = max(step_seconds(each) for each in ranks)
    moved = moved_gb(ranks)
    bounds = bounds_of(ranks, moved)
    found = Verdict(
        case=name,
        step_s=seconds,
        exposed_s=max(mean(each["step_s"]) for each in ranks),
        iteration_s=max(mean(each["iteration_s"]) for each in ranks),
        moved_gb=moved,
        bounds=bounds,
        fraction=fraction_of(ranks, [each for each in bounds if each.kind != "disk balanced"]),
        balanced_fraction=fraction_of(
            ranks, [each for each in bounds if each.kind != "disk mixed"]
        ),
        peak_gb=max(peak(each) for each in ranks),
        allowed_gb=max(allowed_peak(each) for each in ranks),
        has_stock_weights=has_stock_weights(name, results),
    )
    return replace(found, judgement=judge(found, ranks, results) if judge else None)


def peak(result: Result) -> float:
    """Return the most that the device held in construction, steps, save and load."""
    names = ("init_peak_gb", "step_peak_gb", "save_peak_gb", "load_peak_gb")
    return max(float(result[name]) for name in names if name in result)


def allowed_peak(result: Result) -> float:
    """Return params, grads, slots, the device tier, and what stands for forward and backward."""
    optional = sum(result.get(name, 0.0) for name in ("device_gb", "matmuls_gb"))
    return float(result["model_gb"] + result["slots_gb"] + optional)


def has_stock_weights(name: str, results: Results) -> bool | None:
    """Compare the weights of ``name`` with stock's, if both did the same with FP32 moments."""
    ours, stock = results[name], results.get("stock", ())
    told = {each.get("moment_dtype") for each in ours}
    if name == "stock" or told - {None, "fp32"}:
        return None
    if len(ours) != len(stock) or len({each["params"] for each in (*ours, *stock)}) > 1:
        return None
    digests = [{each["weights_after"].get(COMPARED_AFTER) for each in e} for e in (ours, stock)]
    if any(len(each) != 1 or None in each for each in digests):
        return None
    return digests[0] == digests[1]


# ------------------------------------------------------------------------------------------- bars


def at_least_of_limit(bar: float) -> Judge:
    """Judge the fraction of the limit."""
    return lambda found, ranks, results: Judgement(found.fraction, bar, True, "of the limit")


def at_least_of_balanced_limit(bar: float) -> Judge:
    """Judge the fraction of what can be done with as many bytes read as written, as a step does.

    Where reads and writes are of very different speed, half of the threads for each move next to
    nothing but reads: a tmpfs reads 45 GB/s and writes 4.
    """
    return lambda found, ranks, results: Judgement(
        found.balanced_fraction, bar, True, "of the balanced limit"
    )


def at_most_seconds(bar: float) -> Judge:
    """Judge the time of a step."""
    return lambda found, ranks, results: Judgement(found.step_s, bar, False, "s")


def at_most_of_case(other: str, bar: float) -> Judge:
    """Judge the time of a step against that of another case."""

    def judge(found: Verdict, ranks: Sequence[Result], results: Results) -> Judgement:
        seconds = [step_seconds(each) for each in results.get(other, [])]
        value = found.step_s / max(seconds) if seconds else None
        return Judgement(value, bar, False, f"of the time of {other}")

    return judge


def exposed_of_iteration(bar: float) -> Judge:
    """Judge the share of an iteration in which training waits for the step."""
    return lambda found, ranks, results: Judgement(
        found.exposed_s / found.iteration_s, bar, False, "of the iteration"
    )


def exposed_of_unbudgeted(ahead_gb: float, bar: float) -> Judge:
    """Judge the exposed time against what the disk needs for what no budget holds.

    A budget hides its bytes twice: as many are read ahead as are written behind.
    """
    unit = "of (I/O - budgets) / limit"

    def judge(found: Verdict, ranks: Sequence[Result], results: Results) -> Judgement:
        bound = found.bound("disk mixed")
        # What lives on disk goes both ways, however much of it system calls had to move.
        left = 2 * (sum(float(each.get("disk_gb", 0.0)) for each in ranks) - ahead_gb)
        if bound is None or left <= 0:
            return Judgement(None, bar, False, unit)
        exposed = [max(seconds) for seconds in zip(*(e["step_s"] for e in ranks), strict=True)]
        # Of each step by its own limits, where these were measured between steps.
        rates = bound.rates if len(bound.rates) == len(exposed) else [bound.rate] * len(exposed)
        values = [seconds * rate / left for seconds, rate in zip(exposed, rates, strict=True)]
        return Judgement(mean(values), bar, False, unit)

    return judge


def peak_of_allowed(bar: float) -> Judge:
    """Judge the most that the device held against params, grads and slots."""
    return lambda found, ranks, results: Judgement(
        found.peak_gb / found.allowed_gb, bar, False, "of params + grads + slots"
    )
