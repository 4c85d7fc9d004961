#!/usr/bin/env python3
"""Build, test and verify the patched Megatron-core wheel."""

# The command line and nothing else: each verb is one function of buildtools/verbs.py.

import os
import sys

ROOT = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, ROOT)
sys.dont_write_bytecode = True

from buildtools.interpreter import restart_under_required_python  # noqa: E402

restart_under_required_python(ROOT, os.path.abspath(__file__))

import argparse  # noqa: E402
import signal  # noqa: E402
from collections.abc import Callable  # noqa: E402

from buildtools.console import BuildError  # noqa: E402
from buildtools.paths import WORK  # noqa: E402
from buildtools.transaction import recover  # noqa: E402
from buildtools.verbs import VERBS  # noqa: E402

EPILOG = """exit status: 0 success, 1 failure, 2 wrong usage; of `doctor`: 0 patched and intact,
1 damaged or shadowed, 3 not patched, 4 nothing found, 6 intact, but another build than this
checkout's; always: 5 no Python 3.12"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="build.py", description=__doc__, epilog=EPILOG)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, *, sources: bool = True) -> argparse.ArgumentParser:
        title = (VERBS[name].__doc__ or "").partition("\n")[0]
        verb = verbs.add_parser(name, help=title, description=title)
        if sources:
            verb.add_argument(
                "--source",
                default="index",
                help="where upstream comes from: index (default), git, or the path of an archive "
                "or directory; all are verified against upstream.toml",
            )
            verb.add_argument(
                "--engine",
                choices=["git", "python-patch"],
                default="git",
                help="what applies the patches; both give the same tree",
            )
        verb.add_argument(
            "--offline", action="store_true", help="use the cache and never the network"
        )
        return verb

    add("fetch", sources=False)
    for name in ("tree", "wheel"):
        add(name).add_argument("--output", help="directory for the result")
    add("test").epilog = "other arguments go to pytest (with -m 'not gpu' unless -m is given)"
    add("train-example").epilog = (
        "other arguments are passed to examples/train_gpt.py: --ranks N, --steps N, --text FILE, "
        "--work-dir DIR, --keep; after `--`, to Megatron"
    )
    add_image(add)
    doctor = add("doctor", sources=False)
    doctor.add_argument("wheel", nargs="?", metavar="WHEEL", help="a wheel file")
    doctor.add_argument(
        "--installed", action="store_true", help="what `import megatron.core` takes"
    )
    doctor.add_argument("--python", help="with --installed: whose (default: what started build.py)")
    add("check").add_argument(
        "--tree",
        metavar="VERSION|PATH|git:REF",
        help="check another upstream against the series, the tripwires and the census",
    )
    drift = add("drift", sources=False)
    drift.set_defaults(source="index")
    which = drift.add_mutually_exclusive_group(required=True)
    which.add_argument("--against", nargs="+", metavar="VERSION|PATH|git:REF")
    which.add_argument("--latest", action="store_true", help="the newest release of the index")
    drift.add_argument("--details", action="store_true", help="print all that is not as it was")
    drift.add_argument("--report", metavar="FILE.md|FILE.json", help="write all of it there")
    # A new lock is made from the index alone: its hash vouches for the pristine tree.
    pin = add("pin", sources=False)
    pin.set_defaults(source="index", engine="git")
    pin.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="NAME",
        help="a tripwire or reader, as `check` names it; may be given several times",
    )
    pin.add_argument("--because", metavar="TEXT", help="why it is fine; needed for --accept")
    pin.add_argument(
        "--as",
        dest="classed",
        choices=["served", "refused", "harmless"],
        help="what a reader is while state is on disk",
    )
    add_series_verbs(add)
    add("clean", sources=False)
    args, passed_on = parser.parse_known_args(argv)
    takers = ["test", "train-example", *(["image"] if passed_on[:1] == ["--"] else [])]
    if passed_on and args.verb not in takers:
        parser.error(f"unrecognized arguments: {' '.join(passed_on)}")
    args.passed_on = passed_on
    problem = subject_problem(args) if args.verb == "doctor" else None
    if problem is not None:
        doctor.error(problem)
    return args


def subject_problem(args: argparse.Namespace) -> str | None:
    """Return why it is not clear what the doctor is to examine, or None."""
    forms = "expected `doctor WHEEL`, or `doctor --installed [--python PYTHON]`"
    if "" in (args.wheel, args.python):
        return f"{'WHEEL' if args.wheel == '' else '--python'} is empty; {forms}"
    if args.wheel is None and not args.installed:
        return f"nothing is named that could be examined; {forms}"
    if args.wheel is not None and (args.installed or args.python is not None):
        other = "--installed" if args.installed else "--python"
        return f"{args.wheel} is a wheel file, {other} is about what is installed; {forms}"
    return None


def add_image(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the verb that makes an image."""
    image = add("image", sources=False)
    image.set_defaults(source="index", engine="git")
    image.epilog = "arguments after `--` go to the engine's build command"
    image.add_argument("--base", metavar="IMAGE", help="default: the Dockerfile's BASE_IMAGE")
    image.add_argument("--tag", metavar="NAME[:TAG]", help="default: megatron-nvme:VERSION")
    image.add_argument(
        "--engine",
        dest="container_engine",
        choices=["docker", "podman", "buildah"],
        help="default: the first of these that works",
    )
    image.add_argument("--dry-run", action="store_true", help="show the command, build no image")
    what = image.add_mutually_exclusive_group()
    what.add_argument("--wheel", metavar="WHEEL", help="bake this one (default: the tree's)")
    what.add_argument(
        "--inside", action="store_true", help="build the wheel in a stage of the image"
    )


def add_series_verbs(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the verbs that change the series, or move it to another upstream."""
    edit = add("edit", sources=False)
    edit.add_argument("--output", metavar="DIR", help="where to (default: .work/edit)")
    edit.add_argument(
        "--discard", action="store_true", help="throw away work there that is not exported"
    )
    new = add("new", sources=False)
    new.add_argument("subject", help='"<area>: <imperative>"')
    new.add_argument("--reason", choices=["hook", "upstream-bug", "packaging"])
    export = add("export", sources=False)
    export.add_argument("--because", metavar="TEXT", help="why patches are gone from the tree")
    for verb in (new, export, add("status", sources=False)):
        verb.add_argument("--edit", metavar="DIR", help="the edit tree (default: .work/edit)")
    drop = add("drop", sources=False)
    drop.add_argument("name", help="number or start of the name of a patch")
    drop.add_argument("--because", metavar="TEXT", required=True, help="why")
    rebase = add("rebase", sources=False)
    action = rebase.add_mutually_exclusive_group(required=True)
    action.add_argument("--to", metavar="VERSION|PATH|git:REF", help="start a rebase")
    action.add_argument(
        "--continue", dest="go_on", action="store_true", help="the conflict is resolved"
    )
    action.add_argument("--abort", action="store_true", help="give the open rebase up")
    rebase.add_argument("--report", metavar="FILE.md|FILE.json", help="write the report there")
    rebase.add_argument(
        "--because", metavar="TEXT", help="why a patch is dropped of which nothing is left"
    )


def main() -> int:
    """Run the verb."""
    os.umask(0o022)  # file modes go into the wheel
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that scratch is removed
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    args = parse(sys.argv[1:])
    try:
        if args.verb != "doctor":
            recover(WORK / "journal")
        return VERBS[args.verb](args)
    except (BuildError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
