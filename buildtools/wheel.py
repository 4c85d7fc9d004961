"""Build the wheel from a fresh tree, and prove that it holds that tree and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

from buildtools.archive import sha256_of
from buildtools.console import BuildError
from buildtools.environments import cxx_command, run_logged
from buildtools.manifest import HELPER, NAME, PACKAGE, Manifest
from buildtools.objects import files_below
from buildtools.paths import scratch_dir

_KEPT = ("PATH", "CC", "CXX", "TMPDIR")
"""What a build may take from the user's environment: the toolchain, but no flags for it."""


def _environment(epoch: int) -> dict[str, str]:
    kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
    return kept | {
        "HOME": os.devnull,
        "LC_ALL": "C",
        "TZ": "UTC",
        # Members of the archive would carry the time of the build.
        "SOURCE_DATE_EPOCH": str(epoch),
        # Upstream's package_info would append the hash of the repository the scratch lies in.
        "NO_VCS_VERSION": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHONHASHSEED": "0",
    }


def build_wheel(tree: Path, out: Path, python: Path, epoch: int) -> Path:
    """Build ``tree`` with pip and the pinned setuptools.

    Args:
        tree: a tree nothing was built in before: setuptools packs what lies in ``build/``.
        out: directory for the wheel.
        python: Python of the build environment.
        epoch: time stamp of all members, in seconds since 1970.

    Returns:
        The path of the wheel, whose contents have been compared with the tree.

    Raises:
        BuildError: the build failed, or left something out, or packed something else.
    """
    expected = package_files(tree)  # before the build leaves its own files in the tree
    run_logged(
        [
            str(python), "-I", "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps",
            "--no-build-isolation", "--no-index", "--no-cache-dir", "--wheel-dir", str(out), ".",
        ],
        "the build of the wheel",
        cwd=tree,
        env=_environment(epoch),
    )  # fmt: skip
    wheels = list(out.glob("*.whl"))
    if len(wheels) != 1:
        raise BuildError(f"expected one wheel in {out}, got {[path.name for path in wheels]}")
    verify_contents(wheels[0], tree, expected)
    _load_helper(wheels[0], out / "helper", python)
    return wheels[0]


def package_files(tree: Path) -> set[str]:
    """Return the paths of ``tree`` that belong into the wheel."""
    return {path for path in files_below(tree) if path.startswith(PACKAGE)}


def _load_helper(wheel: Path, scratch: Path, python: Path) -> None:
    """Import the compiled helper: a compiler may succeed and leave something else."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.startswith(HELPER)]
        path = archive.extract(name, scratch)
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('helpers_cpp', "
        "sys.argv[1]); m = u.module_from_spec(s); s.loader.exec_module(m); m.build_sample_idx_int32"
    )
    run_logged([str(python), "-I", "-c", code, path], "loading the compiled dataset helper")


def verify_contents(wheel: Path, tree: Path, expected: set[str]) -> None:
    """Compare a wheel with the tree it was built from.

    Raises:
        BuildError: it lacks a file or the compiled helper, has one too many, or one differs.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        packed = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
        helpers = {name for name in packed if name.startswith(HELPER) and name.endswith(".so")}
        if len(helpers) != 1:
            raise BuildError(
                f"{wheel.name}: the compiled dataset helper {HELPER} is not in it: the compiler "
                f"{' '.join(cxx_command())} failed, and upstream's build goes on without it"
            )
        problems = [f"left out: {name}" for name in sorted(expected - packed)]
        problems += [f"not of the tree: {name}" for name in sorted(packed - helpers - expected)]
        problems += [
            f"differs from the tree: {name}"
            for name in sorted(expected & packed)
            if archive.read(name) != (tree / name).read_bytes()
        ]
    if problems:
        raise BuildError("\n".join([f"{wheel.name} is not the tree:", *problems]))


def metadata_of(wheel: Path) -> tuple[str, str]:
    """Return the name of the wheel's ``.dist-info`` directory and the version in METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        mail = Parser().parsestr(archive.read(member).decode(), headersonly=True)
    return member.split("/")[0], str(mail["Version"])


def add_manifest(wheel: Path, manifest: Manifest, python: Path, epoch: int, out: Path) -> Path:
    """Write the manifest into the wheel's ``.dist-info`` and repack it into ``out``.

    Raises:
        BuildError: the wheel says another version than the manifest.
    """
    dist_info, version = metadata_of(wheel)
    if version != manifest.version or f"-{manifest.version}-" not in wheel.name:
        raise BuildError(
            f"version: expected {manifest.version}, METADATA has {version}, file {wheel.name}"
        )
    tool = [str(python), "-I", "-m", "wheel"]
    unpacked = wheel.parent / "unpacked"
    run_logged([*tool, "unpack", "--dest", str(unpacked), str(wheel)], "wheel unpack")
    root = next(unpacked.iterdir())
    (root / dist_info / NAME).write_text(manifest.to_json(), encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    run_logged(
        [*tool, "pack", "--dest-dir", str(out), str(root)], "wheel pack", env=_environment(epoch)
    )
    return next(out.glob("*.whl"))


def tool_versions(python: Path) -> dict[str, str]:
    """Return the versions of what decides the bytes of a wheel."""
    packages = ("setuptools", "pybind11", "wheel")
    code = f"import importlib.metadata as m; print(*(m.version(p) for p in {packages!r}))"
    versions = _first_line([str(python), "-I", "-c", code]).split()
    compiler = _first_line([*cxx_command(), "--version"])
    return {
        "python": sys.version.split()[0],
        **dict(zip(packages, versions, strict=True)),
        "compiler": compiler,
    }


def _first_line(command: list[str]) -> str:
    """Return the first line of standard output, in the environment of the build."""
    done = subprocess.run(
        command, env=_environment(0), capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0 or not done.stdout:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout.splitlines()[0]


def publish(wheel: Path, directory: Path) -> tuple[Path, str]:
    """Move the wheel into ``directory`` with a ``.sha256`` beside it; return path and sha256."""
    digest = sha256_of(wheel)
    directory.mkdir(parents=True, exist_ok=True)
    destination = directory / wheel.name
    with scratch_dir(directory) as scratch:
        shutil.copyfile(wheel, scratch / wheel.name)
        (scratch / wheel.name).replace(destination)
    sums = directory / f"{wheel.name}.sha256"
    sums.write_text(f"{digest}  {wheel.name}\n", encoding="utf-8")
    return destination, digest
