"""Change the series: open it as commits, add one, write it back, take one out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from buildtools.console import BuildError, step
from buildtools.dropped import Dropped, read_dropped
from buildtools.edition import Edition, digest, files_of, make_edition, subject_of
from buildtools.edittree import BASE, EditTree, Marker
from buildtools.git import user_identity
from buildtools.history import export
from buildtools.patchfile import Patch, parse_patch
from buildtools.paths import scratch_dir, swap_in
from buildtools.replay import conflicts, pick, start_at
from buildtools.series import PLACEHOLDER, REASONS, SUBJECT, file_name
from buildtools.transaction import replace_all
from buildtools.workspace import Workspace

_TEMPLATE = """{subject}

Why a patch: {mark} why the overlay alone cannot do it.

When off: {mark} what stays when the feature is off.

Reason: {reason}
Upstream-Status: {mark} pending, submitted <URL>, backport <SHA>, or inappropriate <why>
Drop-When: {mark} the observable condition under which the patch is deleted
Tripwires: {mark} upstream symbols it leans on
Guard-Test: {mark} tests/...py::test_name, which fails when the patch is left out
"""


def require_exported(tree: EditTree, remedy: str) -> None:
    """Check that an edit tree may be replaced or left behind.

    Raises:
        BuildError: it holds work that ``patches/`` does not have, or that cannot be told.
    """
    if not tree.exists:
        return
    try:
        work = tree.unexported()
    except BuildError as error:
        work = [str(error)]
    if work:
        lines = [f"{tree.path} holds work that is not exported:", *(f"  {row}" for row in work)]
        raise BuildError("\n".join([*lines, remedy]))


def open_edit(workspace: Workspace, destination: Path, *, discard: bool) -> EditTree:
    """Open the series at ``destination``.

    Args:
        workspace: this clone.
        destination: directory for the edit tree; an edit tree without work in it is replaced.
        discard: whether unexported work there may be thrown away.

    Raises:
        BuildError: something else is there, or work that would be lost.
    """
    workspace.require_no_rebase()
    there = EditTree(destination)
    if destination.exists() and not there.exists and any(destination.iterdir()):
        raise BuildError(f"{destination} exists and is no edit tree; name another --output")
    if not discard:
        require_exported(there, "`build.py export` writes it back; --discard throws it away")
    with scratch_dir(destination.absolute().parent) as scratch:
        history = workspace.history(scratch / "edit")
        EditTree.of(history)
        swap_in(scratch / "edit", destination)
    return there


def new_patch(tree: EditTree, subject: str, reason: str | None) -> str:
    """Commit the changes in the edit tree as a patch with a header to be filled in.

    Returns:
        The commit.

    Raises:
        BuildError: there is no change, the subject will not do, or the change is one that a patch
            must not make.
    """
    tree.require_ready()
    if not SUBJECT.match(subject):
        raise BuildError(
            f"subject {subject!r} is not '<area>: <imperative>', e.g. 'mimo: refuse x'"
        )
    subjects = tree.git.run("log", "--format=%s", f"{BASE}..HEAD").splitlines()
    if subject in subjects:
        raise BuildError(f"a patch with the subject {subject!r} is there already")
    if not tree.dirty():
        raise BuildError(f"{tree.path}: nothing has changed: edit files there first")
    git = tree.git
    staged = git.tree_id()
    git.run("add", "--all", ".")
    try:
        text = _TEMPLATE.format(
            subject=subject,
            mark=PLACEHOLDER,
            reason=reason or f"{PLACEHOLDER} one of {', '.join(REASONS)}",
        )
        author = user_identity(tree.path) or {}
        commit = git.commit_tree(
            git.tree_id(), "HEAD", text, author | {"GIT_AUTHOR_DATE": f"@{int(time.time())} +0000"}
        )
        parse_patch(file_name(0, subject), export(git, [commit])[0])
    except BaseException:
        git.run("read-tree", staged)
        raise
    git.run("reset", "--quiet", "--soft", commit)
    return commit


def export_edit(workspace: Workspace, tree: EditTree, because: str | None) -> Edition:
    """Write the commits of the edit tree into ``patches/``, all or nothing.

    Args:
        workspace: this clone.
        tree: where the commits are.
        because: why patches that are gone from the tree are dropped.

    Raises:
        BuildError: the tree is not ready, its commits are no series, ``patches/`` has changed
            since the tree was opened, or a patch is gone and nobody said why.
    """
    workspace.require_no_rebase()
    tree.require_ready()
    tree.require_clean()
    recipe = workspace.recipe
    if tree.marker().series != digest(recipe.patches):
        raise BuildError(
            f"{workspace.patches} has changed since {tree.path} was opened: export would undo "
            "that. Open the series anew with `build.py edit --output DIR` and cherry-pick your "
            "commits there"
        )
    commits = tree.commits(recipe.pin.lock.pristine)
    gone = read_dropped(workspace.patches)
    edition = make_edition(tree.git, BASE, commits, recipe.patches, gone)
    if edition.removed and not (because or "").strip():
        raise BuildError(
            f"{', '.join(edition.removed)}: gone from {tree.path}. If that is intended, say why: "
            "build.py export --because TEXT"
        )
    if because is not None and not edition.removed:
        raise BuildError("--because: no patch is gone from the edit tree")
    marker = Marker(digest(edition.patches), tree.head).to_json().encode()
    _write(workspace, edition, because or "", {tree.marker_file.resolve(): marker})
    return edition


def _write(
    workspace: Workspace, edition: Edition, because: str, also: dict[Path, bytes | None]
) -> None:
    old = {patch.name: patch for patch in workspace.recipe.patches}
    dropped = [
        dropped_entry(old[name], workspace.recipe.pin.version, because) for name in edition.removed
    ]
    files = files_of(edition, workspace.patches.resolve(), dropped)
    replace_all(files | also, workspace.journal)


def dropped_entry(patch: Patch, version: str, reason: str) -> Dropped:
    """Return what the record says of a patch that goes."""
    return Dropped(patch.name, subject_of(patch), version, reason)


def find_patch(patches: Iterable[Patch], text: str) -> Patch:
    """Return the patch that ``text`` names: by its number, or the start of its name.

    Raises:
        BuildError: none or several are named.
    """
    number = f"{int(text):04d}-" if text.isascii() and text.isdigit() else None
    found = [patch for patch in patches if patch.name.startswith(number or text)]
    exact = [patch for patch in found if patch.name == text]
    if len(exact or found) != 1 or not text:
        names = ", ".join(patch.name for patch in found) or "none"
        raise BuildError(f"{text!r} must name one patch, by number or start of name: {names}")
    return (exact or found)[0]


def drop(workspace: Workspace, text: str, because: str) -> Edition:
    """Take a patch out of the series, and carry the later ones over the gap by a real merge.

    Raises:
        BuildError: no reason is given, a later patch depends on it, or it is the only one.
    """
    workspace.require_no_rebase()
    require_exported(EditTree(workspace.edit), "export it, or drop the patch there")
    if not because.strip():
        raise BuildError("--because is empty: say why the patch is dropped")
    patches = workspace.recipe.patches
    patch = find_patch(patches, text)
    with step(f"drop {patch.name}"), scratch_dir(workspace.work) as scratch:
        history = workspace.history(scratch / "tree")
        git = history.git
        names = [each.name for each in patches]
        position = names.index(patch.name)
        commits = [history.commits[name] for name in names]
        start_at(git, f"{commits[position]}^")
        for name, commit in zip(names[position + 1 :], commits[position + 1 :], strict=True):
            if not pick(git, commit):
                raise BuildError(_depends(patch, name, sorted(conflicts(git))))
        kept = git.run("rev-list", "--reverse", f"{history.base}..HEAD").split()
        gone = read_dropped(workspace.patches)
        edition = make_edition(git, history.base, kept, patches, gone)
        _write(workspace, edition, because, {})
    return edition


def _depends(patch: Patch, name: str, paths: list[str]) -> str:
    return (
        f"{patch.name} cannot be dropped alone: {name} changes lines next to it in "
        f"{', '.join(paths)}. Do it by hand:\n"
        "  build.py edit && cd .work/edit && git rebase -i pristine\n"
        f"  delete the line of {subject_of(patch)!r}, resolve, git add, git rebase --continue\n"
        "  build.py export --because TEXT"
    )
