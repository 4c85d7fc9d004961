"""The edit tree: the series opened as a git repository that plain git works in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from buildtools.console import BuildError
from buildtools.edition import digest
from buildtools.git import Git, user_identity
from buildtools.history import History

BRANCH = "series"
BASE = "pristine"
_MARKER = "megatron-nvme.json"
_SETTINGS = {
    "commit.gpgSign": "false",
    "core.attributesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.excludesFile": "/dev/null",
    "core.fileMode": "true",
    "core.hooksPath": "/dev/null",
    "merge.conflictStyle": "diff3",
}
"""What the user's own configuration must not decide in there: bytes of files, and hooks."""
_UNDER_WAY = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisection",
}


def prepare(git: Git) -> None:
    """Set a repository up so that the user's plain git works in it and changes no byte by itself.

    Who has no identity in git gets one.
    """
    settings = dict(_SETTINGS)
    if not user_identity(git.worktree):
        settings |= {"user.name": "megatron-nvme", "user.email": "megatron-nvme@localhost"}
    for key, value in settings.items():
        git.run("config", key, value)
    (git.worktree / ".git" / "info" / "exclude").write_text("__pycache__/\n")


@dataclass(frozen=True)
class Marker:
    """What the tree was last in step with.

    Attributes:
        series: digest of the series in ``patches/``.
        tip: the commit of that series here.
    """

    series: str
    tip: str

    def to_json(self) -> str:
        """Return the text of the marker file."""
        return json.dumps(asdict(self), indent=1) + "\n"


class EditTree:
    """An edit tree that may or may not be there.

    Args:
        path: its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.git = Git(path)

    @classmethod
    def of(cls, history: History) -> EditTree:
        """Turn the repository of a history into an edit tree."""
        tree = cls(history.git.worktree)
        git = tree.git
        git.run("tag", BASE, history.base)
        git.run("branch", "--quiet", "--move", "--force", BRANCH)
        prepare(git)
        tree.marker_file.write_text(Marker(digest(history.patches), history.tip).to_json())
        return tree

    @property
    def marker_file(self) -> Path:
        """The file that makes a repository an edit tree."""
        return self.path / ".git" / _MARKER

    @property
    def exists(self) -> bool:
        """Whether there is an edit tree."""
        return self.marker_file.is_file()

    def marker(self) -> Marker:
        """Return what the tree was last in step with.

        Raises:
            BuildError: there is no edit tree, or its marker is damaged.
        """
        if not self.exists:
            raise BuildError(f"{self.path}: no edit tree; open one with `build.py edit`")
        try:
            return Marker(**json.loads(self.marker_file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise BuildError(f"{self.marker_file} is damaged: {error}") from error

    @property
    def head(self) -> str:
        """The commit that is checked out."""
        return self.git.run("rev-parse", "HEAD")

    def under_way(self) -> str | None:
        """Return what git command waits for the user here, or None."""
        for name, what in _UNDER_WAY.items():
            if (self.path / ".git" / name).exists():
                return what
        return None

    def dirty(self) -> list[str]:
        """Return the files that differ from HEAD or are not tracked, as git status shows them."""
        output = self.git.output("status", "--porcelain", "--untracked-files=all")
        return output.decode(errors="replace").splitlines()

    def unexported(self) -> list[str]:
        """Return what would be lost if the tree went away now, a line each.

        Raises:
            BuildError: it cannot be told.
        """
        tip = self.marker().tip
        found = [f"{what} is under way"] if (what := self.under_way()) else []
        found += [f"not committed: {row}" for row in self.dirty()]
        # Other branches and the stash are work too.
        log = ["log", "--format=%h %s", "--all", "HEAD", "--not", tip, BASE]
        commits = self.git.output(*log).decode(errors="replace").splitlines()
        found += [f"not exported: {row}" for row in commits]
        if self.head != tip and not commits:
            found.append("HEAD is not the last commit of the series as it was exported")
        return found

    def require_ready(self) -> None:
        """Check that the branch can be exported as it is.

        Raises:
            BuildError: git waits for the user, another branch is checked out, or a file is dirty.
        """
        self.marker()
        if what := self.under_way():
            raise BuildError(f"{self.path}: {what} is under way: finish or abort it first")
        branch = self.git.attempt("symbolic-ref", "--short", "HEAD").stdout.decode().strip()
        if branch != BRANCH:
            raise BuildError(
                f"{self.path}: {branch or 'a detached HEAD'} is checked out, expected {BRANCH}: "
                f"git switch {BRANCH}"
            )

    def require_clean(self) -> None:
        """Raise a BuildError if a file is not committed."""
        if rows := self.dirty():
            raise BuildError(
                "\n".join(
                    [
                        f"{self.path}: these files are not committed (git commit --amend, "
                        "git commit --fixup COMMIT, or `build.py new`; git clean removes others):",
                        *(f"  {row}" for row in rows),
                    ]
                )
            )

    def commits(self, pristine: str) -> list[str]:
        """Return the commits of the series, oldest first.

        Args:
            pristine: the tree they must start from.

        Raises:
            BuildError: they start from another tree, or are no straight line.
        """
        base = self.git.attempt("rev-parse", "--verify", "--quiet", f"refs/tags/{BASE}^{{tree}}")
        tree = base.stdout.decode().strip()
        if tree != pristine:
            raise BuildError(
                f"{self.path}: tag {BASE} is tree {tree or '(none)'}, the pin's is {pristine}: "
                "upstream.toml has changed since the tree was opened; open another one and "
                "cherry-pick your commits"
            )
        ancestor = self.git.attempt("merge-base", "--is-ancestor", BASE, "HEAD")
        if ancestor.returncode != 0:
            raise BuildError(f"{self.path}: {BRANCH} does not start from tag {BASE}")
        merges = self.git.run("log", "--merges", "--format=%h %s", f"{BASE}..HEAD")
        if merges:
            raise BuildError(f"{self.path}: refused: merge commits in the series:\n{merges}")
        return self.git.run("rev-list", "--reverse", f"{BASE}..HEAD").split()
