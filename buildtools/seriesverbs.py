"""The verbs of ``build.py`` that change the series or move it to another upstream."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

from buildtools.authoring import drop as drop_patch
from buildtools.authoring import export_edit, new_patch, open_edit, require_exported
from buildtools.check import RECORD, lint
from buildtools.console import BuildError, say, step
from buildtools.edition import Edition
from buildtools.edittree import EditTree
from buildtools.paths import WORK
from buildtools.project import project_shop, project_workspace
from buildtools.rebase import Finished, Rebase, Stopped
from buildtools.rebaseend import Findings
from buildtools.status import status as status_of
from buildtools.transaction import exclusive
from buildtools.tripwires import render_finding
from buildtools.watch import Watch, read_sources
from buildtools.workspace import Workspace

SERIES = WORK / "series"
"""What the verbs that write the series or open it use alone (`exclusive`)."""
_NEXT = "next: build.py pin && build.py check"
_SHOWN = 60
"""Lines of a conflict that the terminal shows; the files hold all of them."""


def _alone(verb: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Refuse a verb while another of them is at work: two would write over each other."""

    @functools.wraps(verb)
    def alone(args: argparse.Namespace) -> int:
        with exclusive(SERIES, verb.__name__, wait=False):
            return verb(args)

    return alone


def _workspace(args: argparse.Namespace) -> Workspace:
    return project_workspace(offline=args.offline)


def _tree(args: argparse.Namespace, workspace: Workspace) -> EditTree:
    return EditTree(Path(args.edit) if args.edit else workspace.edit)


@_alone
def edit(args: argparse.Namespace) -> int:
    """Open the series as a git repository, one commit per patch."""
    if args.output == "":
        raise BuildError("--output is empty; name a directory, or leave it out")
    workspace = _workspace(args)
    destination = Path(args.output) if args.output else workspace.edit
    with step("open the series"):
        open_edit(workspace, destination, discard=args.discard)
    chosen = f" --edit {args.output}" if args.output else ""
    say(
        f"{destination}: branch series, {len(workspace.recipe.patches)} commits on tag pristine\n"
        "  change a patch:  git commit -a --fixup COMMIT && git rebase -i --autosquash pristine\n"
        f'  add a patch:     edit files, build.py new "area: imperative"{chosen}, '
        "git commit --amend\n"
        f"  write it back:   build.py export{chosen}"
    )
    return 0


@_alone
def new(args: argparse.Namespace) -> int:
    """Commit the changes in the edit tree as a new patch."""
    tree = _tree(args, _workspace(args))
    commit = new_patch(tree, args.subject, args.reason)
    say(
        f"{commit[:12]} {args.subject}\n"
        f"fill in its header: git -C {tree.path} commit --amend; then build.py export"
    )
    return 0


def _say_edition(edition: Edition) -> None:
    lines = edition.summary()
    say("\n".join(lines) if lines else "nothing has changed")


@_alone
def export(args: argparse.Namespace) -> int:
    """Write the commits of the edit tree back into patches/."""
    workspace = _workspace(args)
    edition = export_edit(workspace, _tree(args, workspace), args.because)
    _say_edition(edition)
    _require_finished(args)
    if edition.summary():
        say(_NEXT)
    return 0


@_alone
def drop(args: argparse.Namespace) -> int:
    """Take a patch out of the series and record why."""
    _say_edition(drop_patch(_workspace(args), args.name, args.because))
    _require_finished(args)
    say(_NEXT)
    return 0


def _require_finished(args: argparse.Namespace) -> None:
    """Raise a BuildError if the series in ``patches/``, now written, is none that may be pinned."""
    workspace = _workspace(args)
    try:
        lint(workspace.recipe, workspace.root)
    except BuildError as error:
        raise BuildError(
            f"patches/ holds your work, but `pin` and `check` refuse it so far: {error}\n"
            "mend it in the edit tree (`git commit --amend`, or `git rebase -i pristine` for an "
            "earlier patch; `build.py edit` opens one), then build.py export again"
        ) from error


def status(args: argparse.Namespace) -> int:
    """Say what is open, what is not exported, and whether lock and table are current."""
    workspace = _workspace(args)
    found = status_of(workspace, _tree(args, workspace))
    say("\n".join(found.lines))
    return 1 if found.unexported else 0


@_alone
def rebase(args: argparse.Namespace) -> int:
    """Move the series to another upstream by real merges; 1 if somebody has to look or resolve."""
    workspace = _workspace(args)
    this = Rebase(workspace, _findings(workspace))
    report = Path(args.report) if args.report else None
    if args.abort:
        if report or args.because is not None:
            raise BuildError("--abort takes neither --report nor --because")
        this.abort()
        say("the rebase is given up; patches/ and upstream.toml are as they were")
        return 0
    if not args.go_on and args.because is not None:
        raise BuildError("--because belongs to --continue")
    shop = project_shop(offline=args.offline)
    result = this.go_on(args.because, report) if args.go_on else this.begin(args.to, shop, report)
    status = _say_rebase(result)
    if isinstance(result, Finished):
        _require_finished(args)
    return status


def _findings(workspace: Workspace) -> Findings:
    """Return what examines the new upstream's pristine tree for `Report.findings`."""

    def examine(pristine: Path) -> list[str]:
        watch = Watch(workspace.recipe, workspace.patches / RECORD)
        found = watch.findings(read_sources(pristine))
        return [render_finding(finding) for finding in found]

    return examine


def _say_rebase(result: Stopped | Finished) -> int:
    if isinstance(result, Stopped):
        say(f"conflict: {result.patch.name}")
        say("\n".join(f"  {line}" for line in result.files))
        lines = "\n\n".join(result.sides).splitlines()
        say("\n".join(f"    {line}" for line in lines[:_SHOWN]))
        if len(lines) > _SHOWN:
            say(f"    ... {len(lines) - _SHOWN} more lines")
        say(
            f"resolve it in {result.tree} (HEAD is the new upstream with the patches before it), "
            "git add, then\n  build.py rebase --continue     or  build.py rebase --abort"
        )
        return 1
    if result.report is None:
        say("the series was written by the run before; the rebase is closed")
    else:
        say(result.report.to_text())
        say("")
        say("\n".join(f"written: {path.name}" for path in result.changed) or "no file has changed")
    say("next: build.py pin && build.py check (and [release] revision, [published] by hand)")
    if result.report is None or result.report.clean:
        return 0
    say("status 1, because there is something to look at (see above); the rebase itself is closed")
    return 1


def require_nothing_open() -> None:
    """Raise a BuildError if ``.work`` holds work that ``patches/`` does not have."""
    if (WORK / "rebase").exists():
        raise BuildError("a rebase is open: build.py rebase --continue or --abort first")
    remedy = "build.py export writes it back; remove the directory yourself to throw it away"
    require_exported(EditTree(WORK / "edit"), remedy)
