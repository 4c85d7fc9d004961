"""What runs inside an image: install the wheel, and refuse whatever is not as it should be.

`buildtools.image` packs this module and what it imports into one executable file, `megatron-nvme`.
It stays in the image (some 85 kB): a job can ask at its start whether what it is about to import is
what was baked. It needs only the base's own Python and pip, and never the network.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import stat
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from buildtools.console import BuildError, say
from buildtools.doctor import Report, Verdict, inspect_installed, inspect_wheel
from buildtools.manifest import NAME, Manifest, parse_manifest

DISTRIBUTION = "megatron-core"
STORE = "megatron.core.optimizer.nvme_state_store"


@dataclass(frozen=True)
class Facts:
    """What an image says about the Megatron-core in it.

    Attributes:
        version: version of the wheel.
        upstream: name, version and sha256 of the source distribution it was made from.
        series: sha256 over the names and hashes of the patches, in order.
        tree: git tree id of the patched tree with the overlay.
    """

    version: str
    upstream: str
    series: str
    tree: str

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Facts:
        """Return what the manifest of a wheel says."""
        return cls(
            version=manifest.version,
            upstream=upstream_label(**manifest.upstream),
            series=series_hash(manifest.series),
            tree=manifest.trees["assembled"],
        )


def upstream_label(name: str, version: str, **hashes: str) -> str:
    """Return a release as a label shows it."""
    return f"{name} {version} sdist-sha256:{hashes['sdist-sha256']}"


def series_hash(series: dict[str, str]) -> str:
    """Return one hash for a series of patches, given the hash of each."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in series.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def manifest_of(wheel: Path) -> Manifest:
    """Return the manifest in a wheel that the doctor has verified."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(f".dist-info/{NAME}"))
        return parse_manifest(archive.read(member).decode())


def install(context: Path, sha256: str | None, labels: dict[str, str | None]) -> None:
    """Install the one wheel of ``context`` by its hash, for all users.

    Args:
        context: directory with the wheel and its ``.sha256``.
        sha256: the expected hash; None takes the one that lies beside the wheel.
        labels: facts as the labels of the image give them; None is not compared.

    Raises:
        BuildError: the wheel is not sound, not the expected one, or cannot be installed.
    """
    wheels = list(context.glob("*.whl"))
    if len(wheels) != 1:
        raise BuildError(f"expected one wheel in {context}, got {[path.name for path in wheels]}")
    wheel = wheels[0]
    report = inspect_wheel(wheel)
    if report.verdict is not Verdict.VERIFIED:
        raise BuildError("\n".join([f"{wheel.name} is not to be baked:", *report.lines]))
    facts = Facts.of_manifest(manifest_of(wheel))
    for name, label in labels.items():
        if label is not None and label != getattr(facts, name):
            raise BuildError(
                f"the label {name} would say {label!r}, the wheel is {getattr(facts, name)!r}: "
                "build with `build.py image`, which gives the labels"
            )
    digest = sha256 or (context / f"{wheel.name}.sha256").read_text().split()[0]
    site = Path(sysconfig.get_path("platlib"))
    if not os.access(site, os.W_OK):
        raise BuildError(f"{site} is not writable for user {os.getuid()}: all users need the wheel")
    os.umask(0o022)  # whoever runs the image reads what is installed now
    with tempfile.TemporaryDirectory() as scratch:
        requirement = Path(scratch, "requirement.txt")
        requirement.write_text(f"{wheel.as_uri()} --hash=sha256:{digest}\n")
        done = _pip(
            "install", "--no-index", "--no-deps", "--no-cache-dir", "--force-reinstall",
            "--require-hashes", "--requirement", str(requirement),
        )  # fmt: skip
    if done.returncode != 0:
        raise BuildError(
            f"pip did not install {wheel.name}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    say(f"installed {wheel.name} (sha256 {digest})")


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the base's pip without the base's settings: a constraint file pins what is not ours."""
    environment = {key: v for key, v in os.environ.items() if not key.startswith("PIP_")}
    environment |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_BREAK_SYSTEM_PACKAGES": "1",  # an image has no system to protect from its own pip
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return subprocess.run(
        [sys.executable, "-P", "-m", "pip", *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def other_copies(path: Iterable[str], own: Path) -> list[str]:
    """Return every Megatron-core on ``path`` besides the one in directory ``own``.

    One that comes later on the path is as wrong as one that shadows: the next change of PYTHONPATH
    decides between them, and `pip uninstall` takes whichever it finds first.
    """
    found = []
    for entry in dict.fromkeys(os.path.realpath(each) for each in path):
        if Path(entry) == own.resolve():
            continue
        for package in ("core", "training"):
            if (Path(entry) / "megatron" / package / "__init__.py").exists():
                found.append(f"{entry}/megatron/{package}")
        for dist in importlib.metadata.distributions(name=DISTRIBUTION, path=[entry]):
            found.append(f"{entry} ({DISTRIBUTION} {dist.version} is recorded there)")
    return found


def examine() -> Report:
    """Verify the installation of this Python, and that it is the only one and for all users."""
    report = inspect_installed(sys.executable)
    if report.verdict is Verdict.NOT_FOUND:
        return report
    dist = next(iter(importlib.metadata.distributions(name=DISTRIBUTION)), None)
    problems = []
    if dist is not None:
        own = Path(str(dist.locate_file("")))
        copies = other_copies([each for each in sys.path if Path(each).is_dir()], own)
        problems += [f"DAMAGED: a second {DISTRIBUTION}: {copy}" for copy in copies]
        problems += unreadable(own, dist)
    if not problems:
        return report
    kept = [line for line in report.lines if not line.startswith("VERIFIED")]
    return Report(Verdict.DAMAGED, kept + problems)


def unreadable(root: Path, dist: importlib.metadata.Distribution) -> list[str]:
    """Return what an ordinary user could not read, as the build's umask may have left it."""
    files = [root / str(name) for name in dist.files or []]
    wanted = {path: stat.S_IROTH for path in files if path.exists()}
    wanted |= {path.parent: stat.S_IROTH | stat.S_IXOTH for path in wanted}
    return [
        f"DAMAGED: {path}: not readable for every user"
        for path, bits in sorted(wanted.items())
        if path.stat().st_mode & bits != bits
    ]


def conflicts(lines: Iterable[str], names: set[str]) -> tuple[list[str], list[str]]:
    """Split what `pip check` prints into what is about distributions ``names`` and the rest."""
    found = [line.strip() for line in lines if line.strip()]
    ours = [line for line in found if _canonical(line.split()[0]) in names]
    return ours, [line for line in found if line not in ours]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed() -> set[str]:
    """Return our distribution and those it requires directly, without extras."""
    found = importlib.metadata.requires(DISTRIBUTION) or []
    plain = [each for each in found if not re.search(r"\bextra\s*==", each.partition(";")[2])]
    names = [re.match(r"[\w.-]+", each) for each in plain]
    return {DISTRIBUTION, *(_canonical(match[0]) for match in names if match)}


def check_requirements() -> None:
    """Have pip check what the package needs; other conflicts of the base are only reported.

    pip decides what a conflict is, this only whose it is: ours, or of what we require directly.

    Raises:
        BuildError: a requirement is missing or too old, or pip cannot tell.
    """
    done = _pip("check")
    clean = done.returncode == 0
    ours, others = ([], []) if clean else conflicts(done.stdout.splitlines(), needed())
    for line in others:
        say(f"not about {DISTRIBUTION}: {line}")
    if ours or not (clean or others):
        raise BuildError("\n".join(["pip check:", *(ours or [done.stderr.strip()[-1000:]])]))
    say(f"pip check: {', '.join(sorted(needed()))}: content")


_IMPORTS = f"""
import importlib, warnings
warnings.simplefilter("ignore")
import megatron.core
print("megatron.core", megatron.core.__version__)
from megatron.core.datasets import helpers_cpp
helpers_cpp.build_sample_idx_int32
print("helpers_cpp", helpers_cpp.__file__)
print("overlay", importlib.import_module("{STORE}").__file__)
print("torch", importlib.import_module("torch").__version__)
for name in ("transformer_engine.pytorch", "apex"):
    try:
        found = importlib.import_module(name)
    except Exception as error:
        print(name, "not usable:", repr(error)[:200])
    else:
        print(name, getattr(found, "__version__", "found"))
"""


def smoke() -> None:
    """Import what a run imports, and start the command of the store.

    Raises:
        BuildError: something cannot be imported or started.
    """
    with tempfile.TemporaryDirectory() as scratch:
        quiet = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore", "HOME": scratch}
        for title, command in (
            ("imports", ["-c", _IMPORTS]),
            ("the command of the store", ["-m", STORE, "probe", "--help"]),
        ):
            done = subprocess.run(
                [sys.executable, "-P", *command],
                cwd=scratch, env=os.environ | quiet, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise BuildError(f"smoke: {title} failed:\n{done.stderr[-3000:]}")
            say(done.stdout.strip() if title == "imports" else f"{STORE} probe --help")


def main() -> int:
    """Run one verb; the exit status of `doctor` is that of `build.py doctor`."""
    parser = argparse.ArgumentParser(prog="megatron-nvme", description=main.__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("doctor", help="is what Python imports patched, intact, and the only one?")
    verbs.add_parser("requirements", help="does the environment hold what the package needs?")
    verbs.add_parser("smoke", help="import what a run imports; Transformer Engine and Apex too")
    installs = verbs.add_parser("install", help="install the wheel of a directory (in a build)")
    installs.add_argument("context", type=Path)
    installs.add_argument("--sha256")
    for name in Facts.__dataclass_fields__:
        installs.add_argument(f"--{name}")
    args = parser.parse_args()
    try:
        if args.verb == "doctor":
            report = examine()
            say("\n".join(report.lines))
            return int(report.verdict)
        if args.verb == "install":
            labels = {name: getattr(args, name) for name in Facts.__dataclass_fields__}
            install(args.context, args.sha256, labels)
        elif args.verb == "requirements":
            check_requirements()
        else:
            smoke()
    except (BuildError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0
