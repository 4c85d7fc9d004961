"""What another upstream would do to this repository: patches, tripwires, census, overlay.

Nothing is installed and nothing of upstream is run; a release takes a few seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from buildtools.carry import dry_run
from buildtools.history import History
from buildtools.overlay import overlay_files
from buildtools.paths import scratch_dir
from buildtools.releases import Shop, fetch_target
from buildtools.report import BLOCKED, CONFLICT, EMPTY, REPLACED, UNCHANGED, Report
from buildtools.tripwires import Finding, render_finding
from buildtools.watch import Watch, read_sources


@dataclass(frozen=True)
class Drift:
    """What one upstream would do.

    Attributes:
        version: what it calls itself.
        is_pinned: whether it is the tree that is pinned.
        report: what becomes of the patches.
        blobs: files that patches change and that are other blobs there.
        findings: tripwires and readers that are not as they were accepted.
    """

    version: str
    is_pinned: bool
    report: Report
    blobs: list[str]
    findings: list[Finding]

    @property
    def needs_work(self) -> bool:
        """Whether more is needed than `build.py rebase`, which moves patches by itself."""
        return not self.report.clean or bool(self.findings)

    def count(self, kind: str, what: str) -> int:
        """Return the number of findings of a kind."""
        return sum(each.kind == kind and each.what == what for each in self.findings)


def look_at(text: str, watch: Watch, history: History, shop: Shop, scratch: Path) -> Drift:
    """Look at one upstream.

    Args:
        text: a version, the path of an archive or directory, or ``git:REF``.
        watch: the tripwires of this repository.
        history: the series as commits on the pinned upstream; it can be used again.
        shop: where releases come from.
        scratch: directory for its files, which are removed again.

    Raises:
        BuildError: the upstream cannot be had.
    """
    pin = watch.recipe.pin
    with scratch_dir(scratch) as place:
        target = fetch_target(text, pin, shop, place / "tree")
        sources = read_sources(place / "tree")
        report = dry_run(
            history,
            place / "tree",
            old=pin.version,
            new=target.version,
            overlay=overlay_files(watch.recipe.overlay),
        )
    return Drift(
        version=target.version,
        is_pinned=target.pristine == pin.lock.pristine,
        report=report,
        blobs=watch.blobs(sources),
        findings=watch.findings(sources),
    )


def details(drift: Drift, *, width: int | None = None) -> Iterator[str]:
    """Yield all that is not as it was, for people."""
    for patch in drift.report.patches:
        if patch.fate in (CONFLICT, BLOCKED, EMPTY):
            yield f"{patch.name}: {patch.fate}: {'; '.join(patch.conflicts)}".rstrip(": ")
    yield from drift.report.attention
    yield from drift.blobs
    for finding in drift.findings:
        yield render_finding(finding, width=width)


_COLUMNS = (
    "release",
    "patches",
    "touched files",
    "symbols leaned on",
    "readers",
    "overlay",
    "needs work",
)


def table(drifts: Iterable[Drift]) -> str:
    """Return a Markdown table, one row for each upstream."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_row(drift) for drift in drifts)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(drift: Drift) -> tuple[str, ...]:
    order = (UNCHANGED, REPLACED, EMPTY, CONFLICT, BLOCKED)
    fates = {fate: drift.report.counts[fate] for fate in order if fate in drift.report.counts}
    blobs = Counter(line.split(": ")[1] for line in drift.blobs)
    return (
        f"{drift.version} (pinned)" if drift.is_pinned else drift.version,
        _counted(fates),
        _counted(blobs),
        _counted({what: drift.count("symbol", what) for what in ("new", "changed", "gone")}),
        _counted({what: drift.count("reader", what) for what in ("new", "changed", "gone")}),
        _counted({"collisions": len(drift.report.collisions)}),
        "yes" if drift.needs_work else "no",
    )


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "-"


def to_json(drifts: Iterable[Drift]) -> str:
    """Return everything for programs."""
    rows = [
        {
            "version": drift.version,
            "pinned": drift.is_pinned,
            "needs_work": drift.needs_work,
            "blobs": drift.blobs,
            "findings": [asdict(finding) for finding in drift.findings],
            **json.loads(drift.report.to_json()),
        }
        for drift in drifts
    ]
    return json.dumps(rows, indent=1) + "\n"


def to_markdown(drifts: Iterable[Drift]) -> str:
    """Return the table and, for each upstream, all that is not as it was."""
    every = list(drifts)
    parts = ["# Drift", "", table(every)]
    for drift in every:
        lines = "\n\n".join(details(drift, width=80))
        if lines:
            parts += ["", f"## {drift.version}", "", "````text", lines, "````"]
    return "\n".join(parts) + "\n"
