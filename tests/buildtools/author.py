"""Somebody who changes the toy's series with plain git, and what they can get wrong."""

from __future__ import annotations

import os
import subprocess

from buildtools.authoring import export_edit, open_edit
from buildtools.edittree import EditTree
from buildtools.series import load_patches
from tests.buildtools.toy import MESSAGE, MODEL, Toy, write_files

EARLY = "0002-model-change-an-early-line.patch"
LATE = "0003-model-change-a-late-line.patch"


class Author:
    """Somebody with plain git and an edit tree."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.tree = EditTree(toy.workspace().edit)

    def open(self, *, discard: bool = False) -> EditTree:
        return open_edit(self.toy.workspace(), self.tree.path, discard=discard)

    def git(self, *arguments: str, **env: str) -> str:
        """Run git as a user does: with a configuration and no hermetic settings."""
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.tree.path,
            env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def write(self, path: str, old: str, new: str) -> None:
        file = self.tree.path / path
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    def commit(self, subject: str, path: str = MODEL) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", MESSAGE.format(subject=subject, path=path).rstrip())

    def fixup(self, subject: str) -> None:
        """Fold the changes into the patch of this subject, as the printed commands do."""
        self.git("commit", "--quiet", "-a", "--fixup", f":/{subject}")
        self.git("rebase", "-i", "--autosquash", "pristine", GIT_SEQUENCE_EDITOR="true")

    def export(self, because: str | None = None) -> list[str]:
        return export_edit(self.toy.workspace(), self.tree, because).summary()

    def names(self) -> list[str]:
        return [patch.name for patch in load_patches(self.toy.patches)]


def dirty(author: Author) -> None:
    author.write(MODEL, "line_9 = 9\n", "line_9 = 99\n")


def untracked(author: Author) -> None:
    write_files(author.tree.path, {"notes.txt": "x"})


def commit(author: Author) -> None:
    dirty(author)
    author.commit("model: change a line")


def dropped_commit(author: Author) -> None:
    author.git("reset", "--quiet", "--hard", "HEAD~1")
