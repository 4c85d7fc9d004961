"""Get the pinned upstream sources, verified, from the index, a git repository or a path.

Every kind of source ends in the same thing: a directory with exactly the shipped files, whose git
tree id is the pin's. Downloads live in the cache (`paths.cache_dir`) and are verified again on
every use.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from buildtools import git
from buildtools.archive import sha256_of, unpack
from buildtools.console import BuildError, step, warn
from buildtools.objects import entries_below, files_below, tree_id
from buildtools.paths import scratch_dir
from buildtools.pin import Pin

PACKAGE_INFO = "megatron/core/package_info.py"


@dataclass(frozen=True)
class Source:
    """Which source to take: ``index``, ``git`` or the path of an archive or directory."""

    kind: str
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse the value of ``--source``."""
        if text in ("index", "git"):
            return cls(text)
        if not (Path(text).is_file() or Path(text).is_dir()):
            raise BuildError(f"--source {text}: expected index, git, or an archive or directory")
        return cls("path", Path(text))


Download = Callable[[Pin, Path], None]
"""Puts the pinned source distribution into the given directory, from the package index."""


def _check_sha256(archive: Path, expected: str) -> None:
    actual = sha256_of(archive)
    if actual != expected:
        raise BuildError(
            f"{archive.name}: wrong sha256: expected {expected}, got {actual} "
            f"({archive.stat().st_size} bytes): a damaged download, or not the pinned release"
        )


def cached_sdist(pin: Pin, cache: Path, download: Download | None) -> Path:
    """Return the pinned source distribution in the cache, downloading it if it is not there.

    Args:
        pin: what is pinned.
        cache: the cache directory.
        download: how to get it, or None if nothing may be downloaded.

    Raises:
        BuildError: it is not cached and may not be downloaded, or has the wrong hash. A file of
            the wrong hash does not stay in the cache.
    """
    if not pin.sdist_sha256:
        raise BuildError(
            f"upstream.toml: [source.index] sha256 is empty: the series was not put on a source "
            f"distribution of {pin.name} {pin.version}. Use --source git or a path, or fill in the "
            "hash once it is released"
        )
    cached = cache / "sdist" / pin.sdist_sha256 / pin.sdist
    if not cached.exists():
        if download is None:
            raise BuildError(
                f"--offline: {pin.sdist} is not in the cache {cache}; run `build.py fetch` online"
            )
        with step(f"download {pin.sdist}"), scratch_dir(cache) as scratch:
            download(pin, scratch)
            arrived = scratch / pin.sdist
            if not arrived.exists():
                raise BuildError(f"the package index did not deliver {pin.sdist}")
            _check_sha256(arrived, pin.sdist_sha256)
            cached.parent.mkdir(parents=True, exist_ok=True)
            arrived.rename(cached)
    try:
        _check_sha256(cached, pin.sdist_sha256)
    except BuildError as error:
        cached.unlink()
        raise BuildError(f"{error}; it was removed from the cache, run again") from error
    return cached


def _cached_git_archive(pin: Pin, cache: Path, *, offline: bool) -> Path:
    name = re.sub(r"[^\w.-]", "_", f"{pin.git_url}@{pin.git_commit or pin.git_ref}")
    cached = cache / "git" / pin.lock.pristine / f"{name}.tar"
    if not cached.exists():
        if offline:
            raise BuildError(f"--offline: {pin.git_ref} of {pin.git_url} is not in the cache")
        with step(f"fetch {pin.git_ref} from {pin.git_url}"), scratch_dir(cache) as scratch:
            bare = scratch / "bare"
            bare.mkdir()
            arrived = scratch / "archive.tar"
            ref = pin.git_commit or pin.git_ref
            commit = git.fetch_archive(pin.git_url, ref, pin.shipped, arrived, bare)
            if pin.git_commit and commit != pin.git_commit:
                raise BuildError(f"{pin.git_ref}: expected commit {pin.git_commit}, got {commit}")
            pristine = scratch / "pristine"
            unpack(arrived, scratch / "raw", strip_top=False)
            take_shipped(scratch / "raw", pristine, pin)
            verify_pristine(pristine, pin)
            cached.parent.mkdir(parents=True, exist_ok=True)
            arrived.rename(cached)
            if not pin.git_commit:  # the tree id vouches for what is used; the commit says whence
                warn(
                    f"{ref} is commit {commit}: record it as `commit` in [source.git] of "
                    "upstream.toml"
                )
    return cached


