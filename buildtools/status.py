"""What is open in this clone, and what is not written back."""

from __future__ import annotations

from dataclasses import dataclass, field

from buildtools.apply import PythonEngine
from buildtools.check import generated_files, lint
from buildtools.console import BuildError
from buildtools.dropped import read_dropped
from buildtools.edition import digest, make_edition
from buildtools.edittree import BASE, EditTree
from buildtools.paths import scratch_dir
from buildtools.rebasestate import DONE, load, path_of
from buildtools.tree import assemble
from buildtools.workspace import Workspace


@dataclass
class Status:
    """What `build.py status` says.

    Attributes:
        lines: what to print.
        unexported: whether work exists that ``patches/`` does not have.
    """

    lines: list[str] = field(default_factory=list)
    unexported: bool = False


def status(workspace: Workspace, tree: EditTree) -> Status:
    """Look at the edit tree, an open rebase, the generated files and the lock."""
    found = Status()
    _edit(found, workspace, tree)
    _rebase(found, workspace)
    unfinished = False
    try:
        lint(workspace.recipe, workspace.root)
        stale = [
            path.name
            for path, text in generated_files(workspace.recipe, workspace.patches).items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
    except BuildError as error:
        found.lines.append(str(error))
        stale, unfinished = [], True  # generated files are made of headers that are complete
    if stale:
        found.lines.append(f"not current: {', '.join(stale)}: build.py pin")
    if problem := _lock_problem(workspace):
        found.lines.append(f"the lock is not current: build.py pin\n  {problem}")
    if not (stale or unfinished or problem):
        found.lines.append("lock and generated files: current")
    return found


def _edit(found: Status, workspace: Workspace, tree: EditTree) -> None:
    if not tree.exists:
        found.lines.append("edit: not open")
        return
    try:
        work = tree.unexported()
        stale = tree.marker().series != digest(workspace.recipe.patches)
        differs = _differences(workspace, tree) if work and not stale else []
    except BuildError as error:
        work, stale, differs = [str(error)], False, []
    found.unexported |= bool(work)
    found.lines.append(f"edit: {tree.path}: {'unexported work' if work else 'all is exported'}")
    found.lines += [f"  {row}" for row in [*work, *differs]]
    if stale:
        found.lines.append("  patches/ has changed since it was opened: open it anew")


def _differences(workspace: Workspace, tree: EditTree) -> list[str]:
    """Return what `export` would change, or why it would refuse."""
    recipe = workspace.recipe
    try:
        commits = tree.commits(recipe.pin.lock.pristine)
        gone = read_dropped(workspace.patches)
        return make_edition(tree.git, BASE, commits, recipe.patches, gone).summary()
    except BuildError as error:
        return [f"export would refuse: {error}"]


def _rebase(found: Status, workspace: Workspace) -> None:
    if not workspace.rebase.exists():
        found.lines.append("rebase: not open")
        return
    found.unexported = True
    try:
        state = load(path_of(workspace.rebase))
    except BuildError as error:
        found.lines.append(f"rebase: {error}")
        return
    done = sum(each.state == DONE for each in state.steps)
    found.lines.append(
        f"rebase to {state.target.version}: {done} of {len(state.steps)} patches are done: "
        "build.py rebase --continue or --abort"
    )
    if state.waiting:
        found.lines.append(f"  a conflict waits in {workspace.rebase / 'tree'}: {state.waiting}")


def _lock_problem(workspace: Workspace) -> str | None:
    try:
        with scratch_dir(workspace.work) as scratch:
            assemble(workspace.recipe, PythonEngine(), scratch / "tree")
    except BuildError as error:
        return str(error)
    return None
