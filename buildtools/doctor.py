"""Say whether a wheel, or an installed Megatron-core, is this project's and is intact.

A patched package that was overwritten, edited, shadowed by a checkout on PYTHONPATH, or never
patched at all looks the same from outside; each of these is told apart here. It is a check against
accidents and no signature: who rewrites a file, RECORD and the manifest alike is not caught.
"""

from __future__ import annotations

import base64
import csv
import enum
import hashlib
import io
import json
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

from buildtools.console import BuildError
from buildtools.manifest import HELPER, NAME, PACKAGE, Manifest, parse_manifest
from buildtools.objects import blob_id, unsafe_path_reason


class Verdict(enum.IntEnum):
    """What the doctor found; the value is the exit status of `build.py doctor`."""

    VERIFIED = 0
    DAMAGED = 1
    NOT_PATCHED = 3
    NOT_FOUND = 4
    ANOTHER_BUILD = 6  # 2 is wrong usage, 5 that there is no Python 3.12


@dataclass
class Report:
    """A verdict and the lines that explain it; of an intact build also its manifest."""

    verdict: Verdict
    lines: list[str] = field(default_factory=list)
    manifest: Manifest | None = None


@dataclass(frozen=True)
class _Distribution:
    """A wheel or an installation, seen as files.

    Attributes:
        where: its path, for messages.
        dist_info: name of its metadata directory.
        names: paths of its files.
        read: returns the content of a path; raises OSError or KeyError if it is missing.
    """

    where: str
    dist_info: str
    names: list[str]
    read: Callable[[str], bytes]


def inspect_wheel(path: Path) -> Report:
    """Verify a wheel file."""
    if not path.is_file():
        return Report(Verdict.NOT_FOUND, [_why_no_file(path)])
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            infos = {name.split("/")[0] for name in names if ".dist-info/" in name}
            if len(infos) != 1:
                return Report(Verdict.DAMAGED, [f"{path}: not a wheel: {len(infos)} .dist-info"])
            dist = _Distribution(str(path), infos.pop(), names, archive.read)
            report = _examine(dist)
            if report.verdict is Verdict.VERIFIED:
                problems = _wheel_problems(dist, path.name, names)
                if problems:
                    shown = [f"DAMAGED: {problem}" for problem in problems]
                    report = Report(Verdict.DAMAGED, report.lines[:-1] + shown)
    except Exception as error:  # a damaged archive may fail in any way zipfile and zlib know
        return Report(Verdict.DAMAGED, [f"{path}: not a readable wheel: {error!r}"])
    return report


def _why_no_file(path: Path) -> str:
    """Return what is wrong with the path of a wheel that is no file, and what was perhaps meant."""
    if not path.exists():
        return f"{path}: no such file; `build.py wheel` makes a wheel in dist/"
    if not path.is_dir():
        return f"{path}: not a regular file, expected a wheel"
    wheels = sorted(str(found) for found in path.glob("*.whl"))
    if wheels:
        return f"{path}: a directory, expected a wheel file; it holds {', '.join(wheels)}"
    return (
        f"{path}: a directory without a wheel, expected a wheel file (`build.py wheel` makes one "
        "in dist/); for what is installed: `build.py doctor --installed --python PYTHON`"
    )


def _wheel_problems(dist: _Distribution, file_name: str, names: list[str]) -> list[str]:
    """What an installer would take from the archive beyond what RECORD vouches for."""
    record = dist.read(f"{dist.dist_info}/RECORD").decode()
    rows = [row for row in csv.reader(io.StringIO(record)) if row]
    recorded = {row[0] for row in rows}
    problems = [f"{name}: comes twice" for name in sorted({n for n in names if names.count(n) > 1})]
    problems += [f"{name}: not in RECORD" for name in sorted(set(names) - recorded)]
    problems += [f"{name}: only in RECORD" for name in sorted(recorded - set(names))]
    problems += [
        f"{row[0]}: RECORD has no hash of it"
        for row in rows
        if row[0] != f"{dist.dist_info}/RECORD" and not row[1:2][0]
    ]
    problems += [
        f"{name}: does not belong into this wheel"
        for name in sorted(names)
        if not name.startswith((PACKAGE, f"{dist.dist_info}/"))
        or "/__pycache__/" in name
        or unsafe_path_reason(name)
    ]
    stem = dist.dist_info.removesuffix(".dist-info")
    if not file_name.startswith(f"{stem}-cp"):
        problems.append(f"the file is named {file_name}, its contents are {stem}'s")
    return problems


_PROBE = """
import sys
if sys.path and sys.path[0] == "":
    del sys.path[0]  # what -c adds; PYTHONPATH stays
import importlib.metadata, importlib.util, json
found = [
    (str(d.locate_file("")), str(d._path))
    for d in importlib.metadata.distributions(name="megatron-core")
]
origins = {}
for name in ("megatron.core", "megatron.training"):
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    except BaseException as error:
        spec = None
        origins["error"] = repr(error)
    origins[name] = spec and spec.origin
print("\\n" + json.dumps({"dists": found, "origins": origins}))
"""


