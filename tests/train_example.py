"""Run ``examples/train_gpt.py`` the way a user does, and read what it printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from buildtools.paths import ROOT


def train_example(work_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example with the Python, and so the Megatron, of this process."""
    return subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "train_gpt.py"),
            "--work-dir",
            str(work_dir),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