def _shipped_pattern(pattern: str) -> re.Pattern[str]:
    """Translate a path pattern: ``**/`` is any run of directories, ``*`` stays within a name."""
    regex = re.escape(pattern).replace(r"\*\*/", "(?:[^/]+/)*").replace(r"\*", "[^/]*")
    return re.compile(regex + r"\Z")


def take_shipped(source: Path, destination: Path, pin: Pin) -> None:
    """Copy the shipped files of ``source`` into the new directory ``destination``.

    Raises:
        BuildError: a pattern of ``[shipped] paths`` matches no file, or a shipped file is a link.
    """
    patterns = {pattern: _shipped_pattern(pattern) for pattern in pin.shipped}
    unmatched = set(patterns)
    for path in _regular_files(source):
        hits = {pattern for pattern, regex in patterns.items() if regex.match(path)}
        if not hits:
            continue
        unmatched -= hits
        target = destination / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target)
        target.chmod(0o755 if (source / path).stat().st_mode & 0o100 else 0o644)
    if unmatched:
        raise BuildError(
            f"{source}: no file matches {', '.join(sorted(unmatched))} of [shipped] paths in "
            "upstream.toml: not a Megatron-core source tree, or upstream moved files"
        )


def _regular_files(source: Path) -> list[str]:
    """Files below a directory that may be a checkout: .git and links outside our paths are fine."""
    skipped = {".git"}
    found = []
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if relative.parts[0] in skipped or path.is_dir():
            continue
        if path.is_symlink() or not path.is_file():
            if relative.parts[0] == "megatron":
                raise BuildError(f"{path}: refused: a link or a device")
            continue
        found.append(relative.as_posix())
    return found


def source_version(tree: Path) -> str:
    """Read the version from ``package_info.py`` without running it.

    Raises:
        BuildError: the file is missing or does not hold MAJOR, MINOR, PATCH and PRE_RELEASE.
    """
    try:
        module = ast.parse((tree / PACKAGE_INFO).read_text(encoding="utf-8"))
        constants = {
            target.id: node.value.value
            for node in module.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        numbers = ".".join(str(constants[key]) for key in ("MAJOR", "MINOR", "PATCH"))
        return numbers + str(constants["PRE_RELEASE"])
    except (OSError, SyntaxError, KeyError) as error:
        raise BuildError(f"{tree / PACKAGE_INFO}: cannot read the version: {error!r}") from error


def verify_pristine(tree: Path, pin: Pin) -> None:
    """Compare a directory of shipped files with the pin.

    Raises:
        BuildError: it is another version, or its tree id is not the pinned one.
    """
    version = source_version(tree)
    if version != pin.version:
        raise BuildError(f"wrong version inside the source: expected {pin.version}, got {version}")
    actual = tree_id(entries_below(tree))
    if actual != pin.lock.pristine:
        raise BuildError(
            f"the source is not the pinned {pin.name} {pin.version}: expected tree "
            f"{pin.lock.pristine}, got {actual} ({len(files_below(tree))} shipped files)"
        )


def fetch(
    pin: Pin,
    source: Source,
    destination: Path,
    cache: Path,
    download: Download | None,
    *,
    locked: bool = True,
) -> None:
    """Put the pristine shipped files into the new directory ``destination``.

    Args:
        pin: what is pinned.
        source: where to take it from.
        destination: directory to create.
        cache: the cache directory.
        download: how to get the source distribution, or None to work offline.
        locked: whether the tree id must be the pinned one (`build.py pin` makes a new one).

    Raises:
        BuildError: the source is missing, unsafe, or not what is pinned; nothing is left behind.
    """
    with scratch_dir(destination.parent) as scratch:
        raw = scratch / "raw"
        if source.kind == "index":
            unpack(cached_sdist(pin, cache, download), raw, strip_top=True)
        elif source.kind == "git":
            cached = _cached_git_archive(pin, cache, offline=download is None)
            try:
                unpack(cached, raw, strip_top=False)
            except BuildError as error:
                cached.unlink()
                raise BuildError(f"{error}; it was removed from the cache, run again") from error
        elif source.path is not None and source.path.is_dir():
            raw = source.path
        elif source.path is not None:
            _check_sha256(source.path, pin.sdist_sha256)
            unpack(source.path, raw, strip_top=True)
        pristine = scratch / "pristine"
        take_shipped(raw, pristine, pin)
        if locked:
            verify_pristine(pristine, pin)
        pristine.rename(destination)
