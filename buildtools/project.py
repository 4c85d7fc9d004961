"""This repository as a recipe, and the wheel that comes of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from buildtools import doctor
from buildtools.apply import Engine
from buildtools.console import BuildError, step
from buildtools.environments import build_environment, release_downloader, sdist_downloader
from buildtools.manifest import make_manifest
from buildtools.paths import (
    OVERLAY,
    PATCHES,
    REQUIREMENTS,
    ROOT,
    UPSTREAM_TOML,
    WORK,
    cache_dir,
    scratch_dir,
)
from buildtools.pin import Pin, read_pin
from buildtools.releases import DownloadRelease, Shop
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
from buildtools.workspace import Workspace


def downloader(*, offline: bool) -> Download | None:
    """Return how to get the source distribution, or None if the network is off limits."""

    def download(pin: Pin, directory: Path) -> None:
        sdist_downloader(build_environment(offline=False))(pin, directory)

    return None if offline else download


def new_release_downloader(*, offline: bool) -> DownloadRelease | None:
    """Return how to get a release whose hash is not known, or None without the network."""

    def download(name: str, version: str, directory: Path) -> None:
        release_downloader(build_environment(offline=False))(name, version, directory)

    return None if offline else download


def project_shop(*, offline: bool) -> Shop:
    """Return where other releases come from."""
    return Shop(cache_dir(), downloader(offline=offline), new_release_downloader(offline=offline))


def project_workspace(*, offline: bool) -> Workspace:
    """Return this repository as a place of work."""
    recipe = project_recipe("index", offline=offline)
    if not recipe.pin.sdist_sha256:
        recipe = replace(recipe, source=Source("git"))
    return Workspace(recipe, UPSTREAM_TOML, PATCHES, ROOT, WORK)


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
