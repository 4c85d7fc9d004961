"""Where things lie: the repository, its scratch directory and the cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UPSTREAM_TOML = ROOT / "upstream.toml"
PATCHES = ROOT / "patches"
OVERLAY = ROOT / "megatron_overlay"
REQUIREMENTS = ROOT / "requirements"
DIST = ROOT / "dist"
WORK = ROOT / ".work"
TREE = WORK / "tree"


def cache_dir() -> Path:
    """Return the cache of verified downloads; `clean` leaves it alone, clones share it."""
    chosen = os.environ.get("MEGATRON_NVME_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron-nvme"


@contextlib.contextmanager
def scratch_dir(parent: Path) -> Iterator[Path]:
    """Yield a new directory below ``parent`` that is gone when the body is left, also by an error.

    It lies beside its destination so that the finished result moves there by one rename.
    """
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=".tmp-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def swap_in(new: Path, destination: Path) -> None:
    """Put directory ``new`` at ``destination``; a reader sees the old content or the new one."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with scratch_dir(destination.parent) as trash:
        if destination.exists():
            destination.rename(trash / "old")
        try:
            new.rename(destination)
        except OSError:
            if (trash / "old").exists():
                (trash / "old").rename(destination)
            raise
