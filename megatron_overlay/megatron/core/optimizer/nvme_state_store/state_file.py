"""One preallocated file of a fixed size: exact transfers at byte offsets, sync and page cache.

Numbered rules, each with a test:

1. A created file has real blocks for its whole size, or it does not exist: no space is an error at
   creation, never at a write in the middle of a run. A filesystem that copies on write (Btrfs) may
   still need new blocks for an overwrite; no call can reserve those.
2. Bytes that were never written read as zeros. The store relies on it: moments start at zero.
3. A transfer moves all bytes of its buffer or raises. Short transfers and interruptions by signals
   are continued; an early end of the file, or a transfer of nothing, is an error with its place.
4. A failed sync is final: Linux marks the pages clean that it could not write and forgets the
   error, so that a second fdatasync would succeed although the bytes are lost.

Thread: distinct byte ranges of one file may be transferred by several threads at once. `close`
and `remove` must not run while another thread is inside a transfer: the number of the closed
descriptor may already belong to another file, which would then receive the bytes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from .errors import StateFileError

_WINDOW = 1 << 30
"""Bytes that are mapped at once to ask what is cached; a multiple of the page size."""
_ZEROS = memoryview(bytes(8 << 20))
_BLOCK = 512
"""Unit of ``st_blocks``, whatever the filesystem's own block size is."""
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class Layer(Protocol):
    """The functions of `os` that touch a state file, so that a test can pass ones that fail."""

    def open(self, path: Path, flags: int, mode: int, /) -> int: ...  # noqa: D102
    def close(self, fd: int, /) -> None: ...  # noqa: D102
    def unlink(self, path: Path, /) -> None: ...  # noqa: D102
    def fstat(self, fd: int, /) -> os.stat_result: ...  # noqa: D102
    def posix_fallocate(self, fd: int, offset: int, nbytes: int, /) -> None: ...  # noqa: D102
    def posix_fadvise(self, fd: int, offset: int, nbytes: int, advice: int, /) -> None: ...  # noqa: D102
    def preadv(self, fd: int, buffers: list[memoryview], offset: int, /) -> int: ...  # noqa: D102
    def pwrite(self, fd: int, buffer: memoryview, offset: int, /) -> int: ...  # noqa: D102
    def fdatasync(self, fd: int, /) -> None: ...  # noqa: D102


OS_LAYER: Layer = os
"""The real one. Its transfers release the GIL."""


