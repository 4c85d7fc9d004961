"""Somebody who moves the toy's series to another upstream, and what is to be expected."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from buildtools.apply import PythonEngine
from buildtools.rebase import Finished, Rebase, Stopped
from buildtools.releases import Shop
from buildtools.tree import assemble
from tests.buildtools.toy import FILES, MODEL, PACKAGE_INFO, Toy, write_files

EARLY = "0002-model-change-an-early-line.patch"
LATE = "0003-model-change-a-late-line.patch"
NEXT = FILES | {PACKAGE_INFO: FILES[PACKAGE_INFO].replace("PATCH = 3", "PATCH = 4")}
MOVED = {MODEL: "first = 0\n" + FILES[MODEL]}
UPSTREAMED = {MODEL: FILES[MODEL].replace("line_5 = 5\n", "line_5 = 55\n")}
CONFLICTING = {MODEL: FILES[MODEL].replace("line_5 = 5\n", "line_5 = 6\n")}


class Mover:
    """Somebody who moves the toy to another upstream."""

    def __init__(self, toy: Toy, root: Path) -> None:
        self.toy = toy
        self.root = root

    @property
    def rebase(self) -> Rebase:
        return Rebase(self.toy.workspace())

    @property
    def tree(self) -> Path:
        return self.toy.workspace().rebase / "tree"

    def upstream(self, changes: dict[str, str]) -> Path:
        root = self.root / "upstream"
        shutil.rmtree(root, ignore_errors=True)
        return write_files(root, NEXT | changes)

    def begin(self, changes: dict[str, str], report: Path | None = None) -> Stopped | Finished:
        shop = Shop(self.toy.root / "cache", self.toy.download, None)
        return self.rebase.begin(str(self.upstream(changes)), shop, report)

    def go_on(self, because: str | None = None) -> Stopped | Finished:
        return self.rebase.go_on(because, None)

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.tree, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def resolve(self, path: str = MODEL, *, value: str = "line_5 = 65\n") -> None:
        """Take our side of every conflict in a file, with a value of its own, and add it."""
        lines, keep = [], True
        for line in (self.tree / path).read_text().splitlines(keepends=True):
            if line.startswith(("<<<<<<< ", "||||||| ")):
                keep = False
            elif line.startswith("======="):
                lines.append(value)
            elif line.startswith(">>>>>>> "):
                keep = True
            elif keep:
                lines.append(line)
        (self.tree / path).write_text("".join(lines))
        self.git("add", path)

    def assembled(self) -> Path:
        """Return the tree that the rebased series makes of the new upstream."""
        workspace = self.toy.workspace()
        source = replace(workspace.recipe.source, kind="path", path=self.root / "upstream")
        destination = self.root / "assembled"
        shutil.rmtree(destination, ignore_errors=True)
        recipe = replace(workspace.recipe, source=source)
        assemble(recipe, PythonEngine(), destination, locked=False)
        return destination


def finished(result: Stopped | Finished) -> Finished:
    assert isinstance(result, Finished), result
    return result


def fates(result: Stopped | Finished) -> list[str]:
    report = finished(result).report
    assert report is not None
    return [patch.fate for patch in report.patches]
