"""Another upstream than the pinned one: find it, verify what can be, and unpack it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from buildtools import git
from buildtools.archive import sha256_of, unpack
from buildtools.console import BuildError, step
from buildtools.objects import entries_below, tree_id
from buildtools.paths import scratch_dir
from buildtools.pin import Pin
from buildtools.upstream import Download, cached_sdist, source_version, take_shipped

DownloadRelease = Callable[[str, str, Path], None]
"""Puts the source distribution of (name, version) into a directory; its hash is not known."""

_VERSION = re.compile(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")


@dataclass(frozen=True)
class Target:
    """What a rebase goes to, as it will stand in the pin.

    Attributes:
        version: the version that the source itself says.
        sdist: file name of its source distribution.
        sha256: hash of that; empty if it is not known.
        git_ref: its tag or branch.
        git_commit: the commit, if it was taken from the repository.
        pristine: git tree id of the shipped files.
    """

    version: str
    sdist: str
    sha256: str
    git_ref: str
    git_commit: str
    pristine: str


@dataclass(frozen=True)
class Shop:
    """Where releases come from.

    Attributes:
        cache: the cache of downloads.
        download: gets a release of known hash, None if nothing may be downloaded.
        download_new: gets a release of unknown hash, likewise.
    """

    cache: Path
    download: Download | None
    download_new: DownloadRelease | None


def fetch_target(text: str, pin: Pin, shop: Shop, destination: Path) -> Target:
    """Put the shipped files of another upstream into the new directory ``destination``.

    Args:
        text: a path that exists, a version, or ``git:REF``.
        pin: the present pin: names, patterns, known releases.
        shop: where releases come from.
        destination: directory to create.

    Raises:
        BuildError: ``text`` is none of the three, the source cannot be had, or it is not what its
            version or hash says.
    """
    path = Path(text)
    if text and path.is_dir():
        return _from_directory(path, pin, destination)
    if text and path.is_file():
        return _from_archive(path, pin, destination)
    if _VERSION.fullmatch(text):
        return _from_index(text, pin, shop, destination)
    if text.startswith("git:") and len(text) > len("git:"):
        return _from_git(text.removeprefix("git:"), pin, shop, destination)
    raise BuildError(
        f"{text!r}: expected a version like 0.20.0, the path of an archive or directory that "
        "exists, or git:REF"
    )


def _from_index(version: str, pin: Pin, shop: Shop, destination: Path) -> Target:
    known = {**pin.releases, pin.version: pin.sdist_sha256}.get(version, "")
    if known:
        wanted = replace(pin, version=version, sdist=_sdist_name(pin, version), sdist_sha256=known)
        archive = cached_sdist(wanted, shop.cache, shop.download)
    else:
        archive = _download_new(version, pin, shop)
    return _from_archive(archive, pin, destination, version)


def _download_new(version: str, pin: Pin, shop: Shop) -> Path:
    if shop.download_new is None:
        raise BuildError(
            f"--offline: {pin.name} {version} is not in [releases] of upstream.toml, so that no "
            "file in the cache can be known to be it"
        )
    with step(f"download {pin.name} {version}"), scratch_dir(shop.cache) as scratch:
        shop.download_new(pin.name, version, scratch)
        found = sorted(scratch.glob("*.tar.gz"))
        if len(found) != 1:
            raise BuildError(f"the package index did not deliver one sdist of {version}: {found}")
        cached = shop.cache / "sdist" / sha256_of(found[0]) / found[0].name
        cached.parent.mkdir(parents=True, exist_ok=True)
        return found[0].rename(cached)


def _from_archive(path: Path, pin: Pin, destination: Path, version: str = "") -> Target:
    digest = sha256_of(path)
    with scratch_dir(destination.parent) as scratch:
        unpack(path, scratch / "raw", strip_top=True)
        target = _from_directory(scratch / "raw", pin, destination)
    if version and target.version != version:
        raise BuildError(
            f"{path.name}: expected version {version}, the source says {target.version}"
        )
    known = {**pin.releases, pin.version: pin.sdist_sha256}.get(target.version, "")
    if known and known != digest:
        raise BuildError(
            f"{path}: wrong sha256: the release {target.version} has {known}, got {digest}: not "
            "the released archive (give its directory if that is intended)"
        )
    return replace(target, sha256=digest)


def _from_directory(path: Path, pin: Pin, destination: Path) -> Target:
    take_shipped(path, destination, pin)
    version = source_version(destination)
    # The hash of the release, if it is known: `build.py pin` takes the series to that archive, and
    # says so if the directory was not the release.
    known = {**pin.releases, pin.version: pin.sdist_sha256}.get(version, "")
    return Target(
        version=version,
        sdist=_sdist_name(pin, version),
        sha256=known,
        git_ref=pin.git_ref.replace(pin.version, version),
        git_commit=pin.git_commit if version == pin.version else "",
        pristine=tree_id(entries_below(destination)),
    )


def _from_git(ref: str, pin: Pin, shop: Shop, destination: Path) -> Target:
    if shop.download_new is None:
        raise BuildError(f"--offline: {ref} of {pin.git_url} cannot be fetched")
    with step(f"fetch {ref} from {pin.git_url}"), scratch_dir(destination.parent) as scratch:
        (scratch / "bare").mkdir()
        archive = scratch / "archive.tar"
        commit = git.fetch_archive(pin.git_url, ref, pin.shipped, archive, scratch / "bare")
        unpack(archive, scratch / "raw", strip_top=False)
        target = _from_directory(scratch / "raw", pin, destination)
    return replace(target, git_ref=ref, git_commit=commit)


def _sdist_name(pin: Pin, version: str) -> str:
    return pin.sdist.replace(pin.version, version)