class StateFile:
    """One open file of a fixed size; made by `create` or `open_existing`.

    Attributes:
        path: Where it lies.
        nbytes: Its size in bytes.
    """

    def __init__(self, path: Path, nbytes: int, fd: int, layer: Layer) -> None:
        self.path = path
        self.nbytes = nbytes
        self._fd = fd
        self._layer = layer
        self._sync_error: StateFileError | None = None

    @classmethod
    def create(cls, path: Path, nbytes: int, layer: Layer = OS_LAYER) -> Self:
        """Make a file that only its owner may read, with real blocks for all of its ``nbytes``.

        Blocks for as long as it takes to write ``nbytes`` where the filesystem cannot reserve.

        Raises:
            StateFileError: the file exists, or the blocks could not be had: the file is removed
                again, and the message says how many bytes the filesystem has free.
            ValueError: ``nbytes`` is not positive.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = cls._opened(path, nbytes, "create", flags, layer)
        try:
            file._reserve()
        except BaseException as error:
            raised = error
            left_over = file._left_over()
            if isinstance(error, OSError | StateFileError) and error.errno is not None:
                # Asked after the removal: what the filesystem had before this file.
                hint = _free_space(path) if error.errno in _NO_SPACE else ""
                raised = file._error("reserve", error, 0, nbytes, hint=hint)
            if left_over:
                raised.add_note(left_over)
            if raised is error:
                raise
            raise raised from error
        return file

    @classmethod
    def open_existing(cls, path: Path, nbytes: int, layer: Layer = OS_LAYER) -> Self:
        """Open a file for reading alone; its directory may be read-only.

        Raises:
            StateFileError: it is missing, is no regular file, or is not ``nbytes`` long.
            ValueError: ``nbytes`` is not positive.
        """
        file = cls._opened(path, nbytes, "open", os.O_RDONLY | os.O_CLOEXEC, layer)
        try:
            info = file._stat("open")
            if not stat.S_ISREG(info.st_mode):
                raise StateFileError(path, "open", hint="it is not a regular file")
            if info.st_size != nbytes:
                raise StateFileError(path, "open", expected=nbytes, actual=info.st_size)
        except StateFileError:
            file.close()
            raise
        return file

    @classmethod
    def _opened(cls, path: Path, nbytes: int, operation: str, flags: int, layer: Layer) -> Self:
        if nbytes <= 0:
            raise ValueError(f"{path}: a state file has at least one byte, not {nbytes}")
        try:
            return cls(path, nbytes, layer.open(path, flags, 0o600), layer)
        except OSError as error:
            raise StateFileError(path, operation, expected=nbytes, errno=error.errno) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def check_range(self, offset: int, buffer: memoryview) -> memoryview:
        """Return ``buffer`` as bytes, to be transferred at byte ``offset``.

        Raises:
            ValueError: the range does not lie within the file, or the buffer has gaps.
        """
        if not 0 <= offset <= self.nbytes - buffer.nbytes:
            raise ValueError(
                f"{self.path}: bytes {offset} to {offset + buffer.nbytes} do not lie within the "
                f"file's {self.nbytes}"
            )
        if not buffer.c_contiguous:
            raise ValueError(f"{self.path}: the buffer of {buffer.nbytes} bytes has gaps")
        # memoryview.cast refuses views with a zero in their shape.
        return buffer.cast("B") if buffer.nbytes else memoryview(b"")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``. Blocks until all are there.

        Raises:
            StateFileError: fewer bytes could be read; the buffer's contents are undefined.
            ValueError: the range does not lie within the file, or the buffer is read-only.
        """
        if buffer.readonly:
            raise ValueError(f"{self.path}: cannot read into a read-only buffer")
        self._transfer("read", self._pread, offset, self.check_range(offset, buffer))

    def _pread(self, fd: int, view: memoryview, offset: int) -> int:
        return self._layer.preadv(fd, [view], offset)

    def write_from(self, offset: int, buffer: memoryview) -> None:
        """Write all of ``buffer`` at ``offset``. Blocks until the page cache or device has it.

        Raises:
            StateFileError: fewer bytes could be written; the range's contents are undefined.
            ValueError: the range does not lie within the file.
        """
        self._transfer("write", self._layer.pwrite, offset, self.check_range(offset, buffer))

    def _transfer(
        self,
        operation: str,
        call: Callable[[int, memoryview, int], int],
        offset: int,
        view: memoryview,
    ) -> None:
        done = 0
        while done < view.nbytes:
            try:
                moved = call(self._open_fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                hint = _free_space(self.path) if error.errno in _NO_SPACE else ""
                raise self._error(operation, error, offset, view.nbytes, done, hint) from error
            if moved <= 0:
                raise StateFileError(
                    self.path,
                    operation,
                    offset=offset,
                    expected=view.nbytes,
                    actual=done,
                    hint=f"the file is {self._stat(operation).st_size} bytes long and should be "
                    f"{self.nbytes}: did something truncate it?",
                )
            done += moved

    def sync(self) -> None:
        """Block until every byte written so far is on the device.

        Raises:
            StateFileError: it is not; every later call raises the same error (rule 4).
        """
        if self._sync_error is not None:
            raise self._sync_error
        try:
            self._layer.fdatasync(self._open_fd)
        except OSError as error:
            self._sync_error = self._error("sync", error)
            raise self._sync_error from error

    def drop_page_cache(self) -> None:
        """Let the kernel forget its copies of the file's bytes.

        Call `sync` first: pages that are not on the device yet stay in the cache, without an error.

        Raises:
            StateFileError: the kernel refused the advice.
        """
        try:
            self._layer.posix_fadvise(self._open_fd, 0, self.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error("drop_page_cache", error) from error

    def resident_bytes(self) -> int:
        """Return how many of the file's bytes the page cache holds, in whole pages.

        Raises:
            StateFileError: the kernel does not tell.
        """
        try:
            return min(
                self.nbytes, sum(_resident_pages(self._open_fd, self.nbytes)) * mmap.PAGESIZE
            )
        except OSError as error:
            raise self._error("resident_bytes", error) from error

    def close(self) -> None:
        """Close the file; later transfers raise EBADF. A second call does nothing.

        Raises:
            StateFileError: the filesystem reported an error; the file is closed all the same.
        """
        fd, self._fd = self._fd, -1
        try:
            if fd >= 0:
                self._layer.close(fd)
        except OSError as error:
            raise self._error("close", error) from error

    def remove(self) -> None:
        """Close the file and remove its name, which may be gone already.

        Raises:
            StateFileError: the name is still there, or the file did not close cleanly.
        """
        try:
            self._layer.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._error("remove", error) from error
        finally:
            self.close()

    def _left_over(self) -> str:
        try:
            self.remove()
        except StateFileError as error:
            return f"and the unfinished file is still there: {error}"
        return ""

    def _reserve(self) -> None:
        try:
            self._layer.posix_fallocate(self._open_fd, 0, self.nbytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
        if self._reserved_bytes() < self.nbytes:
            # The filesystem cannot reserve, and the C library did not do it in its place.
            for offset in range(0, self.nbytes, _ZEROS.nbytes):
                view = _ZEROS[: self.nbytes - offset]
                self._transfer("reserve", self._layer.pwrite, offset, view)
            self.sync()  # some filesystems assign blocks, and count them, only now
            reserved = self._reserved_bytes()
            if reserved < self.nbytes:
                raise StateFileError(
                    self.path,
                    "reserve",
                    offset=0,
                    expected=self.nbytes,
                    actual=reserved,
                    hint="zeros were written, but the filesystem assigned fewer blocks (does it "
                    "compress?), so space may run out in the middle of a run; use another one",
                )

    def _reserved_bytes(self) -> int:
        info = self._stat("reserve")
        return min(info.st_size, info.st_blocks * _BLOCK)

    @property
    def _open_fd(self) -> int:
        if self._fd < 0:
            raise OSError(errno.EBADF, "closed")
        return self._fd

    def _stat(self, operation: str) -> os.stat_result:
        try:
            return self._layer.fstat(self._open_fd)
        except OSError as error:
            raise self._error(operation, error) from error

    def _error(
        self,
        operation: str,
        error: OSError | StateFileError,
        offset: int | None = None,
        expected: int | None = None,
        actual: int | None = None,
        hint: str = "",
    ) -> StateFileError:
        return StateFileError(
            self.path,
            operation,
            offset=offset,
            expected=expected,
            actual=actual,
            errno=error.errno,
            hint=hint,
        )


def _free_space(path: Path) -> str:
    try:
        info = os.statvfs(path.parent)
    except OSError:
        return ""
    return f"the filesystem of {path.parent} has {info.f_bavail * info.f_frsize} bytes free"


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


def _resident_pages(fd: int, nbytes: int) -> Iterator[int]:
    # Python's own mmap does not tell the address of a read-only mapping. Nothing touches the pages.
    for start in range(0, nbytes, _WINDOW):
        length = min(_WINDOW, nbytes - start)
        where = _LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
        if where == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        try:
            pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
            if _LIBC.mincore(where, length, pages) != 0:
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            _LIBC.munmap(where, length)
        yield pages.raw.count(1)  # Linux sets no bit but the lowest
