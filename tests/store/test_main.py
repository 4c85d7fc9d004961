"""The tools run without Megatron and torch, and print nothing else, when run by their path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.optimizer.nvme_state_store import errors

from tests.store.plans import PLAIN

PACKAGE = Path(errors.__file__).parent


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a Python with all its warnings."""
    words = [sys.executable, "-W", "always", *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("place", [PACKAGE, PACKAGE / "__main__.py"])
def test_the_path_of_the_package_runs_it_with_clean_output(place: Path) -> None:
    """Even by a Python that has no packages at all: -I -S."""
    done = run("-I", "-S", place, "plan", *PLAIN)

    assert done.returncode == 0
    assert done.stdout.startswith("model   2.000 B params")
    assert done.stderr == ""


def test_its_status_is_the_commands() -> None:
    assert run(PACKAGE, "plan", *PLAIN, "--disk-gb", 1).returncode == 1
    assert run(PACKAGE, "plan").returncode == 2
    assert run(PACKAGE, "probe", "/nowhere/at/all").returncode == 1


def test_its_own_modules_do_not_hide_those_of_the_standard_library() -> None:
    """Python puts the directory of a script before all else."""
    script = (
        "import runpy, sys; sys.argv = ['x', 'plan']; "
        f"sys.path.insert(0, {str(PACKAGE)!r})\n"
        f"try: runpy.run_path({str(PACKAGE / '__main__.py')!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        f"assert {str(PACKAGE)!r} not in sys.path"
    )
    done = run("-c", script)
    assert done.returncode == 0, done.stderr


def test_as_a_module_the_command_itself_prints_nothing_on_stderr() -> None:
    """What is there is of the packages above, which Python imports first: see `__main__`."""
    script = (
        "import runpy, sys, megatron.core.optimizer; sys.stderr.flush(); "
        "print('MARK', file=sys.stderr, flush=True); sys.argv[1:] = ['plan', '--params', '2e9']; "
        "runpy.run_module('megatron.core.optimizer.nvme_state_store', run_name='__main__', "
        "alter_sys=True)"
    )
    done = run("-c", script)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model   2.000 B params")
    assert done.stderr.partition("MARK\n")[2] == ""
