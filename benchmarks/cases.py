"""The cases of the engine's table: with which options each runs, and its bar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.verdicts import (
    Judge,
    at_least_of_balanced_limit,
    at_least_of_limit,
    at_most_of_case,
    at_most_seconds,
    exposed_of_iteration,
    exposed_of_unbudgeted,
    peak_of_allowed,
)

Options = Mapping[str, float | str | bool]
PER_RANK = ("host-gb", "device-gb", "ahead-gb")


@dataclass(frozen=True)
class Case:
    """One line of the table, before it ran.

    Attributes:
        name: for ``--only``.
        options: of `step.py`; tiers and budgets are of all ranks together.
        judge: compares with the bar, if there is one.
        variant: of `step.py`.
        is_on_tmpfs: its directory is a tmpfs.
        has_timeline: it also makes a figure, of two more steps.
    """

    name: str
    options: Options
    judge: Judge | None = None
    variant: str = "streamed"
    is_on_tmpfs: bool = False
    has_timeline: bool = False

    def arguments(self, ranks: int = 1) -> list[str]:
        """Return the command line of each rank; a memory cap is for one rank alone."""
        found = [self.variant]
        for name, value in self.options.items():
            if name == "memory-cap-gb" and ranks > 1:
                continue
            share = float(value) / ranks if name in PER_RANK else value
            found += [f"--{name}"] if value is True else [f"--{name}", str(share)]
        return found


_THREE: Options = {"warmup": 1, "steps": 2, "back-to-back": True}
_MANY: Options = {"warmup": 3, "steps": 6, "back-to-back": True}
_CAPPED: Options = {"memory-cap-gb": 24, "io": "direct"}
_OVERLAPPED: Options = {
    **{"io": "direct", "host-gb": 13.3, "limits": "disk"},
    **{"warmup": 1, "steps": 2, "forward-backward-io": 1.2},
}
_AHEAD_SOME = 4.85
"""GB: sixteen slots of half the default size. While the last bucket is read, one more is written
than must be, so a budget is the better used the smaller its slots are."""

CASES = (
    Case("stock", _MANY, variant="stock"),
    Case(
        "host",
        {"host-gb": 30, "limits": "copies", **_MANY},
        at_least_of_limit(0.90),
        has_timeline=True,
    ),
    Case(
        "disk",
        {**_CAPPED, "limits": "disk", "limits-between": True, **_THREE},
        at_least_of_limit(0.92),
    ),
    Case(
        "disk-host",
        {**_CAPPED, "host-gb": 12, "limits": "disk,copies", **_THREE},
        at_most_of_case("disk", 0.6),
        has_timeline=True,
    ),
    Case(
        "split-bf16-host",
        {
            **{**_CAPPED, "host-gb": 12, "main-storage": "split", "moment-dtype": "bf16"},
            **{"limits": "disk,copies", **_MANY},
        },
        at_most_seconds(1.2),
        has_timeline=True,
    ),
    Case(
        "tmpfs",
        {"limits": "disk,copies", "limit-gb": 4, **_THREE},
        at_least_of_balanced_limit(0.90),
        is_on_tmpfs=True,
        has_timeline=True,
    ),
    Case(
        "ahead-all",
        {**_OVERLAPPED, "ahead-gb": 14.5},
        exposed_of_iteration(0.10),
        has_timeline=True,
    ),
    Case(
        "ahead-some",
        {
            **_OVERLAPPED,
            **{"limits-between": True, "ahead-gb": _AHEAD_SOME, "bucket-numel": 100_000_000},
        },
        exposed_of_unbudgeted(_AHEAD_SOME, 1.1),
    ),
    Case("peaks", {"matrices": 12, "save": True, **_THREE}, peak_of_allowed(1.01)),
)
"""In the order in which they run. Sizes are for 2.147 B params: 25.8 GB of FP32 state."""
