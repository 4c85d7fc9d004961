"""What each verb of ``build.py`` does, in a screenful each."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from buildtools import check as checks
from buildtools import doctor as doctors
from buildtools import seriesverbs
from buildtools.apply import ENGINES
from buildtools.checkout import Checkout, compared
from buildtools.console import BuildError, say, step, warn
from buildtools.containers import choose
from buildtools.drift import Drift, details, look_at, table, to_json, to_markdown
from buildtools.environments import (
    build_environment,
    fetch_packages,
    published_versions,
    require_compiler,
    run_logged,
    test_environment,
)
from buildtools.image import (
    Plan,
    context_directory,
    context_of_sources,
    context_of_wheel,
    make_image,
)
from buildtools.interpreter import STARTED_BY
from buildtools.paths import (
    DIST,
    OVERLAY,
    PATCHES,
    ROOT,
    TREE,
    UPSTREAM_TOML,
    WORK,
    cache_dir,
    scratch_dir,
)
from buildtools.pin import read_pin, write_lock
from buildtools.project import (
    downloader,
    fingerprint,
    make_wheel,
    project_recipe,
    project_shop,
    project_workspace,
)
from buildtools.report import check_format
from buildtools.transaction import exclusive, replace_all
from buildtools.tree import Recipe, assemble
from buildtools.upstream import cached_sdist
from buildtools.watch import Watch


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
    alone = exclusive(TREE, "tree") if args.output is None else contextlib.nullcontext()
    with alone, step("assemble the tree"):
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


def _present_wheel(args: argparse.Namespace) -> Path:
    """Return the wheel of the present tree, built if it was not yet."""
    recipe = _recipe(args)
    wheels = WORK / "wheels" / fingerprint(recipe)
    found = list(wheels.glob("*.whl"))
    if found:  # still assemble: that is what notices an edited overlay
        with step("assemble the tree"), scratch_dir(WORK) as scratch:
            assemble(recipe, ENGINES[args.engine](), scratch / "tree")
    return found[0] if found else _make_wheel(args, wheels)[0]


def _environment_with_wheel(args: argparse.Namespace) -> Path:
    """Return the Python of the test environment, with the wheel of the present tree installed."""
    python = test_environment(offline=args.offline)
    installed = _present_wheel(args)
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


def image(args: argparse.Namespace) -> int:
    """Bake the wheel into an image on a base that has torch."""
    engine = choose(args.container_engine)
    name = "Dockerfile.build" if args.inside else "Dockerfile"
    context = context_directory(inside=args.inside)
    with exclusive(WORK / "image", "image"):  # from making the context to the end of the build
        if args.inside:
            arguments = context_of_sources(_recipe(args), _cached_for_wheel(args), context)
        else:
            wheel = _present_wheel(args) if args.wheel is None else Path(args.wheel)
            arguments = context_of_wheel(wheel, context)
            if args.wheel is not None:
                _warn_of_another_build(wheel)
        options = tuple(args.passed_on[1:])  # after the `--`
        plan = Plan(ROOT / name, context, args.base, args.tag, arguments, options)
        make_image(plan, engine, dry_run=args.dry_run)
    return 0


def _cached_for_wheel(args: argparse.Namespace) -> dict[str, Path]:
    """Return what `wheel --offline` takes from the cache: name there -> path."""
    sdist = cached_sdist(read_pin(UPSTREAM_TOML), cache_dir(), downloader(offline=args.offline))
    python = build_environment(offline=args.offline)
    packages = fetch_packages("build.txt", python, offline=args.offline)
    return {path.relative_to(cache_dir()).as_posix(): path for path in (sdist, packages)}


def doctor(args: argparse.Namespace) -> int:
    """Examine a wheel or an installation; the verdict is the exit status."""
    if args.installed:
        python = args.python or os.environ[STARTED_BY]
        # Without --force-reinstall pip leaves an installed build of the same version alone.
        pip = f"{python} -m pip install --no-deps --force-reinstall"
        remedy = f"For this checkout's: build.py wheel, then {pip} dist/megatron_core-*.whl"
        report = _compared(doctors.inspect_installed(python), remedy)
    else:
        remedy = "For this checkout's: build.py wheel makes it in dist/."
        report = _compared(doctors.inspect_wheel(Path(args.wheel)), remedy)
    say("\n".join(report.lines))
    return int(report.verdict)


def _compared(report: doctors.Report, remedy: str) -> doctors.Report:
    checkout: Checkout | BuildError
    try:
        checkout = Checkout.read(UPSTREAM_TOML, PATCHES, OVERLAY)
    except BuildError as error:
        checkout = error
    return compared(report, checkout, remedy)


def _warn_of_another_build(wheel: Path) -> None:
    """Say so if a wheel that the user chose is sound, but not what this checkout builds."""
    remedy = "For this checkout's: leave out --wheel."
    report = _compared(doctors.inspect_wheel(wheel), remedy)
    if report.verdict is doctors.Verdict.ANOTHER_BUILD:
        warn("\n".join([f"--wheel {wheel}:", *report.lines]))


def check(args: argparse.Namespace) -> int:
    """Check the series, the overlay, the lock and the label."""
    recipe = _recipe(args)
    if args.tree is not None:
        return _check_tree(recipe, args)
    checks.check(recipe, ROOT, PATCHES)
    total = sum(patch.changed_lines for patch in recipe.patches)
    say(f"OK: {recipe.pin.label}: {len(recipe.patches)} patches, {total} changed lines")
    return 0


def _check_tree(recipe: Recipe, args: argparse.Namespace) -> int:
    """Check another upstream against the series, the tripwires and the census; 1 if it differs."""
    drift = _drifts(recipe, [args.tree], offline=args.offline)[0]
    lines = list(details(drift))
    say("\n\n".join([*lines, table([drift])]))
    return 1 if lines else 0


def _drifts(recipe: Recipe, targets: list[str], *, offline: bool) -> list[Drift]:
    watch = Watch(recipe, PATCHES / checks.RECORD)
    shop = project_shop(offline=offline)
    with scratch_dir(WORK) as scratch:
        history = project_workspace(offline=offline).history(scratch / "series")
        found = []
        for target in targets:
            with step(f"look at {target}"):
                found.append(look_at(target, watch, history, shop, scratch))
    return found


def drift(args: argparse.Namespace) -> int:
    """Say what other releases would do to the series; 1 if one of them needs work."""
    if args.report:
        check_format(Path(args.report))
    recipe = _recipe(args)
    targets = args.against or []
    if args.latest:
        if args.offline:
            raise BuildError("--latest asks the package index: leave out --offline")
        python = build_environment(offline=False)
        targets = published_versions(python, recipe.pin.name)[:1]
    found = _drifts(recipe, targets, offline=args.offline)
    if args.report:
        path = Path(args.report)
        path.write_text(to_json(found) if path.suffix == ".json" else to_markdown(found))
    if args.details:
        say("\n\n".join(line for each in found for line in details(each)))
    say(table(found))
    return 1 if any(each.needs_work for each in found) else 0


def pin(args: argparse.Namespace) -> int:
    """Record the trees the series makes now, remake generated files, accept tripwires."""
    if args.accept and not (args.because or "").strip():
        raise BuildError("--accept needs --because TEXT: what you looked at, and why it is fine")
    if (args.because or args.classed) and not args.accept:
        raise BuildError("--because and --as say something of --accept NAME, which is missing")
    # It writes what a rebase writes, and two that accept at once would lose one of the reasons.
    with exclusive(seriesverbs.SERIES, "pin"):
        return _pin(args)


def _pin(args: argparse.Namespace) -> int:
    if not read_pin(UPSTREAM_TOML).sdist_sha256:
        args.source = "git"  # rebased onto a commit that is not released; it vouches for the tree
    recipe = _recipe(args)
    checks.lint(recipe, ROOT)
    watch = Watch(recipe, PATCHES / checks.RECORD, locked=False)
    with step("tripwires and census"):
        record, still_open = watch.pinned(args.accept, args.because or "", args.classed or "")
    texts = {**checks.generated_files(recipe, PATCHES), watch.path: record}
    before = {path: path.read_bytes() if path.exists() else None for path in texts}
    replace_all({path: text.encode() for path, text in texts.items()}, WORK / "journal")
    try:
        with step("assemble the tree"), scratch_dir(WORK) as scratch:
            lock = assemble(recipe, ENGINES[args.engine](), scratch / "tree", locked=False)
    except BaseException:
        replace_all(before, WORK / "journal")
        raise
    write_lock(UPSTREAM_TOML, lock)
    say(f"pristine {lock.pristine}\npatched {lock.patched}\nassembled {lock.assembled}")
    if still_open:
        say("\n".join(["tripwires still open (`build.py check` shows them):", *still_open]))
    return 1 if still_open else 0


def clean(args: argparse.Namespace) -> int:
    """Remove what the build made; the cache of downloads stays."""
    with contextlib.ExitStack() as stack:
        locked = {lock.with_suffix("") for lock in WORK.glob("*.lock")}
        for name in sorted({seriesverbs.SERIES, *locked}):
            stack.enter_context(exclusive(name, "clean", wait=False))
        seriesverbs.require_nothing_open()
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
    "image": image,
    "doctor": doctor,
    "check": check,
    "drift": drift,
    "pin": pin,
    "edit": seriesverbs.edit,
    "new": seriesverbs.new,
    "export": seriesverbs.export,
    "drop": seriesverbs.drop,
    "status": seriesverbs.status,
    "rebase": seriesverbs.rebase,
    "clean": clean,
}
