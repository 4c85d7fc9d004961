"""Markdown tables of what the cases came to, what devices held, and what memory groups held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.verdicts import Result, Results, Verdict, allowed_peak, step_seconds

COLUMNS = (
    *("case", "step s", "exposed s", "iteration s", "disk GB", "copied GB"),
    *("limits GB/s, before / after", "of limit", "of balanced", "as stock"),
    *("value and bar", "value / bar", "met"),
)
PEAKS = (
    "case",
    "step s",
    "exposed s",
    "construction",
    "step",
    "save",
    "load",
    "between steps",
    "allowed",
)
GROUPS = ("case", "limit", "peak", "anonymous", "file", "pinned is charged", "events")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; rows may be short."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict_table(verdicts: Mapping[str, Verdict | str]) -> str:
    """Return a line for each case; a text in the place of a verdict says why there is none."""
    return markdown(
        COLUMNS,
        [
            [name, f"not run: {found}"] if isinstance(found, str) else _cells(found)
            for name, found in verdicts.items()
        ],
    )


def _cells(found: Verdict) -> list[str]:
    words = {None: "-", True: "yes", False: "NO"}
    bounds = [each for each in found.bounds if each.kind != "disk balanced"]
    judgement = found.judgement
    value = judgement.value if judgement else None
    return [
        found.case,
        *(f"{each:.3f}" for each in (found.step_s, found.exposed_s, found.iteration_s)),
        *(f"{found.moved_gb[kind]:.1f}" for kind in ("disk", "copies")),
        "; ".join(f"{each.kind} {_slashed(each.limits)}" for each in bounds) or "-",
        *("-" if e is None else f"{e:.3f}" for e in (found.fraction, found.balanced_fraction)),
        words[found.has_stock_weights],
        str(judgement or "-"),
        f"{value / judgement.bar:.3f}" if judgement and value is not None else "-",
        words[judgement.is_met if judgement else None],
    ]


def _slashed(numbers: Iterable[float]) -> str:
    return " / ".join(f"{number:.2f}" for number in numbers)


def peak_table(results: Results) -> str:
    """Return seconds of each rank, and what its device held at most and may hold, in GB."""
    names = ("init_peak_gb", "step_peak_gb", "save_peak_gb", "load_peak_gb", "between_steps_gb")
    return markdown(
        PEAKS,
        [
            [
                _name(case, each),
                f"{step_seconds(each):.3f}",
                " ".join(f"{seconds:.3f}" for seconds in each["step_s"]),
                *(f"{each[name]:.2f}" if name in each else "-" for name in names),
                f"{allowed_peak(each):.2f}",
            ]
            for case, ranks in results.items()
            for each in ranks
        ],
    )


def group_table(results: Results) -> str:
    """Return what memory groups held, in GB, and how often they met their limit."""
    rows = []
    for case, ranks in results.items():
        for each in ranks:
            group = dict(each.get("memory_group", {}))
            if not group:
                continue
            group.pop("path", None)
            group.pop("usage", None)
            known = [group.pop(name, None) for name in GROUPS[1:5]]
            cells = ["-" if nbytes is None else f"{nbytes / 1e9:.2f}" for nbytes in known]
            events = " ".join(f"{name} {count}" for name, count in group.items())
            rows.append([_name(case, each), *cells, str(each["pinned_is_charged"]), events])
    return markdown(GROUPS, rows)


def _name(case: str, result: Result) -> str:
    return f"{case}, rank {result['rank']}" if result["rank"] else case
