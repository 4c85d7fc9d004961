"""Run commands of this repository as a user does."""

from __future__ import annotations

import os
import subprocess
import sys

from buildtools.paths import ROOT


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its output captured, whatever its exit status."""
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def build_py(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``build.py``."""
    return run(sys.executable, str(ROOT / "build.py"), *arguments, **environment)
