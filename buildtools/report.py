"""What became of every patch on another upstream: for people, for a page, and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from buildtools.console import BuildError

UNCHANGED = "unchanged"
REPLACED = "re-placed"
ADAPTED = "adapted"
EMPTY = "empty"
CONFLICT = "conflict"
BLOCKED = "blocked"
FATES = {
    UNCHANGED: "the same lines at the same place",
    REPLACED: "merged, with other line numbers or context",
    ADAPTED: "resolved by hand",
    EMPTY: "nothing is left of it: upstream has it",
    CONFLICT: "to be resolved by hand",
    BLOCKED: "not tried: a patch of the same file before it is in conflict",
}
FORMATS = (".md", ".json")
_SHOWN = 40
"""Lines of an upstream diff that the terminal shows; the files hold all of them."""


@dataclass(frozen=True)
class FileReport:
    """A file that a patch changes: where it was and is, and which symbols the hunks lie in.

    Attributes:
        old: its path before.
        new: its path now; empty if the patch changes it no more.
        symbols: qualified name of what each hunk lay in, '' for the module level.
        symbols_now: the same now.
    """

    old: str
    new: str
    symbols: tuple[str, ...]
    symbols_now: tuple[str, ...]


@dataclass(frozen=True)
class SymbolReport:
    """What upstream did to something that a patch changes.

    Attributes:
        symbol: ``path::qualname``.
        state: ``same``, ``changed`` or ``gone``.
        diff: upstream's own change, unified.
        elsewhere: where a symbol of that name is now, if it is gone.
    """

    symbol: str
    state: str
    diff: str
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchReport:
    """What became of one patch.

    Attributes:
        name: the file it came from.
        subject: its subject.
        fate: a key of `FATES`.
        new_name: its file now; empty if there is none.
        files: the files it changes.
        conflicts: a line for each file in conflict.
        attention: what somebody has to look at although the merge was clean.
        upstream: what upstream did to what it changes.
    """

    name: str
    subject: str
    fate: str
    new_name: str = ""
    files: tuple[FileReport, ...] = ()
    conflicts: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    upstream: tuple[SymbolReport, ...] = ()


@dataclass
class Report:
    """What became of the series.

    Attributes:
        old: version it comes from.
        new: version it goes to.
        patches: one for each patch, in order.
        collisions: overlay files whose place upstream has taken.
        findings_title: heading of `findings`.
        findings: what else is to be looked at; whoever makes the report may add lines.
    """

    old: str
    new: str
    patches: list[PatchReport]
    collisions: list[str] = field(default_factory=list)
    findings_title: str = "Tripwires and census"
    findings: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Fate -> number of patches, without the fates that none has."""
        counted = {fate: sum(patch.fate == fate for patch in self.patches) for fate in FATES}
        return {fate: count for fate, count in counted.items() if count}

    @property
    def attention(self) -> list[str]:
        """Everything that somebody has to look at although the merge was clean."""
        return [f"{patch.name}: {line}" for patch in self.patches for line in patch.attention] + [
            f"overlay: {line}" for line in self.collisions
        ]

    @property
    def clean(self) -> bool:
        """Whether every patch has a place and nothing is to be looked at but `findings`."""
        return not self.attention and not {CONFLICT, BLOCKED}.intersection(self.counts)

    def to_text(self) -> str:
        """Return the report for the terminal."""
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        counts = ", ".join(f"{count} {fate}" for fate, count in self.counts.items())
        yield f"{self.old} -> {self.new}: {counts}"
        for patch in self.patches:
            yield f"  {patch.fate:<9}  {patch.name}"
            yield from (f"             {line}" for line in _moves(patch))
        for symbol in self._changed():
            yield ""
            yield f"upstream: {symbol.symbol}: {_state(symbol)}"
            lines = symbol.diff.splitlines()
            yield from (f"    {line}" for line in lines[:_SHOWN])
            if len(lines) > _SHOWN:
                yield f"    ... {len(lines) - _SHOWN} more lines: see --report"
        for title, lines in self._sections():
            yield ""
            yield f"{title}:"
            yield from (f"  {row}" for line in lines for row in line.splitlines())

    def to_markdown(self) -> str:
        """Return the report as a page."""
        rows = [
            f"# {self.old} -> {self.new}",
            "",
            "| patch | fate | what happened |",
            "|---|---|---|",
        ]
        for patch in self.patches:
            detail = "<br>".join(line.replace("|", "\\|") for line in _moves(patch))
            rows.append(f"| {patch.name} | {patch.fate} | {detail} |")
        rows += ["", *(f"* {fate}: {FATES[fate]}" for fate in self.counts)]
        for title, lines in self._sections():
            rows += ["", f"## {title}", ""]
            for line in lines:
                first, *others = line.splitlines()
                rows.append(f"* {first}")
                rows += ["  ````text", *(f"  {row}" for row in others), "  ````"] if others else []
        changed = self._changed()
        rows += ["", "## What upstream did to what the patches change", ""]
        rows += [] if changed else ["Nothing."]
        for symbol in changed:
            rows += [f"### `{symbol.symbol}`: {_state(symbol)}", ""]
            rows += ["````diff", symbol.diff.rstrip("\n"), "````", ""] if symbol.diff else []
        return "\n".join(rows).rstrip("\n") + "\n"

    def to_json(self) -> str:
        """Return the report for programs."""
        extra = {"counts": self.counts, "attention": self.attention, "clean": self.clean}
        return json.dumps(asdict(self) | extra, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the report in the format of the suffix of ``path``."""
        check_format(path)
        text = self.to_json() if path.suffix == ".json" else self.to_markdown()
        path.write_text(text, encoding="utf-8")

    def _sections(self) -> list[tuple[str, list[str]]]:
        sections = [("Look at these", self.attention), (self.findings_title, self.findings)]
        return [(title, lines) for title, lines in sections if lines]

    def _changed(self) -> list[SymbolReport]:
        found = [each for patch in self.patches for each in patch.upstream if each.state != "same"]
        return list(dict.fromkeys(found))


def check_format(path: Path) -> None:
    """Raise a BuildError if the suffix of ``path`` names no format of a report."""
    if path.suffix not in FORMATS:
        raise BuildError(f"--report {path}: expected a name that ends in {' or '.join(FORMATS)}")


def _moves(patch: PatchReport) -> Iterator[str]:
    if patch.new_name and patch.new_name != patch.name:
        yield f"now {patch.new_name}"
    for file in patch.files:
        if file.new and file.new != file.old:
            yield f"{file.old} is now {file.new}"
    yield from patch.conflicts
    yield from patch.attention


def _state(symbol: SymbolReport) -> str:
    if symbol.elsewhere:
        return f"{symbol.state}; a symbol of that name is at {', '.join(symbol.elsewhere)}"
    return symbol.state
