"""What the person at the terminal sees: errors, and steps with their duration."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


class BuildError(Exception):
    """The build, a check or a verification failed for a reason the user can act on.

    The message says what was expected, what was found and what to do; ``build.py`` prints it
    without a traceback and exits with status 1.
    """


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Show ``title`` while the body runs and its duration once it is done."""
    sys.stderr.write(f"==> {title} ...\n")
    sys.stderr.flush()
    start = time.monotonic()
    yield
    sys.stderr.write(f"    {title}: {time.monotonic() - start:.1f} s\n")
    sys.stderr.flush()


def say(line: str) -> None:
    """Print a result of the verb to standard output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def warn(line: str) -> None:
    """Print a warning to standard error."""
    sys.stderr.write(f"warning: {line}\n")
    sys.stderr.flush()
