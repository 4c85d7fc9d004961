"""Carry commits to another base with the merge that ``git rebase --onto`` uses, one at a time.

Never ``git am -3`` or ``git apply``: they take the first place the lines fit, which has been
measured to be a twin function (the cases stand in tests/buildtools/test_placement.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from buildtools.console import BuildError
from buildtools.git import Git

_MARKER = re.compile(rb"^(<{7}|\|{7}|>{7}) .*$", re.MULTILINE)


def commit_directory(git: Git, directory: Path, parent: str, message: str) -> str:
    """Commit the files below ``directory``, which lies outside the repository, on ``parent``."""
    repository = git.worktree.resolve() / ".git"
    index = repository / "index.directory"
    env = {
        "GIT_DIR": str(repository),
        "GIT_WORK_TREE": str(directory.resolve()),
        "GIT_INDEX_FILE": str(index),
    }
    index.unlink(missing_ok=True)
    try:
        git.run("-C", str(directory.resolve()), "add", "--all", "--force", ".", env=env)
        tree = git.run("write-tree", env=env)
    finally:
        index.unlink(missing_ok=True)
    return git.commit_tree(tree, parent, message)


def pick(git: Git, commit: str) -> bool:
    """Merge what ``commit`` changes into HEAD and commit it, also if nothing is left of it.

    Returns:
        Whether that went without a conflict. The worktree is left in the conflict otherwise.

    Raises:
        BuildError: git failed for another reason.
    """
    done = git.attempt(
        "cherry-pick", "--strategy=ort", "--allow-empty", "--keep-redundant-commits", commit
    )
    if done.returncode == 0:
        return True
    if conflicts(git):
        return False
    raise BuildError(f"git cherry-pick {commit} failed: {done.stderr.decode(errors='replace')}")


def start_at(git: Git, commit: str) -> None:
    """Put the worktree at ``commit``, whatever state it is in."""
    git.run("reset", "--quiet", "--hard")
    git.run("checkout", "--quiet", "--detach", commit)
    git.run("clean", "--quiet", "-d", "--force", "-x")


def is_empty(git: Git, commit: str) -> bool:
    """Return whether a commit changes nothing."""
    trees = git.run("rev-parse", f"{commit}^{{tree}}", f"{commit}^^{{tree}}").split()
    return trees[0] == trees[1]


def conflicts(git: Git) -> dict[str, str]:
    """Return the paths that are not merged, each with what kind of conflict it is."""
    stages: dict[str, set[str]] = {}
    for row in git.output("ls-files", "--unmerged", "-z").split(b"\0"):
        head, _, path = row.decode(errors="surrogateescape").partition("\t")
        if path:
            stages.setdefault(path, set()).add(head.split()[2])
    return {path: _kind(found) for path, found in stages.items()}


def _kind(stages: set[str]) -> str:
    if "2" not in stages:
        return "upstream deleted it, or moved it too far to be followed"
    if "3" not in stages:
        return "the patch deletes it"
    return "both changed the same lines"


def conflict_hunks(content: bytes) -> list[str]:
    """Return the pieces of a file between conflict markers, with the markers."""
    found: list[str] = []
    inside: list[str] | None = None
    for line in content.decode("utf-8", errors="replace").split("\n"):
        if line.startswith("<<<<<<< "):
            inside = []
        if inside is not None:
            inside.append(line)
            if line.startswith(">>>>>>> "):
                found.append("\n".join(inside))
                inside = None
    return found


def has_markers(content: bytes) -> bool:
    """Return whether a conflict marker starts a line."""
    return _MARKER.search(content) is not None


def renames(git: Git, old: str, new: str) -> dict[str, str]:
    """Return which files of commit ``old`` have another path in commit ``new``."""
    fields = git.output(
        "diff", "--name-status", "-M", "-l0", "--diff-filter=R", "-z", old, new
    ).split(b"\0")
    names = [field.decode(errors="surrogateescape") for field in fields]
    return {names[n + 1]: names[n + 2] for n in range(0, len(names) - 2, 3)}
