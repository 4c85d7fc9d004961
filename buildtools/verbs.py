"""What each verb of ``build.py`` does, in a screenful each."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from buildtools import check as checks
from buildtools import doctor as doctors
from buildtools.apply import ENGINES
from buildtools.console import BuildError, say, step
from buildtools.environments import (
    build_environment,
    fetch_packages,
    require_compiler,
    run_logged,
    test_environment,
)
from buildtools.interpreter import STARTED_BY
from buildtools.paths import (
    DIST,
    PATCHES,
    ROOT,
    TREE,
    UPSTREAM_TOML,
    WORK,
    cache_dir,
    scratch_dir,
)
from buildtools.pin import read_pin, write_lock
from buildtools.project import downloader, fingerprint, make_wheel, project_recipe
from buildtools.tree import Recipe, assemble
from buildtools.upstream import cached_sdist


def _recipe(args: argparse.Namespace) -> Recipe:
    return project_recipe(args.source, offline=args.offline)


def _output(args: argparse.Namespace, default: Path) -> Path:
    if args.output == "":
        raise BuildError("--output is empty; name a directory, or leave it out")
    return default if args.output is None else Path(args.output)


def fetch(args: argparse.Namespace) -> int:
    """Put all that `wheel --offline` needs into the cache."""
    pin = read_pin(UPSTREAM_TOML)
    fetch_packages("build.txt", build_environment(offline=args.offline), offline=args.offline)
    say(str(cached_sdist(pin, cache_dir(), downloader(offline=args.offline))))
    return 0


def tree(args: argparse.Namespace) -> int:
    """Assemble the patched tree."""
    destination = _output(args, TREE)
    if args.output is not None and destination.exists():
        raise BuildError(f"--output {destination} exists; name a directory that does not")
    with step("assemble the tree"):
        lock = assemble(_recipe(args), ENGINES[args.engine](), destination)
    say(f"{destination} (tree {lock.assembled})")
    return 0


def _make_wheel(args: argparse.Namespace, out: Path) -> tuple[Path, str]:
    require_compiler()
    python = build_environment(offline=args.offline)
    return make_wheel(_recipe(args), ENGINES[args.engine](), python, out)


def wheel(args: argparse.Namespace) -> int:
    """Build the wheel."""
    path, digest = _make_wheel(args, _output(args, DIST))
    if args.output is None:  # so that dist/megatron_core-*.whl is this wheel
        for stale in DIST.glob("megatron_core-*+nvme.*.whl*"):
            if stale.is_file() and stale.name not in (path.name, f"{path.name}.sha256"):
                stale.unlink()
    say(f"{path}\nsha256 {digest}")
    return 0


def _environment_with_wheel(args: argparse.Namespace) -> Path:
    """Return the Python of the test environment, with the wheel of the present tree installed."""
    python = test_environment(offline=args.offline)
    recipe = _recipe(args)
    wheels = WORK / "wheels" / fingerprint(recipe)
    found = list(wheels.glob("*.whl"))
    if found:  # still assemble: that is what notices an edited overlay
        with step("assemble the tree"), scratch_dir(WORK) as scratch:
            assemble(recipe, ENGINES[args.engine](), scratch / "tree")
    installed = found[0] if found else _make_wheel(args, wheels)[0]
    stamp = python.parent.parent / "installed-wheel"
    if not stamp.exists() or stamp.read_text() != str(installed):
        with step(f"install {installed.name}"):
            run_logged(
                [
                    str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
                    "--no-index", "--no-deps", "--force-reinstall", str(installed),
                ],
                "installation of the wheel",
            )  # fmt: skip
            stamp.write_text(str(installed))
    report = doctors.inspect_installed(str(python))
    if report.verdict is not doctors.Verdict.VERIFIED:
        stamp.unlink()
        raise BuildError("\n".join(["the installed wheel is not sound:", *report.lines]))
    return python


def _run_in_repository(command: list[str]) -> int:
    """Run ``command`` in the repository, with nothing on PYTHONPATH that shadows the wheel."""
    dropped = ("PYTHONPATH", STARTED_BY)
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def test(args: argparse.Namespace) -> int:
    """Set up the test environment and run the tests."""
    python = _environment_with_wheel(args)
    chosen = [] if "-m" in args.passed_on else ["-m", "not gpu"]
    return _run_in_repository([str(python), "-m", "pytest", *chosen, *args.passed_on])


def train_example(args: argparse.Namespace) -> int:
    """Train the example from the built wheel."""
    python = _environment_with_wheel(args)
    return _run_in_repository([str(python), "examples/train_gpt.py", *args.passed_on])


def doctor(args: argparse.Namespace) -> int:
    """Examine a wheel or an installation; the verdict is the exit status."""
    if args.installed:
        report = doctors.inspect_installed(args.python or os.environ[STARTED_BY])
    else:
        report = doctors.inspect_wheel(Path(args.wheel))
    say("\n".join(report.lines))
    return int(report.verdict)


def check(args: argparse.Namespace) -> int:
    """Check the series, the overlay, the lock and the label."""
    recipe = _recipe(args)
    checks.check(recipe, ROOT, PATCHES)
    total = sum(patch.changed_lines for patch in recipe.patches)
    say(f"OK: {recipe.pin.label}: {len(recipe.patches)} patches, {total} changed lines")
    return 0


def pin(args: argparse.Namespace) -> int:
    """Record the trees the series makes now, and remake the generated files."""
    recipe = _recipe(args)
    checks.lint(recipe, ROOT)
    generated = checks.generated_files(recipe, PATCHES)
    before = {path: path.read_bytes() if path.exists() else b"" for path in generated}
    try:
        for path, text in generated.items():
            path.write_text(text, encoding="utf-8")
        with step("assemble the tree"), scratch_dir(WORK) as scratch:
            lock = assemble(recipe, ENGINES[args.engine](), scratch / "tree", locked=False)
    except BaseException:
        for path, content in before.items():
            path.write_bytes(content)
        raise
    write_lock(UPSTREAM_TOML, lock)
    say(f"pristine {lock.pristine}\npatched {lock.patched}\nassembled {lock.assembled}")
    return 0


def clean(args: argparse.Namespace) -> int:
    """Remove what the build made; the cache of downloads stays."""
    for directory in (WORK, DIST):
        if directory.exists():
            with step(f"remove {directory}"):
                shutil.rmtree(directory)
    return 0


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "fetch": fetch,
    "tree": tree,
    "wheel": wheel,
    "test": test,
    "train-example": train_example,
    "doctor": doctor,
    "check": check,
    "pin": pin,
    "clean": clean,
}
