"""Move the series to another upstream: one commit at a time, and resumable.

Nothing is written into the repository before all of it is resolved.

What is open lies in ``.work/rebase``: ``state.json``, the repository ``tree`` with both pristine
trees and the series, and ``pristine``, the files of the new upstream. Whatever is killed, the state
names the last commit that is done, and the work goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from buildtools.archive import sha256_of
from buildtools.authoring import require_exported
from buildtools.carry import Move
from buildtools.console import BuildError, step
from buildtools.edition import digest
from buildtools.edittree import EditTree, prepare
from buildtools.git import Git
from buildtools.history import export, parse_mail
from buildtools.patchfile import Patch, parse_patch
from buildtools.paths import scratch_dir
from buildtools.rebaseend import Findings, conclude
from buildtools.rebasestate import DONE, State, Step, load, path_of, save
from buildtools.releases import Shop, fetch_target
from buildtools.replay import (
    commit_directory,
    conflict_hunks,
    conflicts,
    has_markers,
    is_empty,
    pick,
    start_at,
)
from buildtools.report import Report, check_format
from buildtools.transaction import replace_all
from buildtools.workspace import Workspace


@dataclass(frozen=True)
class Stopped:
    """A conflict that waits for somebody.

    Attributes:
        patch: the patch.
        files: a line for each file in conflict.
        tree: the repository to resolve it in.
        sides: both sides and what they come from, as the files have them.
    """

    patch: Patch
    files: list[str]
    tree: Path
    sides: list[str]


@dataclass(frozen=True)
class Finished:
    """A series that has been written.

    Attributes:
        report: what became of each patch; None if that was written by an earlier run.
        changed: the files that were written.
    """

    report: Report | None
    changed: list[Path]


class Rebase:
    """The rebase that is open, or can be, in a clone.

    Args:
        workspace: this clone.
        findings: what else to look at on the new upstream.
    """

    def __init__(self, workspace: Workspace, findings: Findings | None = None) -> None:
        self._workspace = workspace
        self._findings = findings
        self._git = Git(workspace.rebase / "tree")

    def begin(self, text: str, shop: Shop, report: Path | None) -> Stopped | Finished:
        """Start to move the series to what ``text`` names (see `fetch_target`).

        Raises:
            BuildError: a rebase is open, the edit tree holds work, or there is no such upstream.
        """
        workspace = self._workspace
        workspace.require_no_rebase()
        require_exported(EditTree(workspace.edit), "export or discard it before a rebase")
        if report:
            check_format(report)
        pin, patches = workspace.recipe.pin, workspace.recipe.patches
        with scratch_dir(workspace.work) as scratch:
            arriving = scratch / "rebase"
            arriving.mkdir()
            with step(f"the series and {text} as commits"):
                history = workspace.history(arriving / "tree")
                git = history.git
                target = fetch_target(text, pin, shop, arriving / "pristine")
                new = commit_directory(
                    git, arriving / "pristine", history.base, f"pristine {target.version}"
                )
                prepare(git)
                start_at(git, new)
            steps = [Step(name, commit) for name, commit in history.commits.items()]
            state = State(
                base=history.base,
                new=new,
                tip=new,
                target=target,
                series=digest(patches),
                pin=sha256_of(workspace.pin_file),
                report=str(report.absolute()) if report else "",
                steps=steps,
            )
            save(state, path_of(arriving))
            arriving.rename(workspace.rebase)
        return self._advance(state)

    def go_on(self, because: str | None, report: Path | None) -> Stopped | Finished:
        """Take the resolution of the conflict that waits, or go on after a crash.

        Args:
            because: why a patch of which the resolution leaves nothing is dropped.
            report: where the report goes, if that has changed.

        Raises:
            BuildError: nothing is open, the conflict is not resolved, or ``patches/`` has changed.
        """
        state = self._load()
        if report:
            check_format(report)
            state.report = str(report.absolute())
        if state.written:
            self._remove()
            return Finished(None, [])
        self._require_untouched(state)
        if state.waiting:
            self._take_resolution(state, because)
        elif because is not None:
            raise BuildError("--because: no patch waits for a resolution")
        else:
            for lock in (self._git.worktree / ".git").rglob("*.lock"):
                lock.unlink()  # of a git that was killed
        start_at(self._git, state.tip)
        return self._advance(state)

    def abort(self) -> None:
        """Give the open rebase up; ``patches/`` has never been touched.

        Raises:
            BuildError: nothing is open, or the series has been written already.
        """
        self._require_open()
        try:
            written = load(path_of(self._workspace.rebase)).written
        except BuildError:
            written = False  # a damaged state is good for nothing else
        if written:
            raise BuildError("the rebased series is written already: build.py rebase --continue")
        self._remove()

    def _advance(self, state: State) -> Stopped | Finished:
        patches = {patch.name: patch for patch in self._workspace.recipe.patches}
        for each in state.steps:
            if each.state == DONE:
                continue
            patch = patches[each.name]
            clean = pick(self._git, each.commit)
            head = self._git.run("rev-parse", "HEAD")
            refused = self._refusal(patch, head) if clean else None
            if not clean or refused:
                state.waiting = each.name
                self._save(state)
                return self._stopped(patch, refused)
            each.picked, each.state, state.tip = head, DONE, head
            self._save(state)
        return self._finish(state)

    def _stopped(self, patch: Patch, refused: str | None) -> Stopped:
        git = self._git
        sides = []
        for path in conflicts(git):
            file = git.worktree / path
            if file.is_file():
                sides += [f"{path}:\n{text}" for text in conflict_hunks(file.read_bytes())]
        move = Move(git, [], {}, "", "")
        files = [f"{refused}: git commit --amend"] if refused else move.conflict_lines()
        return Stopped(patch, files, git.worktree, sides)

    def _refusal(self, patch: Patch, commit: str) -> str | None:
        """Return why a commit cannot become a patch file, or None."""
        if is_empty(self._git, commit):
            return None
        try:
            parse_patch(patch.name, export(self._git, [commit])[0])
        except BuildError as error:
            return str(error)
        return None

    def _take_resolution(self, state: State, because: str | None) -> None:
        """Make the commit of the patch that waits from what somebody has left in the tree."""
        git = self._git
        patch = next(p for p in self._workspace.recipe.patches if p.name == state.waiting)
        (waiting,) = [each for each in state.steps if each.name == state.waiting]
        self._require_resolved(state)
        head = git.run("rev-parse", "HEAD")
        if head == state.tip:
            mail = parse_mail(patch)
            commit = git.commit_tree(git.tree_id(), head, mail.message, mail.environment)
        elif git.run("rev-list", "--parents", "-1", head).split()[1:] == [state.tip]:
            commit = head  # git commit or git cherry-pick --continue
        else:
            raise BuildError(
                f"{git.worktree}: expected HEAD at {state.tip[:12]}, or one commit on it: "
                f"git reset --soft {state.tip[:12]}"
            )
        empty = is_empty(git, commit)
        if empty and not (because or "").strip():
            raise BuildError(
                f"nothing is left of {patch.name}. To drop it, say why: build.py rebase --continue "
                f"--because TEXT; to try again: git cherry-pick {waiting.commit[:12]}"
            )
        if because is not None and not empty:
            raise BuildError(f"--because: {patch.name} still changes something")
        if reason := self._refusal(patch, commit):
            raise BuildError(f"{git.worktree}: {reason}")
        waiting.picked, waiting.state, waiting.by_hand = commit, DONE, True
        waiting.because = because or ""
        state.tip, state.waiting = commit, ""
        self._save(state)

    def _require_resolved(self, state: State) -> None:
        git = self._git
        problems = [f"{path}: not resolved: {kind}" for path, kind in conflicts(git).items()]
        names = git.output("diff", "--name-only", "--no-renames", "-z", state.tip)
        for path in names.decode(errors="surrogateescape").split("\0"):
            file = git.worktree / path
            if path and file.is_file() and has_markers(file.read_bytes()):
                problems.append(f"{path}: conflict markers are left")
        if not problems:
            status = git.output("status", "--porcelain", "--untracked-files=all")
            rows = status.decode(errors="replace").splitlines()
            problems = [f"{row[3:]}: not added" for row in rows if row[1] != " "]
        if problems:
            raise BuildError(
                "\n".join([f"{git.worktree}: resolve and `git add` first:", *problems])
            )

    def _finish(self, state: State) -> Finished:
        workspace = self._workspace
        report, changes = conclude(workspace, self._git, state, self._findings)
        if state.report:
            report.write(Path(state.report))
        written = replace(state, written=True).to_json().encode()
        changed = replace_all(
            changes | {path_of(workspace.rebase).resolve(): written}, workspace.journal
        )
        self._remove()
        return Finished(report, [path for path in changed if path in changes])

    def _load(self) -> State:
        self._require_open()
        return load(path_of(self._workspace.rebase))

    def _save(self, state: State) -> None:
        save(state, path_of(self._workspace.rebase))

    def _remove(self) -> None:
        with scratch_dir(self._workspace.work) as trash:
            self._workspace.rebase.rename(trash / "rebase")

    def _require_open(self) -> None:
        if not self._workspace.rebase.exists():
            raise BuildError("no rebase is open; start one with `build.py rebase --to VERSION`")

    def _require_untouched(self, state: State) -> None:
        workspace = self._workspace
        if (
            digest(workspace.recipe.patches) != state.series
            or sha256_of(workspace.pin_file) != state.pin
        ):
            raise BuildError(
                "patches/ or upstream.toml has changed since the rebase began: undo that, or "
                "build.py rebase --abort and begin anew"
            )
