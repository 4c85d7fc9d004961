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

from buildtools.console import BuildError  # noqa: E402
from buildtools.verbs import VERBS  # noqa: E402

EPILOG = """exit status: 0 success, 1 failure, 2 wrong usage; of `doctor`: 0 patched and intact,
1 damaged or shadowed, 3 not patched, 4 nothing found; always: 5 no Python 3.12"""


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
    doctor = add("doctor", sources=False)
    subject = doctor.add_mutually_exclusive_group(required=True)
    subject.add_argument("wheel", nargs="?", metavar="WHEEL", help="a wheel file")
    subject.add_argument(
        "--installed", action="store_true", help="what `import megatron.core` takes"
    )
    doctor.add_argument("--python", help="whose installation (default: what started build.py)")
    add("check")
    # A new lock is made from the index alone: its hash vouches for the pristine tree.
    add("pin", sources=False).set_defaults(source="index", engine="git")
    add("clean", sources=False)
    args, passed_on = parser.parse_known_args(argv)
    if passed_on and args.verb not in ("test", "train-example"):
        parser.error(f"unrecognized arguments: {' '.join(passed_on)}")
    args.passed_on = passed_on
    return args


def main() -> int:
    """Run the verb."""
    os.umask(0o022)  # file modes go into the wheel
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that scratch is removed
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    args = parse(sys.argv[1:])
    try:
        return VERBS[args.verb](args)
    except (BuildError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
