"""Say whether a wheel, or an installed Megatron-core, is this project's and is intact.

A patched package that was overwritten, edited, shadowed by a checkout on PYTHONPATH, or never
patched at all looks the same from outside; each of these is a verdict of its own here.
"""

from __future__ import annotations

import base64
import csv
import enum
import hashlib
import io
import json
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

from buildtools.console import BuildError
from buildtools.manifest import HELPER, NAME, PACKAGE, Manifest, parse_manifest
from buildtools.objects import blob_id


class Verdict(enum.IntEnum):
    """What the doctor found; the value is the exit status of `build.py doctor`."""

    VERIFIED = 0
    DAMAGED = 1
    NOT_PATCHED = 3
    NOT_FOUND = 4


@dataclass
class Report:
    """A verdict and the lines that explain it."""

    verdict: Verdict
    lines: list[str] = field(default_factory=list)


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
        return Report(Verdict.NOT_FOUND, [f"{path}: no such file"])
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            infos = {name.split("/")[0] for name in names if ".dist-info/" in name}
            if len(infos) != 1:
                return Report(Verdict.DAMAGED, [f"{path}: not a wheel: {len(infos)} .dist-info"])
            report = _examine(_Distribution(str(path), infos.pop(), names, archive.read))
    except (zipfile.BadZipFile, OSError) as error:
        return Report(Verdict.DAMAGED, [f"{path}: not a readable wheel: {error}"])
    version = path.name.split("-")[1:2]
    if report.verdict is Verdict.VERIFIED and [_version(report)] != version:
        report.verdict = Verdict.DAMAGED
        report.lines.append(f"DAMAGED: the file name says {version}, the contents say otherwise")
    return report


def _version(report: Report) -> str:
    return report.lines[0].split()[1]


_PROBE = """
import importlib.metadata, importlib.util, json, sys
found = [d for d in importlib.metadata.distributions(name="megatron-core")]
roots = {}
for d in found:
    roots.setdefault(str(d.locate_file("")), str(d._path))
try:
    spec = importlib.util.find_spec("megatron.core")
except ModuleNotFoundError:
    spec = None
print(json.dumps({"dists": list(roots.items()), "origin": spec and spec.origin}))
"""


def inspect_installed(python: str) -> Report:
    """Verify the Megatron-core that ``python`` imports, with its PYTHONPATH as it is."""
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                [python, "-c", _PROBE], cwd=empty, capture_output=True, text=True, check=False
            )
        except OSError as error:
            return Report(Verdict.NOT_FOUND, [f"{python}: cannot be run: {error}"])
    if done.returncode != 0:
        return Report(Verdict.NOT_FOUND, [f"{python}: failed: {done.stderr.strip()[-300:]}"])
    probe = json.loads(done.stdout)
    if not probe["dists"]:
        lines = [f"megatron-core is not installed for {python}"]
        if probe["origin"]:
            lines.append(f"NOT PATCHED: but `import megatron.core` takes {probe['origin']}")
            return Report(Verdict.NOT_PATCHED, lines)
        return Report(Verdict.NOT_FOUND, lines)
    root, info = (Path(text) for text in probe["dists"][0])
    try:
        record = (info / "RECORD").read_text(encoding="utf-8")
    except OSError:
        record = ""
    names = {row[0] for row in csv.reader(io.StringIO(record)) if row}
    for package in ("core", "training"):  # what lies there without being recorded is imported too
        found = (root / "megatron" / package).rglob("*.py")
        names.update(path.relative_to(root).as_posix() for path in found)
    report = _examine(
        _Distribution(str(root), info.name, sorted(names), lambda name: (root / name).read_bytes())
    )
    expected = root / "megatron" / "core" / "__init__.py"
    origin = probe["origin"]
    if report.verdict is not Verdict.NOT_PATCHED and (
        origin is None or Path(origin).resolve() != expected.resolve()
    ):
        report.verdict = Verdict.DAMAGED
        report.lines.append(f"SHADOWED: `import megatron.core` takes {origin}, not {expected}")
    return report


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
    return Report(Verdict.VERIFIED, lines)


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
