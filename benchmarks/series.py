"""How long a rebase and a look at other releases take, downloads apart.

    python3 benchmarks/series.py

Prints a Markdown table. The rebase is made in a clone of this repository, onto the nearest release
that the series moves to without a conflict.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ["0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2"]
RUNS = 3


def seconds(*arguments: str, cwd: Path) -> float:
    """Run a verb of ``build.py``; return its wall time. Status 1 is a finding, not a failure."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "build.py", *arguments], cwd=cwd, capture_output=True, check=False
    )
    if done.returncode not in (0, 1):
        sys.exit(done.stderr.decode())
    return time.monotonic() - start


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        seconds("drift", "--against", *RELEASES, cwd=clone)  # downloads, environments
        found: dict[str, list[float]] = {}
        for _ in range(RUNS):
            found.setdefault("check", []).append(seconds("check", cwd=clone))
            found.setdefault(f"drift --against {' '.join(RELEASES)}", []).append(
                seconds("drift", "--against", *RELEASES, "--offline", cwd=clone)
            )
            found.setdefault("rebase --to 0.19.0", []).append(
                seconds("rebase", "--to", "0.19.0", "--offline", cwd=clone)
            )
            subprocess.run(["git", "checkout", "--quiet", "."], cwd=clone, check=True)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; best and worst of {RUNS}\n")
    print("| build.py | best | worst |\n|---|---|---|")
    for title, times in found.items():
        print(f"| `{title}` | {min(times):.1f} s | {max(times):.1f} s |")


if __name__ == "__main__":
    main()
