"""Apply the series to a tree: strictly, with every failure reported at once.

Two engines do the editing; what makes them equal is checked here, around either: before a patch the
blob of each file it touches must be the one in its index line and each hunk must fit at exactly its
stated line; after it the blob must be the promised one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from buildtools.console import BuildError
from buildtools.git import Git
from buildtools.objects import blob_id, entries_below, tree_id
from buildtools.patchfile import FileChange, Patch, apply_change, misfit


class Engine(Protocol):
    """Edits the files of a tree as a patch says."""

    def start(self, tree: Path) -> None:
        """Prepare ``tree``, which holds the pristine files and nothing else."""

    def apply(self, patch: Patch) -> None:
        """Apply one patch, which has been found to fit."""

    def finish(self) -> None:
        """Leave nothing but the patched files in the tree."""


class GitEngine:
    """Applies with hermetic git in a repository of its own."""

    def start(self, tree: Path) -> None:
        """Make the tree a repository."""
        self._git = Git(tree)
        self._git.init()
        self._git.run("add", "--all", "--force", ".")

    def apply(self, patch: Patch) -> None:
        """Apply to worktree and index; `git apply` is all or nothing."""
        self._git.run("apply", "--index", "-", stdin=patch.diff)

    def finish(self) -> None:
        """Compare git's own idea of the tree with ours and drop the repository."""
        tree = self._git.worktree
        by_git = self._git.tree_id()
        shutil.rmtree(tree / ".git")
        by_us = tree_id(entries_below(tree))
        if by_git != by_us:
            raise BuildError(f"git sees tree {by_git}, its files are tree {by_us}")


class PythonEngine:
    """Applies without git, for build hosts that have none."""

    def start(self, tree: Path) -> None:
        """Remember the tree."""
        self._tree = tree

    def apply(self, patch: Patch) -> None:
        """Rewrite each file the patch touches."""
        for change in patch.changes:
            path = self._tree / change.path
            path.write_bytes(apply_change(change, path.read_bytes()))

    def finish(self) -> None:
        """Nothing to drop."""


ENGINES: dict[str, type[GitEngine] | type[PythonEngine]] = {
    "git": GitEngine,
    "python-patch": PythonEngine,
}


def apply_series(tree: Path, patches: list[Patch], engine: Engine) -> None:
    """Apply ``patches`` in order to the files in ``tree``.

    A patch that does not fit is left out and the rest is still tried, so that one run shows every
    failure; a patch of a file that a failed patch should have changed is reported as such.

    Args:
        tree: directory with the pristine files. After an error its content is undefined: apply to
            a copy and move that into place.
        patches: the series.
        engine: what does the editing.

    Raises:
        BuildError: at least one patch does not fit or did not do what it promises.
    """
    engine.start(tree)
    blocked: dict[str, str] = {}
    problems: list[str] = []
    for patch in patches:
        found = [
            f"{patch.name}: {change.path}: {reason}"
            for change in patch.changes
            if (reason := _refusal(tree, change, blocked))
        ]
        if not found:
            engine.apply(patch)
            found = [
                f"{patch.name}: {change.path}: the engine left blob {blob}, not {change.after}"
                for change in patch.changes
                if (blob := blob_id((tree / change.path).read_bytes())) != change.after
            ]
        if found:
            problems += found
            blocked.update({change.path: patch.name for change in patch.changes})
    engine.finish()
    if problems:
        raise BuildError("\n".join(["the series does not apply:", *problems]))


def _refusal(tree: Path, change: FileChange, blocked: dict[str, str]) -> str | None:
    """Return why ``change`` must not be applied, or None."""
    if change.path in blocked:
        return f"not tried, because {blocked[change.path]} before it failed"
    path = tree / change.path
    if not path.is_file():
        return _gone(tree, change)
    content = path.read_bytes()
    blob = blob_id(content)
    if blob == change.after:
        return "already applied: upstream has this change"
    reason = misfit(change, content)
    if blob != change.before:
        detail = reason or "the hunks still fit, the file differs elsewhere: refresh the patch"
        return f"context changed (blob {blob}, expected {change.before}): {detail}"
    if reason:
        return f"edited by hand: {reason}"
    result = blob_id(apply_change(change, content))
    if result != change.after:
        return f"edited by hand: leaves blob {result}, its index line promises {change.after}"
    return None


def _gone(tree: Path, change: FileChange) -> str:
    name = change.path.rsplit("/", 1)[-1]
    entries = entries_below(tree)
    same = [path for path, entry in entries.items() if entry.blob == change.before]
    if same:
        return f"file renamed to {' or '.join(same)}"
    alike = [path for path in entries if path.rsplit("/", 1)[-1] == name != "__init__.py"]
    hint = f" (a file of that name is at {', '.join(alike)})" if alike else ""
    return f"file gone{hint}"
