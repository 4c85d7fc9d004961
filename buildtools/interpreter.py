"""Find Python 3.12 and restart under it.

Upstream requires Python >= 3.12 and the wheel is built for 3.12, but ``python3 build.py`` may be
started by whatever Python 3 the machine calls ``python3``.  This is the one module of
``buildtools`` that runs under that older interpreter: it must stay importable by Python 3.6 and
import only the standard library.
"""

import os
import subprocess
import sys
from typing import Iterator, Optional, Tuple

REQUIRED = (3, 12)
STARTED_BY = "MEGATRON_NVME_STARTED_BY"
"""Environment variable that holds the interpreter ``build.py`` was started with; ``doctor
--installed`` inspects that one's environment, not the environment of the Python 3.12 we found."""

NO_PYTHON = 5
"""Exit status when there is no Python 3.12: no verdict of the doctor's, and no failed build."""
_RESTARTED = "MEGATRON_NVME_RESTARTED"
"""Set across the restart: an interpreter that lies about its version must not loop for ever."""


def _candidates(root: str) -> Iterator[Tuple[str, str]]:
    """Yield ``(where it comes from, command)`` in the order in which they are tried."""
    chosen = os.environ.get("UV_PYTHON")
    if chosen:
        yield "UV_PYTHON", "python" + chosen if chosen[:1].isdigit() else chosen
    version_file = os.path.join(root, ".python-version")
    if os.path.exists(version_file):
        with open(version_file) as stream:
            pin = (stream.read().split() or [""])[0]
        pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
        versions = os.path.join(pyenv, "versions")
        if os.path.isdir(versions):
            for name in sorted(os.listdir(versions), reverse=True):
                if name == pin or name.startswith(pin + "."):
                    yield ".python-version (pyenv)", os.path.join(versions, name, "bin", "python3")
    yield "PATH", "python%d.%d" % REQUIRED
    yield "PATH", "python3"


def _describe(command: str, root: str) -> Optional[Tuple[str, str]]:
    """Return ``(version, executable)`` as the interpreter itself reports them, or None."""
    probe = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"
    try:
        output = subprocess.check_output(
            [command, "-c", probe],
            cwd=root,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
            timeout=20,
        ).splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return (output[0], output[1]) if len(output) == 2 else None


def restart_under_required_python(root: str, script: str) -> None:
    """Return if this is Python 3.12; else replace this process by one that is.

    Args:
        root: directory of the repository, where ``.python-version`` lies.
        script: path of ``build.py``.

    Raises:
        SystemExit: no Python 3.12 was found; the message names what was tried and how to get one.
    """
    os.environ.setdefault(STARTED_BY, sys.executable)
    restarted = os.environ.pop(_RESTARTED, None)
    if sys.version_info[:2] == REQUIRED:
        return
    if restarted:
        sys.stderr.write("error: %s said it was Python 3.12 and is not\n" % restarted)
        sys.exit(1)
    wanted = "%d.%d" % REQUIRED
    tried = []
    for origin, command in _candidates(root):
        found = _describe(command, root)
        if found and found[0] == wanted:
            os.environ[_RESTARTED] = command
            os.execv(found[1], [found[1], script] + sys.argv[1:])
        tried.append("  %-24s %s: %s" % (origin, command, found[0] if found else "not found"))
    sys.stderr.write(
        "error: Python %s is required to build megatron-core, and none was found.\n%s\n"
        "Get one with any of\n"
        "  pyenv install %s            (picked up through .python-version)\n"
        "  uv python install %s        (then set UV_PYTHON to the path `uv python find` prints)\n"
        "  apt-get install python%s python%s-venv python%s-dev\n"
        % (wanted, "\n".join(tried), wanted, wanted, wanted, wanted, wanted)
    )
    sys.exit(NO_PYTHON)
