"""Tests against another Megatron than the installed one: built into a site, put in front."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buildtools.environments import build_environment
from buildtools.paths import ROOT
from buildtools.wheel import build_wheel


@dataclass(frozen=True)
class Session:
    """What a pytest process left: one element for each case that ran, and the end of its output."""

    cases: list[ElementTree.Element]
    output: str


def make_site(tree: Path, scratch: Path, epoch: int) -> Path:
    """Build the wheel of ``tree`` and install it into a directory of its own below ``scratch``."""
    python = build_environment(offline=False)
    wheel = build_wheel(tree, scratch / "wheel", python, epoch)
    site = scratch / "site"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


def run_pytest(
    nodes: Sequence[str], scratch: Path, *, cwd: Path = ROOT, site: Path | None = None
) -> Session:
    """Run tests in a process of their own, from the directory their node ids start in.

    The Megatron in ``site`` comes before the installed one, also for the ranks of the tests.
    """
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    options = [f"--junitxml={report}", *([f"--megatron-site={site}"] if site else [])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *nodes],
        cwd=cwd,
        env=os.environ | ({"PYTHONPATH": str(site)} if site else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    return Session(cases, done.stdout[-5000:] + done.stderr[-3000:])
