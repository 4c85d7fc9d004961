"""A private, locked directory for the files of one store of one process.

    <base>/<label>-<pid>-<random>/       the directory, mode 0700
    <base>/<label>-<pid>-<random>.lock   its lock file: flocked for as long as the owner lives
    <base>/.state-store-<uid>.lock       held while a directory is made and leftovers are reclaimed

[Note: Who is alive]
The kernel drops an flock when the last descriptor of it closes, also on kill -9: a lock that can be
had belongs to a dead run. The process id in the name is for people alone: ids are reused, and
differ between containers. What makes starts and ends safe side by side:

* Making: the lock file is created, flocked and written before the directory exists, and release
  removes the directory before the lock file, so a directory without a lock file is never one that
  is just coming or going. (A cleaner of old files may make one: it is reported and left alone.)
* Reclaiming happens under the base's lock, which every start takes. So nobody looks between the
  creation of a lock file and its flock; and a second rank waits while a first one still removes
  leftovers, and then finds the space free instead of running out of it.
* Names are random and never used again: what loses a race with a release finds nothing to remove.
* Some network filesystems keep flock within one node (Lustre with localflock, NFS with
  local_lock), where another node's live directory looks dead. Each lock file holds the boot id of
  its kernel; another boot's leftovers are reclaimed only on filesystems that cannot be shared.

[Note: Fork]
A forked child (a checkpoint writer, a data loader) shares the parent's flock until both have
closed it. Closing the child's copy does not unlock, LOCK_UN in the child would; so nothing here
calls LOCK_UN, and the child closes its copies right after the fork: an orphan that outlives a
killed parent keeps no lock, and the child's own exit removes nothing. A fork in C that bypasses
`os.register_at_fork` keeps the lock until it ends: leftovers then stay, live files are never lost.
Programs started by exec inherit nothing (O_CLOEXEC).

SIGKILL, an unhandled SIGTERM and os._exit skip the removal at exit; the next start reclaims.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Self

from .errors import DirectoryError
from .filesystems import boot_id as _boot_id
from .filesystems import filesystem_type as _filesystem_type

logger = logging.getLogger(__name__)

BASE_LOCK_TIMEOUT_S = 600.0
"""How long a start waits for another one that removes leftovers, in seconds."""

_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_NAME = re.compile(_LABEL.pattern + r"-[0-9]+-[0-9a-f]{16}")
_LOCK_SUFFIX = ".lock"
_MAGIC = "nvme_state_store lock 1"
_BLOCK = 512
_CHOOSE_ANOTHER = "or choose another directory (--stream-optimizer-state-dir)"
_HINTS = {
    errno.EACCES: f"give this user write permission, {_CHOOSE_ANOTHER}",
    errno.EPERM: f"give this user write permission, {_CHOOSE_ANOTHER}",
    errno.EROFS: f"mount the filesystem writable, {_CHOOSE_ANOTHER}",
    errno.ENOTDIR: f"remove the file that is in the way, {_CHOOSE_ANOTHER}",
    errno.EEXIST: f"remove the file that is in the way, {_CHOOSE_ANOTHER}",
    errno.ENOSPC: f"free some space there, {_CHOOSE_ANOTHER}",
    errno.EDQUOT: f"raise the quota or free some space there, {_CHOOSE_ANOTHER}",
    errno.ENOSYS: f"the filesystem has no flock: mount it with it, {_CHOOSE_ANOTHER}",
    errno.EOPNOTSUPP: f"the filesystem has no flock: mount it with it, {_CHOOSE_ANOTHER}",
    errno.ENOLCK: f"the filesystem's lock service does not answer: start it, {_CHOOSE_ANOTHER}",
}
_UNSHARED = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay")
)
"""Types of filesystems that one kernel alone mounts, so that flock tells of everyone."""

_held: set[RankDirectory] = set()
_lock_fds: set[int] = set()


class RankDirectory:
    """A directory below a base that belongs to one store of this process, until `release`.

    Thread: any, but one at a time.

    Attributes:
        path: The directory.
        reclaimed_bytes: Bytes on disk that `acquire` took back from runs that are dead.
    """

    def __init__(self, path: Path, lock_path: Path, lock_fd: int, reclaimed_bytes: int) -> None:
        self.path = path
        self.reclaimed_bytes = reclaimed_bytes
        self._lock_path = lock_path
        self._lock_fd = lock_fd
        self._pid = os.getpid()

    @classmethod
    def acquire(cls, base: Path, label: str) -> Self:
        """Make a directory below ``base``, after removing those of dead runs of this user.

        Blocks while another process removes leftovers below the same base.

        Args:
            base: Made with mode 0700 if missing; may be a symlink. Nothing in it that is not this
                module's is touched.
            label: Begins the directory's name; letters, digits and ``._-``, at most 100.

        Raises:
            DirectoryError: ``base`` or the directory cannot be made, written or locked.
            ValueError: ``label`` is no such name.
        """
        if not _LABEL.fullmatch(label):
            raise ValueError(
                f"label {label!r}: expected at most 100 letters, digits and '._-', beginning with "
                "a letter, digit or '_'"
            )
        with _explained(base, "cannot be used for optimizer state"):
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            resolved = base.resolve(strict=True)  # the process may change its working directory
            with _base_lock(resolved):
                names = sorted(entry.name for entry in resolved.iterdir())
                reclaimed = sum(_reclaim(resolved, name) for name in names)
                directory = cls._make(resolved, label, reclaimed)
        _held.add(directory)
        _release_at_exit()
        return directory

    @classmethod
    def _make(cls, base: Path, label: str, reclaimed: int) -> Self:
        path = base / f"{label}-{os.getpid()}-{secrets.token_hex(8)}"
        lock_path = path.with_name(path.name + _LOCK_SUFFIX)
        fd = _open_lock(lock_path, os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, f"{_MAGIC}\nboot {_boot_id()}\npid {os.getpid()}\n".encode())
            path.mkdir(mode=0o700)
        except BaseException:
            lock_path.unlink(missing_ok=True)
            _close_lock(fd)
            raise
        return cls(path, lock_path, fd, reclaimed)

    def release(self) -> None:
        """Remove the directory, what is in it, and its lock; a second call does nothing.

        Does nothing in a forked child either: the directory is its parent's.

        Raises:
            DirectoryError: something could not be removed; a later start will try again.
        """
        if self not in _held or os.getpid() != self._pid:
            return
        _held.discard(self)
        try:
            with _explained(self.path, "cannot be removed"):
                _remove_tree(self.path)
                self._lock_path.unlink(missing_ok=True)
        finally:
            _close_lock(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextlib.contextmanager
def _explained(path: Path, problem: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "")
        if error.filename not in (None, path, str(path)):
            problem += f" ({error.filename})"
        raise DirectoryError(path, problem, errno=error.errno, hint=hint) from error


def _open_lock(path: Path, flags: int) -> int:
    # Writable even to look at it: NFS wants that for an exclusive flock.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600)
    _lock_fds.add(fd)
    return fd


def _close_lock(fd: int) -> None:
    _lock_fds.discard(fd)
    os.close(fd)


def _is_locked_elsewhere(fd: int) -> bool:
    """Take the lock of ``fd``, or return True if another open file has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@contextlib.contextmanager
