"""This repository as a recipe, and the wheel that comes of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from buildtools import doctor
from buildtools.apply import Engine
from buildtools.console import BuildError, step
from buildtools.environments import build_environment, sdist_downloader
from buildtools.manifest import make_manifest
from buildtools.paths import (
    OVERLAY,
    PATCHES,
    REQUIREMENTS,
    UPSTREAM_TOML,
    WORK,
    cache_dir,
    scratch_dir,
)
from buildtools.pin import Pin, read_pin
from buildtools.series import load_patches
from buildtools.tree import Recipe, assemble
from buildtools.upstream import Download, Source
from buildtools.wheel import (
    add_manifest,
    build_wheel,
    package_files,
    publish,
    tool_versions,
    verify_contents,
)


def downloader(*, offline: bool) -> Download | None:
    """Return how to get the source distribution, or None if the network is off limits."""

    def download(pin: Pin, directory: Path) -> None:
        sdist_downloader(build_environment(offline=False))(pin, directory)

    return None if offline else download


def project_recipe(source: str, *, offline: bool) -> Recipe:
    """Return the recipe of this repository with the given ``--source``."""
    return Recipe(
        pin=read_pin(UPSTREAM_TOML),
        patches=load_patches(PATCHES),
        overlay=OVERLAY,
        source=Source.parse(source),
        cache=cache_dir(),
        download=downloader(offline=offline),
    )


def fingerprint(recipe: Recipe) -> str:
    """Return a hash of everything that decides the wheel, but for the compiler and Python."""
    parts = [repr(recipe.pin).encode(), (REQUIREMENTS / "build.txt").read_bytes()]
    parts += [patch.content for patch in recipe.patches]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def make_wheel(recipe: Recipe, engine: Engine, python: Path, out: Path) -> tuple[Path, str]:
    """Build the wheel of ``recipe`` from a fresh tree and have the doctor examine it.

    Args:
        recipe: what to build.
        engine: what applies the series.
        python: Python of the build environment.
        out: directory that receives the wheel and its ``.sha256``.

    Returns:
        The path of the wheel and its sha256.

    Raises:
        BuildError: a step failed, or the wheel is not what it should be; ``out`` is untouched.
    """
    epoch = recipe.pin.epoch
    with scratch_dir(WORK) as scratch:
        tree = scratch / "tree"
        with step("assemble the tree"):
            lock = assemble(recipe, engine, tree)
        manifest = make_manifest(recipe, lock, tree, PATCHES, tool_versions(python))
        expected = package_files(tree)
        with step("build the wheel"):
            plain = build_wheel(tree, scratch / "plain", python, epoch)
            wheel = add_manifest(plain, manifest, python, epoch, scratch / "final")
        verify_contents(wheel, tree, expected)
        report = doctor.inspect_wheel(wheel)
        if report.verdict is not doctor.Verdict.VERIFIED:
            raise BuildError("\n".join(["the wheel that was built is not sound:", *report.lines]))
        return publish(wheel, out)
