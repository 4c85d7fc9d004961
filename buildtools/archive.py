"""Unpack an archive from outside without letting it reach outside its directory."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from pathlib import Path

from buildtools.console import BuildError
from buildtools.objects import unsafe_path_reason
from buildtools.paths import scratch_dir


def sha256_of(path: Path) -> str:
    """Return the sha256 of the file at ``path`` in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unsafe_member_reason(member: tarfile.TarInfo) -> str | None:
    if not (member.isfile() or member.isdir()):
        kinds = {tarfile.SYMTYPE: "symbolic link", tarfile.LNKTYPE: "hard link"}
        return f"is a {kinds.get(member.type, 'device, pipe or unknown member')}"
    return unsafe_path_reason(member.name)


def unpack(archive: Path, destination: Path, *, strip_top: bool) -> None:
    """Unpack a tar archive (plain or gzip) into the new directory ``destination``.

    Only regular files and directories are accepted; their mode is reduced to 644 or 755 and their
    owner is dropped.

    Args:
        archive: the file to unpack; its hash is the caller's business.
        destination: directory to create; it must not exist.
        strip_top: whether all members lie in one top directory that is left out.

    Raises:
        BuildError: the archive is damaged or truncated, holds a member that is unsafe, comes
            twice, or lies beside the top directory. Nothing is left at ``destination``.
    """
    with scratch_dir(destination.parent) as scratch:
        root = scratch / "tree"
        root.mkdir()
        try:
            with tarfile.open(archive) as tar:
                _unpack_members(tar, archive.name, root, strip_top)
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise BuildError(f"{archive.name}: damaged or truncated archive: {error}") from error
        root.rename(destination)


def _unpack_members(tar: tarfile.TarFile, name: str, root: Path, strip_top: bool) -> None:
    top: str | None = None
    seen: set[str] = set()
    for member in tar:
        reason = _unsafe_member_reason(member)
        if reason:
            raise BuildError(f"{name}: refused: member {member.name!r} {reason}")
        path = member.name
        if strip_top:
            first, _, path = member.name.partition("/")
            top = top or first
            if first != top:
                raise BuildError(f"{name}: refused: member {member.name!r} is not below {top!r}")
        if member.isdir() or not path:
            continue
        if path in seen:
            raise BuildError(f"{name}: refused: member {member.name!r} comes twice")
        seen.add(path)
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        stream = tar.extractfile(member)
        assert stream is not None, "a regular member has content"
        content = stream.read()
        if len(content) != member.size:
            raise BuildError(
                f"{name}: truncated archive: {member.name!r} has {len(content)} bytes, "
                f"expected {member.size}"
            )
        target.write_bytes(content)
        target.chmod(0o755 if member.mode & 0o100 else 0o644)
