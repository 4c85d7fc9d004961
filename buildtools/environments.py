"""The virtual environments the build makes for itself, from requirements pinned by hash.

``build`` turns the tree into a wheel, ``test`` runs it.  Each is remade when its requirements
change.  The network is used for packages only, and only when the cache does not have them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from buildtools.console import BuildError, step
from buildtools.paths import REQUIREMENTS, WORK, cache_dir, scratch_dir, swap_in
from buildtools.pin import Pin
from buildtools.transaction import exclusive

_STAMP = "megatron-nvme-stamp"


def run_logged(
    command: list[str], what: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run ``command`` and return its output.

    Raises:
        BuildError: it failed; the message holds the end of what it printed.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        raise BuildError(f"{what} failed with status {done.returncode}:\n{tail}")
    return done.stdout


def _venv(name: str, requirements: str, install: Callable[[Path], None]) -> Path:
    """Return the Python of environment ``name``, making it if it is missing or out of date."""
    destination = WORK / "env" / name
    python = destination / "bin" / "python"
    content = (REQUIREMENTS / requirements).read_bytes() + sys.version.encode()
    stamp = hashlib.sha256(content).hexdigest()
    stamp_file = destination / _STAMP
    with exclusive(WORK / "env"):
        if python.exists() and stamp_file.exists() and stamp_file.read_text() == stamp:
            return python
        with step(f"make the {name} environment"), scratch_dir(destination.parent) as scratch:
            # Scripts inside a venv hold its path, so it is made in place and stamped last.
            if destination.exists():
                destination.rename(scratch / "old")
            _make_venv(destination)
            install(python)
            stamp_file.write_text(stamp)
    return python


_AVAILABLE = "Available versions: "


def _make_venv(destination: Path) -> None:
    run_logged(
        [sys.executable, "-I", "-m", "venv", str(destination)],
        f"python -m venv (Debian: apt-get install python{sys.version_info[0]}."
        f"{sys.version_info[1]}-venv)",
    )


def _pip(python: Path, *arguments: str) -> list[str]:
    # -I: neither the current directory nor PYTHONPATH may offer modules to the build.
    return [str(python), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def fetch_packages(name: str, python: Path, *, offline: bool) -> Path:
    """Return the directory of the cache with the packages of a requirements file.

    Args:
        name: file name of the requirements.
        python: a Python that has pip.
        offline: whether they must be there already.
    """
    requirements = REQUIREMENTS / name
    packages = cache_dir() / "packages" / hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not packages.exists():
        if offline:
            raise BuildError(
                f"--offline: the packages of {name} are not in the cache {cache_dir()}; run "
                "`build.py fetch` online"
            )
        with step(f"download the packages of {name}"), scratch_dir(packages.parent) as scratch:
            run_logged(
                _pip(
                    python, "download", "--only-binary=:all:", "--require-hashes", "--no-deps",
                    "--dest", str(scratch / "new"), "--requirement", str(requirements),
                ),
                f"download of {requirements.name}",
            )  # fmt: skip
            swap_in(scratch / "new", packages)
    return packages


def _install_hashed(python: Path, requirements: Path, *, offline: bool) -> None:
    """Install with pip from the cache of packages, which is filled first if it lacks one."""
    packages = fetch_packages(requirements.name, python, offline=offline)
    # A user's pip settings (constraints, targets) must not decide what the build runs with.
    try:
        run_logged(
            _pip(
                python, "install", "--no-index", "--find-links", str(packages),
                "--require-hashes", "--no-deps", "--requirement", str(requirements),
            ),
            f"installation of {requirements.name}",
            env={"PATH": os.defpath, "PIP_CONFIG_FILE": os.devnull},
        )  # fmt: skip
    except BuildError as error:
        shutil.rmtree(packages, ignore_errors=True)
        raise BuildError(
            f"{error}\nIts packages were removed from the cache ({packages}); run again"
        ) from error


def build_environment(*, offline: bool) -> Path:
    """Return the Python that has setuptools, pybind11 and wheel at their pinned versions."""
    requirements = REQUIREMENTS / "build.txt"
    return _venv(
        "build",
        requirements.name,
        lambda python: _install_hashed(python, requirements, offline=offline),
    )


def test_environment(*, offline: bool) -> Path:
    """Return the Python that has torch, pytest, ruff and mypy at their pinned versions.

    uv installs them: a cold installation takes half of pip's time and a warm one two seconds,
    because its cache holds unpacked wheels (torch with its CUDA libraries is 4.7 GB).
    """
    uv_requirements = REQUIREMENTS / "uv.txt"
    uv = _venv(
        "uv",
        uv_requirements.name,
        lambda python: _install_hashed(python, uv_requirements, offline=offline),
    ).with_name("uv")

    def install(python: Path) -> None:
        # Several GB may arrive: uv shows its own progress.
        command = [str(uv), "pip", "sync", "--require-hashes", "--python", str(python)]
        command += ["--offline"] if offline else []
        if subprocess.run([*command, str(REQUIREMENTS / "test.txt")], check=False).returncode:
            raise BuildError("the installation of requirements/test.txt failed (see above)")

    return _venv("test", "test.txt", install)


def sdist_downloader(python: Path) -> Callable[[Pin, Path], None]:
    """Return a `Download` that goes through pip, so that the user's mirrors and proxies hold.

    pip reads the metadata of a source distribution by running its build backend, after it has
    checked the hash: ``python`` is therefore the build environment's.
    """

    def download(pin: Pin, directory: Path) -> None:
        requirement = directory / "requirement.txt"
        requirement.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sdist_sha256}\n")
        run_logged(
            _pip(
                python, "download", "--no-deps", "--no-build-isolation", "--no-binary", pin.name,
                "--require-hashes", "--dest", str(directory), "--requirement", str(requirement),
            ),
            f"download of {pin.sdist} (expected sha256 {pin.sdist_sha256})",
        )  # fmt: skip

    return download


def release_downloader(python: Path) -> Callable[[str, str, Path], None]:
    """Return what downloads a release whose hash is not known yet: name, version, directory.

    pip runs the build backend's metadata step of what arrives: the index alone vouches for it.
    """

    def download(name: str, version: str, directory: Path) -> None:
        run_logged(
            _pip(
                python, "download", "--no-deps", "--no-build-isolation", "--no-binary", name,
                "--dest", str(directory), f"{name}=={version}",
            ),
            f"download of {name} {version}",
        )  # fmt: skip

    return download


def published_versions(python: Path, name: str) -> list[str]:
    """Return the versions of a package that the index offers, newest first, without pre-releases.

    Raises:
        BuildError: pip cannot ask the index, or it answers otherwise than expected.
    """
    done = subprocess.run(
        _pip(python, "index", "versions", name), capture_output=True, text=True, check=False
    )
    line = next((each for each in done.stdout.splitlines() if each.startswith(_AVAILABLE)), None)
    if done.returncode != 0 or line is None:
        raise BuildError(f"cannot list the versions of {name}: {done.stderr.strip()[-500:]}")
    return line.removeprefix(_AVAILABLE).replace(" ", "").split(",")


def require_compiler() -> None:
    """Check for a C++ compiler and Python's headers before anything long is started.

    Raises:
        BuildError: one is missing; upstream's build would go on and leave the dataset helper out.
    """
    compiler = cxx_command()
    done = None
    with contextlib.suppress(OSError):
        done = subprocess.run([*compiler, "--version"], capture_output=True, check=False)
    if done is None or done.returncode != 0:
        raise BuildError(
            f"no C++ compiler: {compiler[0]!r} does not run. Install g++ (Debian: apt-get install "
            "g++) or set CXX; the wheel must hold the compiled dataset helper"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise BuildError(
            f"Python's headers are missing: {header} (Debian: apt-get install "
            f"python{sys.version_info[0]}.{sys.version_info[1]}-dev)"
        )


def cxx_command() -> list[str]:
    """Return the C++ compiler setuptools will call, as a list of words."""
    return (os.environ.get("CXX", "").strip() or sysconfig.get_config_var("CXX") or "c++").split()
