"""Carry the series to another pristine tree and say, patch by patch, what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from buildtools.console import BuildError
from buildtools.edition import subject_of
from buildtools.git import Git
from buildtools.history import History, export
from buildtools.overlay import collisions
from buildtools.patchfile import FileChange, Hunk, Patch, parse_patch
from buildtools.replay import (
    commit_directory,
    conflict_hunks,
    conflicts,
    is_empty,
    pick,
    renames,
    start_at,
)
from buildtools.report import (
    ADAPTED,
    BLOCKED,
    CONFLICT,
    EMPTY,
    REPLACED,
    UNCHANGED,
    FileReport,
    PatchReport,
    Report,
    SymbolReport,
)
from buildtools.upstreamdiff import Upstream, parses, symbols_of


class Move:
    """The series on its way from one pristine tree to another, in a repository with both.

    Args:
        git: the repository.
        patches: the series.
        commits: patch name -> its commit on ``old``.
        old: commit of the pristine tree the series is on.
        new: commit of the other one.
    """

    def __init__(
        self, git: Git, patches: list[Patch], commits: dict[str, str], old: str, new: str
    ) -> None:
        self.git = git
        self.patches = patches
        self.commits = commits
        self.old = old
        self.new = new

    @cached_property
    def upstream(self) -> Upstream:
        """Both pristine trees."""
        moved = renames(self.git, self.old, self.new)
        return Upstream(self.git.files(self.old), self.git.files(self.new), moved)

    def judge(self, patch: Patch, picked: str, *, by_hand: bool) -> PatchReport:
        """Say what became of a patch that has a commit on the new tree.

        Args:
            patch: the patch.
            picked: its new commit, which may change nothing.
            by_hand: whether somebody resolved a conflict in it.

        Raises:
            BuildError: the new commit is one that no patch may be.
        """
        after: Patch | None = None
        if not is_empty(self.git, picked):
            after = parse_patch(patch.name, export(self.git, [picked])[0])
        pairs = self._pairs(patch, after)
        files = []
        attention: list[str] = []
        for old, new in pairs:
            was = self._symbols(self.commits[patch.name], old)
            now = self._symbols(picked, new) if new else ()
            files.append(FileReport(old.path, new.path if new else "", was, now))
            if new:
                attention += self._placement(old, was, new, now)
                if not parses(new.path, self.git.blob(picked, new.path) or b""):
                    attention.append(f"{new.path} is no valid Python any more")
        if after and by_hand:
            # Lines that the patch takes out are upstream's: those may have changed.
            lost = [line for line in _missing(patch, after) if line.startswith("left out +")]
            attention += [f"the resolution {line}" for line in lost]
        if after and not by_hand:
            attention += [f"the merge {line}" for line in _missing(patch, after)]
            attention += [f"the merge {line}" for line in _added_by_merge(patch, after)]
            attention += [
                f"{new.path}: upstream has this line now, too: {line.decode(errors='replace')}"
                for old, new in pairs
                if new
                for line in self.upstream.has_added(old.path, _added(new))
            ]
        if after is None:
            fate = EMPTY
        elif by_hand:
            fate = ADAPTED
        else:
            fate = UNCHANGED if _hunks(patch) == _hunks(after) else REPLACED
        upstream = self._upstream(files)
        return PatchReport(
            patch.name,
            subject_of(patch),
            fate,
            files=tuple(files),
            attention=tuple([*attention, *self._copies(files)]),
            upstream=upstream,
        )

    def stuck(self, patch: Patch, reasons: Iterable[str], fate: str = CONFLICT) -> PatchReport:
        """Say of a patch that it has no place on the new tree."""
        files = [
            FileReport(change.path, "", self._symbols(self.commits[patch.name], change), ())
            for change in patch.changes
        ]
        return PatchReport(
            patch.name,
            subject_of(patch),
            fate,
            files=tuple(files),
            conflicts=tuple(reasons),
            attention=tuple(self._copies(files)),
            upstream=self._upstream(files),
        )

    def conflict_lines(self) -> list[str]:
        """Return a line for each file in conflict in the worktree."""
        rows = []
        for path, kind in sorted(conflicts(self.git).items()):
            file = self.git.worktree / path
            count = len(conflict_hunks(file.read_bytes())) if file.is_file() else 0
            rows.append(f"{path}: {kind}" + (f" ({count} places)" if count > 1 else ""))
        return rows

    def _pairs(
        self, patch: Patch, after: Patch | None
    ) -> list[tuple[FileChange, FileChange | None]]:
        changes = {change.path: change for change in after.changes} if after else {}
        pairs: list[tuple[FileChange, FileChange | None]] = []
        for change in patch.changes:
            new = changes.pop(change.path, None)
            if new is None and changes:
                new = changes.pop(self.upstream.path_now(change.path), None)
            pairs.append((change, new))
        left = list(changes.values())
        # What a hand has moved to a file that git does not take for the same.
        return [(old, new or (left.pop(0) if left else None)) for old, new in pairs]

    def _symbols(self, commit: str, change: FileChange) -> tuple[str, ...]:
        before = self.git.blob(f"{commit}^", change.path) or b""
        return symbols_of(change, before, self.git.blob(commit, change.path) or b"")

    @staticmethod
    def _placement(
        old: FileChange, was: tuple[str, ...], new: FileChange, now: tuple[str, ...]
    ) -> list[str]:
        """Return where a change does not lie in the symbol that it lay in."""
        if old.path != new.path and not any(now):
            return [f"{old.path} is now {new.path}, and what changes there is in no function"]
        before, after = _by_content(old, was), _by_content(new, now)
        found = []
        for key in set(before) & set(after):
            found += _moved(before.pop(key), after.pop(key))
        # Hunks that were joined, split or rewritten have no counterpart of their own.
        left = [sorted({each for row in rows.values() for each in row}) for rows in (before, after)]
        found += _moved(*left) if left[0] and left[1] else []
        return [f"{new.path}: a hunk of {a} now lies in {b}" for a, b in found]

    def _upstream(self, files: Iterable[FileReport]) -> tuple[SymbolReport, ...]:
        touched = dict.fromkeys((file.old, symbol) for file in files for symbol in file.symbols)
        return tuple(self.upstream.report(path, symbol) for path, symbol in touched)

    def _copies(self, files: Iterable[FileReport]) -> list[str]:
        found = []
        for path, symbol in dict.fromkeys((f.old, each) for f in files for each in f.symbols):
            copies = self.upstream.copies(path, symbol)
            if copies and self.upstream.report(path, symbol).state == "gone":
                found.append(f"moved: what was {path}::{symbol} is now {', '.join(copies)}")
                continue
            found += [
                f"duplicated: upstream has copied {path}::{symbol} to {copy}; the copy has no patch"
                for copy in copies
            ]
        return found


def _by_content(change: FileChange, symbols: tuple[str, ...]) -> dict[object, list[str]]:
    found: dict[object, list[str]] = {}
    for hunk, symbol in zip(change.hunks, symbols, strict=True):
        found.setdefault(_content(hunk), []).append(symbol)
    return {key: sorted(rows) for key, rows in found.items()}


def _content(hunk: Hunk) -> object:
    """Return what a hunk takes out and puts in, whatever is around it and however indented."""
    old, new = (Counter(line.strip() for line in side) for side in (hunk.old, hunk.new))
    return frozenset((old - new).items()), frozenset((new - old).items())


def _moved(before: list[str], after: list[str]) -> list[tuple[str, str]]:
    if before == after:
        return []
    shown = [", ".join(each or "the module level" for each in row) for row in (before, after)]
    return [(shown[0], shown[1])]


def _hunks(patch: Patch) -> object:
    return [(change.path, change.hunks) for change in patch.changes]


def _missing(patch: Patch, after: Patch) -> list[str]:
    """Return what a merge has left out because upstream has it, or what a resolution has lost."""
    return [
        f"left out {sign}{line.decode(errors='replace').rstrip()}"
        for (sign, line), count in (_lines(patch) - _lines(after)).items()
        for _ in range(count)
        if line.strip()
    ]


def _added_by_merge(patch: Patch, after: Patch) -> list[str]:
    return [
        f"has added {sign}{line.decode(errors='replace').rstrip()}"
        for (sign, line) in _lines(after) - _lines(patch)
        if line.strip()
    ]


def _added(change: FileChange) -> list[bytes]:
    return [
        line for hunk in change.hunks for line in (Counter(hunk.new) - Counter(hunk.old)).elements()
    ]


def _lines(patch: Patch) -> Counter[tuple[str, bytes]]:
    found: Counter[tuple[str, bytes]] = Counter()
    for change in patch.changes:
        for hunk in change.hunks:
            old, new = Counter(hunk.old), Counter(hunk.new)
            found.update({("-", line): count for line, count in (old - new).items()})
            found.update({("+", line): count for line, count in (new - old).items()})
    return found


def dry_run(
    history: History,
    pristine: Path,
    *,
    old: str,
    new: str,
    overlay: Iterable[str] = (),
) -> Report:
    """Carry the series to the files in ``pristine`` and report, without stopping at a conflict.

    A patch of a file in which an earlier patch is in conflict is not tried. Nothing but the
    repository of ``history`` is touched, and that can be used again.

    Args:
        history: the series on the pinned upstream.
        pristine: directory with the shipped files of the other one.
        old: version the series is on.
        new: version of the other tree.
        overlay: the paths that the overlay adds.
    """
    git = history.git
    target = commit_directory(git, pristine, history.base, f"pristine {new}")
    move = Move(git, history.patches, history.commits, history.base, target)
    start_at(git, target)
    blocked: dict[str, str] = {}
    reports = []
    for patch in history.patches:
        paths = [change.path for change in patch.changes]
        behind = sorted({blocked[path] for path in paths if path in blocked})
        if behind:
            report = move.stuck(patch, [f"not tried, because of {', '.join(behind)}"], BLOCKED)
        else:
            report = _try(move, patch)
        if report.fate in (CONFLICT, BLOCKED):
            blocked.update({path: patch.name for path in paths})
        reports.append(report)
    return Report(old, new, reports, collisions(list(overlay), pristine))


def _try(move: Move, patch: Patch) -> PatchReport:
    git = move.git
    head = git.run("rev-parse", "HEAD")
    reasons: list[str] = []
    if pick(git, move.commits[patch.name]):
        try:
            return move.judge(patch, git.run("rev-parse", "HEAD"), by_hand=False)
        except BuildError as error:
            reasons = [str(error)]
    report = move.stuck(patch, reasons or move.conflict_lines())
    start_at(git, head)
    return report
