"""``python3 build.py`` finds Python 3.12, or says what is missing and how to get it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buildtools.paths import ROOT


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The entry of the build alone, below a directory without a `.python-version`."""
    root = tmp_path / "repository"
    (root / "buildtools").mkdir(parents=True)
    (root / "buildtools" / "interpreter.py").write_bytes(
        (ROOT / "buildtools" / "interpreter.py").read_bytes()
    )
    (root / "start.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "from buildtools import interpreter\n"
        "if not sys.argv[1:] or sys.argv[1] != 'again':\n"
        "    sys.argv.append('again')\n"
        "    sys.version_info = (3, 8, 0)\n"
        f"interpreter.restart_under_required_python({str(root)!r}, {str(root / 'start.py')!r})\n"
        "print('running', sys.version_info[:2], sys.executable)\n"
    )
    return root


def _start(repository: Path, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(repository / "start.py")],
        env={"PATH": path, "PYENV_ROOT": str(repository / "pyenv"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_uv_python_is_used(repository: Path) -> None:
    done = _start(repository, "/nowhere", UV_PYTHON=sys.executable)

    assert done.stdout.startswith("running (3, 12)"), done.stderr


def test_python_version_leads_to_pyenv(repository: Path) -> None:
    (repository / ".python-version").write_text("3.12\n")
    versions = repository / "pyenv" / "versions" / "3.12.9" / "bin"
    versions.mkdir(parents=True)
    (versions / "python3").symlink_to(os.path.realpath(sys.executable))

    done = _start(repository, "/nowhere")

    assert done.stdout.startswith("running (3, 12)"), done.stderr


def test_path_is_searched(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.12").symlink_to(os.path.realpath(sys.executable))

    done = _start(repository, str(tmp_path / "bin"))

    assert done.stdout.startswith("running (3, 12)"), done.stderr


def test_without_python_3_12_the_error_says_how_to_get_it(repository: Path) -> None:
    done = _start(repository, "/nowhere", UV_PYTHON="/opt/none/python")

    assert done.returncode == 5
    assert "Python 3.12 is required" in done.stderr
    assert "UV_PYTHON" in done.stderr and "/opt/none/python: not found" in done.stderr
    for cure in ("pyenv install 3.12", "uv python install 3.12", "apt-get install python3.12"):
        assert cure in done.stderr


@pytest.mark.parametrize("path", ["build.py", "buildtools/interpreter.py"])
def test_what_runs_before_the_restart_parses_under_python_3_6(path: str) -> None:
    ast.parse((ROOT / path).read_text(), feature_version=(3, 6))