def _base_lock(base: Path) -> Iterator[None]:
    # The file stays for ever: whoever removed it could split those who wait for it in two.
    path = base / f".state-store-{os.geteuid()}{_LOCK_SUFFIX}"
    fd = _open_lock(path, os.O_CREAT)
    try:
        deadline = time.monotonic() + BASE_LOCK_TIMEOUT_S
        while _is_locked_elsewhere(fd):
            if time.monotonic() > deadline:
                raise DirectoryError(
                    path,
                    f"another process has held the lock for {BASE_LOCK_TIMEOUT_S:.0f} s",
                    hint="find it with 'lsof' or 'fuser', and end it",
                )
            time.sleep(0.02)
        yield
    finally:
        _close_lock(fd)


def _reclaim(base: Path, entry: str) -> int:
    """Remove what a dead run left behind ``entry``, and return the bytes that were freed."""
    if _NAME.fullmatch(entry):
        _report_unlocked(base / entry)
        return 0
    name = entry.removesuffix(_LOCK_SUFFIX)
    if name == entry or not _NAME.fullmatch(name):
        return 0
    lock_path = base / entry
    try:
        fd = _open_lock(lock_path, 0)
    except OSError:
        return 0  # just released, a symlink, or another user's
    try:
        if _is_locked_elsewhere(fd) or not _is_ours(fd, lock_path):
            return 0
        freed = _remove_tree(base / name)
        lock_path.unlink(missing_ok=True)
        return freed
    except OSError as error:
        logger.warning("%s: the leftovers of a dead run could not be removed: %s", lock_path, error)
        return 0
    finally:
        _close_lock(fd)


def _report_unlocked(path: Path) -> None:
    has_lock = os.path.lexists(path.with_name(path.name + _LOCK_SUFFIX))
    # Looked at in this order, since a release removes the directory first.
    if not has_lock and path.is_dir() and not path.is_symlink():
        logger.warning("%s has no lock file: left alone, since its run may be alive", path)


def _is_ours(fd: int, lock_path: Path) -> bool:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        return False
    content = os.pread(fd, 4096, 0).decode(errors="replace").splitlines()
    if content and content[0] != _MAGIC:
        return False
    # Empty: its run died before it wrote, or the machine before that reached the disk.
    if f"boot {_boot_id()}" in content or _filesystem_type(lock_path) in _UNSHARED:
        return True
    logger.warning(
        "%s was left by another boot or another node, and this filesystem may be shared: left "
        "alone; remove it by hand if its run is dead",
        lock_path,
    )
    return False


def _remove_tree(path: Path) -> int:
    """Remove a directory, never through a symlink, and return its bytes on disk."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory, so not this store's", path)
        nbytes = sum(
            (Path(parent) / file).lstat().st_blocks * _BLOCK
            for parent, _, files in os.walk(path)
            for file in files
        )
        shutil.rmtree(path)
    except FileNotFoundError:
        if path.exists():  # something else is at work in there
            raise
        return 0
    return nbytes


_registered_pids: set[int] = set()


def _release_at_exit() -> None:
    """Release what this process holds when it ends.

    Not through `atexit`: a process that multiprocessing has forked ends without running it, and
    has forgotten what its parent registered.
    """
    if os.getpid() not in _registered_pids:
        _registered_pids.add(os.getpid())
        Finalize(None, _release_all, exitpriority=0)


def _release_all() -> None:
    for directory in list(_held):
        try:
            directory.release()
        except DirectoryError as error:
            logger.warning("at exit: %s", error)


def _disown() -> None:
    _held.clear()
    for fd in list(_lock_fds):
        with contextlib.suppress(OSError):
            _close_lock(fd)


os.register_at_fork(after_in_child=_disown)