def inspect_installed(python: str) -> Report:
    """Verify the Megatron-core that ``python`` imports, with its PYTHONPATH as it is.

    The current directory, which ``python -c`` and ``python -m`` put first, is not considered.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False
        )
        probe = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"cannot be run: {error}"
        if Path(python).is_dir():
            reason = f"a directory, expected an interpreter, such as {Path(python, 'bin/python')}"
        return Report(Verdict.NOT_FOUND, [f"{python}: {reason}"])
    except (ValueError, IndexError):
        return Report(Verdict.NOT_FOUND, [f"{python}: failed: {done.stderr.strip()[-300:]}"])
    origin = probe["origins"]["megatron.core"]
    if not probe["dists"]:
        lines = [f"megatron-core is not installed for {python}"]
        if origin:
            lines.append(f"NOT PATCHED: but `import megatron.core` takes {origin}")
            return Report(Verdict.NOT_PATCHED, lines)
        return Report(Verdict.NOT_FOUND, lines)
    root, info = (Path(text) for text in probe["dists"][0])
    try:
        report = _examine(_installation(root, info))
    except Exception as error:  # whatever is wrong with the files, they are not as built
        return Report(Verdict.DAMAGED, [f"{root}: cannot be examined: {error!r}"])
    beside = [text for where, text in probe["dists"] if where == str(root) and text != str(info)]
    if report.verdict is Verdict.NOT_PATCHED and not beside:
        return report
    problems = [
        f"SHADOWED: `import {name}` takes {probe['origins'][name]}, not {expected}"
        for name in ("megatron.core", "megatron.training")
        if not _is_same(probe["origins"][name], expected := root / name.replace(".", "/"))
    ]
    problems += [f"DAMAGED: {probe['origins']['error']}"] if "error" in probe["origins"] else []
    problems += [f"DAMAGED: a second installation is recorded in {text}" for text in beside]
    if problems:
        kept = [line for line in report.lines if not line.startswith("VERIFIED")]
        return Report(Verdict.DAMAGED, kept + problems)
    return report


def _is_same(origin: str | None, package: Path) -> bool:
    """Return whether a package's origin is its file in the directory it should be in."""
    return origin is not None and Path(origin).resolve() == (package / "__init__.py").resolve()


def _installation(root: Path, info: Path) -> _Distribution:
    try:
        record = (info / "RECORD").read_text(encoding="utf-8")
    except OSError:
        record = ""
    names = {row[0] for row in csv.reader(io.StringIO(record)) if row}
    for package in ("core", "training"):  # what lies there unrecorded is imported all the same
        for path in (root / "megatron" / package).rglob("*"):
            if path.is_file():
                names.add(path.relative_to(root).as_posix())
    if (root / "megatron" / "__init__.py").exists():
        names.add("megatron/__init__.py")
    return _Distribution(
        str(root), info.name, sorted(names), lambda name: (root / name).read_bytes()
    )


def _examine(dist: _Distribution) -> Report:
    try:
        metadata = dist.read(f"{dist.dist_info}/METADATA").decode()
    except (OSError, KeyError) as error:
        return Report(Verdict.DAMAGED, [f"{dist.where}: no METADATA: {error}"])
    mail = Parser().parsestr(metadata, headersonly=True)
    lines = [f"{mail['Name']} {mail['Version']} at {dist.where}"]
    try:
        manifest = parse_manifest(dist.read(f"{dist.dist_info}/{NAME}").decode())
    except (OSError, KeyError):
        lines.append(f"NOT PATCHED: it holds no {NAME}: a stock or foreign megatron-core")
        return Report(Verdict.NOT_PATCHED, lines)
    except BuildError as error:
        return Report(Verdict.DAMAGED, [*lines, f"DAMAGED: {error}"])
    upstream = manifest.upstream
    lines += [
        f"  upstream  {upstream['name']} {upstream['version']} (tree {manifest.trees['pristine']})",
        f"  patches   {len(manifest.series)}, {len(manifest.modified)} files changed",
        *(f"            {name}" for name in manifest.series),
        f"  overlay   {len(manifest.overlay)} files",
        f"  built by  {', '.join(f'{tool} {v}' for tool, v in manifest.tools.items())}",
    ]
    problems = _record_problems(dist) + _manifest_problems(dist, manifest)
    if mail["Version"] != manifest.version:
        problems.append(f"METADATA says {mail['Version']}, the manifest {manifest.version}")
    if problems:
        shown = [f"DAMAGED: {problem}" for problem in sorted(set(problems))]
        return Report(Verdict.DAMAGED, lines + shown)
    lines.append(f"VERIFIED: all {len(manifest.files)} files are as built")
    return Report(Verdict.VERIFIED, lines, manifest)


def _manifest_problems(dist: _Distribution, manifest: Manifest) -> list[str]:
    problems = []
    for path, expected in manifest.files.items():
        role = "patched" if path in manifest.modified else "shipped"
        role = "overlay" if path in manifest.overlay else role
        try:
            actual = blob_id(dist.read(path))
        except (OSError, KeyError):
            problems.append(f"{path}: missing ({role} file)")
            continue
        if actual != expected:
            problems.append(f"{path}: {role} file differs from what was built")
    helpers = [name for name in dist.names if name.startswith(HELPER) and name.endswith(".so")]
    if len(helpers) != 1:
        problems.append(f"{HELPER}: the compiled dataset helper is missing")
    known = {*manifest.files, *helpers}
    for name in dist.names:
        if name.startswith(PACKAGE) and name not in known and "/__pycache__/" not in name:
            problems.append(f"{name}: not part of what was built")
    return problems


def _record_problems(dist: _Distribution) -> list[str]:
    """Compare every file with its hash in RECORD (what the installer wrote)."""
    try:
        record = dist.read(f"{dist.dist_info}/RECORD").decode()
    except (OSError, KeyError):
        return ["RECORD is missing"]
    problems = []
    for row in csv.reader(io.StringIO(record)):
        if len(row) != 3 or not row[1]:
            continue
        path, (algorithm, _, expected) = row[0], row[1].partition("=")
        try:
            digest = hashlib.new(algorithm, dist.read(path)).digest()
        except (OSError, KeyError):
            problems.append(f"{path}: missing")
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != expected:
            problems.append(f"{path}: differs from its hash in RECORD")
    return problems
