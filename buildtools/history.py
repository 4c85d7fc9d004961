"""The series as commits: one per patch on top of the pristine tree."""

from __future__ import annotations

from pathlib import Path

from buildtools.console import BuildError
from buildtools.git import Git
from buildtools.patchfile import Patch


class History:
    """A repository that holds the pristine tree and one commit per patch.

    Args:
        tree: directory with the pristine files; it becomes the repository's worktree.
        patches: the series, which must apply.
    """

    def __init__(self, tree: Path, patches: list[Patch]) -> None:
        self.git = Git(tree)
        self.patches = patches
        self.git.init()
        self.git.commit_all("pristine")
        self._commits: dict[str, str] = {}
        for patch in patches:
            self.git.run("apply", "--index", "-", stdin=patch.diff)
            self._commits[patch.name] = self.git.commit_all(patch.message)

    def without(self, name: str) -> list[str]:
        """Leave the whole series but patch ``name`` in the worktree.

        Later patches of the same files stay if git can merge around the gap; otherwise they
        depend on it and are reverted too.

        Returns:
            The names of the patches that were reverted, latest first.
        """
        self.git.run("reset", "--quiet", "--hard", self._commits[self.patches[-1].name])
        if self._revert([name]):
            return [name]
        position = [patch.name for patch in self.patches].index(name)
        paths = {change.path for change in self.patches[position].changes}
        dependents = [
            patch.name
            for patch in reversed(self.patches[position + 1 :])
            if paths.intersection(change.path for change in patch.changes)
        ]
        if not dependents or not self._revert([*dependents, name]):
            raise BuildError(f"{name} cannot be reverted, nor with {dependents}")
        return [*dependents, name]

    def _revert(self, names: list[str]) -> bool:
        commits = [self._commits[name] for name in names]
        if self.git.attempt("revert", "--no-edit", *commits).returncode == 0:
            return True
        self.git.run("revert", "--abort")
        return False
