"""Git object ids of files and directories, computed without git.

A tree is identified by the id git would give it, so that one lock in ``upstream.toml`` can be
compared with a git checkout, an unpacked archive and a build on a host that has no git.
Format of the objects: gitformat-pack(5) and "Git Internals - Git Objects" of the Pro Git book.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from buildtools.console import BuildError

REGULAR = "100644"
EXECUTABLE = "100755"
NULL_BLOB = "0" * 40


@dataclass(frozen=True)
class Entry:
    """A file in a tree: its git mode (``100644`` or ``100755``) and its blob id (40 hex digits)."""

    mode: str
    blob: str


def _object_id(kind: str, body: bytes) -> str:
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(body)) + body).hexdigest()


def blob_id(content: bytes) -> str:
    """Return the id git gives to a file of this content."""
    return _object_id("blob", content)


def tree_id(entries: Mapping[str, Entry]) -> str:
    """Return the id of the tree that holds ``entries`` (POSIX path -> entry) and nothing else."""
    files: dict[str, Entry] = {}
    directories: dict[str, dict[str, Entry]] = {}
    for path, entry in entries.items():
        head, _, rest = path.partition("/")
        if rest:
            directories.setdefault(head, {})[rest] = entry
        else:
            files[head] = entry
    rows = [(name, entry.mode, entry.blob) for name, entry in files.items()]
    rows += [(f"{name}/", "40000", tree_id(inner)) for name, inner in directories.items()]
    # Git sorts a directory as if its name ended in a slash.
    body = b"".join(
        f"{mode} {name.rstrip('/')}".encode() + b"\0" + bytes.fromhex(oid)
        for name, mode, oid in sorted(rows, key=lambda row: row[0].encode())
    )
    return _object_id("tree", body)


def entry_of(path: Path) -> Entry:
    """Return the entry of the regular file at ``path``."""
    executable = path.stat().st_mode & stat.S_IXUSR
    return Entry(EXECUTABLE if executable else REGULAR, blob_id(path.read_bytes()))


def files_below(root: Path) -> list[str]:
    """Return the sorted POSIX paths of the files below ``root``.

    Raises:
        BuildError: something below ``root`` is neither a regular file nor a directory.
    """
    found = []
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            found.append(path.relative_to(root).as_posix())
        elif not stat.S_ISDIR(mode):
            raise BuildError(f"{path} is neither a file nor a directory (a link or a device)")
    return sorted(found)


def entries_below(root: Path, paths: Iterable[str] | None = None) -> dict[str, Entry]:
    """Return the entries of ``paths`` (by default of every file) below ``root``."""
    chosen = files_below(root) if paths is None else paths
    return {path: entry_of(root / path) for path in chosen}


def unsafe_path_reason(path: str) -> str | None:
    """Return why ``path`` must not be written below a tree, or None if it may be."""
    pure = PurePosixPath(path)
    if not path or path != str(pure) or "\\" in path or "\0" in path:
        return "is not a plain relative path"
    if pure.is_absolute():
        return "is absolute"
    if ".." in pure.parts:
        return "leaves the tree through '..'"
    if any(part.lower() == ".git" for part in pure.parts):
        return "lies in a .git directory"
    return None
