"""The end of a rebase: the report, and every file of the repository that changes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from buildtools.authoring import dropped_entry
from buildtools.carry import Move
from buildtools.console import BuildError
from buildtools.dropped import read_dropped
from buildtools.edition import Edition, files_of, make_edition
from buildtools.git import Git
from buildtools.overlay import collisions, overlay_files
from buildtools.pin import Pin, with_release, with_values
from buildtools.rebasestate import State
from buildtools.releases import Target
from buildtools.replay import is_empty
from buildtools.report import Report
from buildtools.workspace import Workspace

Findings = Callable[[Path], list[str]]
"""Examines the pristine tree of the new upstream and returns lines for `Report.findings`."""


def conclude(
    workspace: Workspace, git: Git, state: State, findings: Findings | None
) -> tuple[Report, dict[Path, bytes | None]]:
    """Return the report of a rebase all of whose steps are done, and what it writes.

    Raises:
        BuildError: nothing would be left of the series, or it would not be sound.
    """
    recipe = workspace.recipe
    commits = {each.name: each.commit for each in state.steps}
    move = Move(git, recipe.patches, commits, state.base, state.new)
    reports = [
        move.judge(patch, each.picked, by_hand=each.by_hand)
        for patch, each in zip(recipe.patches, state.steps, strict=True)
    ]
    kept = [each.picked for each in state.steps if not is_empty(git, each.picked)]
    if not kept:
        raise BuildError("refused: nothing would be left of the series; build.py rebase --abort")
    gone = read_dropped(workspace.patches)
    edition = make_edition(git, state.new, kept, recipe.patches, gone)
    pristine = workspace.rebase / "pristine"
    report = Report(
        recipe.pin.version,
        state.target.version,
        [replace(each, new_name=edition.names.get(each.name, "")) for each in reports],
        collisions(overlay_files(recipe.overlay), pristine),
    )
    if findings:
        report.findings += findings(pristine)
    return report, _changes(workspace, state, edition)


def _changes(workspace: Workspace, state: State, edition: Edition) -> dict[Path, bytes | None]:
    version = state.target.version
    because = {each.name: each.because or f"upstream {version} has it" for each in state.steps}
    old = {patch.name: patch for patch in workspace.recipe.patches}
    dropped = [dropped_entry(old[name], version, because[name]) for name in edition.removed]
    changes = files_of(edition, workspace.patches.resolve(), dropped)
    pin_file = workspace.pin_file.resolve()
    text = pin_file.read_text(encoding="utf-8")
    changes[pin_file] = moved_pin(text, workspace.recipe.pin, state.target).encode()
    return changes


def moved_pin(text: str, pin: Pin, target: Target) -> str:
    """Return the text of the pin for another upstream.

    What cannot be known yet is left empty, and what needs it says so: the hash of upstream's wheel,
    and that of a source distribution if it came from elsewhere. ``[lock]`` gets the pristine tree
    alone; `build.py pin` makes the rest.
    """
    same = target.version == pin.version and target.sha256 == pin.sdist_sha256
    text = with_values(
        text,
        {
            "upstream.version": target.version,
            "source.index.filename": target.sdist,
            "source.index.sha256": target.sha256,
            "source.git.ref": target.git_ref,
            "source.git.commit": target.git_commit,
            "published.sha256": pin.published_sha256 if same else "",
            "lock.pristine": target.pristine,
        },
    )
    if target.version != pin.version:
        known = {pin.version: pin.sdist_sha256, target.version: target.sha256}
        for version, sha256 in known.items():
            text = with_release(text, version, sha256) if sha256 else text
    return text
