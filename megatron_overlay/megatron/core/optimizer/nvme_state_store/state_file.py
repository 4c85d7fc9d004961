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
5. Direct I/O is used where it was asked for and a transfer is aligned, and nothing else is used in
   its place: a filesystem that refuses it raises. Whether to ask is decided in `direct_io`; what
   goes on through the page cache says [Note: Two descriptors] in `descriptors`.

Thread: distinct byte ranges of one file may be transferred by several threads at once. `close`
and `remove` must not run while another thread is inside a transfer: the number of the closed
descriptor may already belong to another file, which would then receive the bytes.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from . import page_cache
from .descriptors import NO_DIRECT, Descriptors
from .errors import StateFileError
from .memory import address_of
from .system_calls import OS_LAYER as OS_LAYER
from .system_calls import Layer

AGAIN_TIMEOUT_S = 30.0
"""How long one transfer may be told to try again (EAGAIN), in seconds, before it is an error."""
_AGAIN_PAUSE_S = 0.001
_ZEROS = memoryview(bytes(8 << 20))
_BLOCK = 512
"""Unit of ``st_blocks``, whatever the filesystem's own block size is."""
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class StateFile:
    """One open file of a fixed size; made by `create` or `open_existing`.

    Attributes:
        path: Where it lies.
        nbytes: Its size in bytes.
    """

    def __init__(self, path: Path, nbytes: int, fds: Descriptors, layer: Layer) -> None:
        self.path = path
        self.nbytes = nbytes
        self._fds = fds
        self._layer = layer
        self._sync_error: StateFileError | None = None

    @classmethod
    def create(
        cls, path: Path, nbytes: int, layer: Layer = OS_LAYER, *, is_direct: bool = False
    ) -> Self:
        """Make a file that only its owner may read, with real blocks for all of its ``nbytes``.

        Blocks for as long as it takes to write ``nbytes`` where the filesystem cannot reserve.

        Args:
            path: Must not exist.
            nbytes: Its size, for good.
            layer: The system calls.
            is_direct: Move aligned transfers past the page cache; see [Note: Two descriptors].

        Raises:
            StateFileError: the file exists, or the blocks could not be had: the file is removed
                again, and the message says how many bytes the filesystem has free. Or the
                filesystem refuses direct I/O; the file is removed again, too.
            ValueError: ``nbytes`` is not positive.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        file = cls._opened(path, nbytes, "create", flags, layer)
        try:
            if is_direct:
                file._fds.open_direct(os.O_RDWR)
            file._reserve()
        except BaseException as error:
            raised = error
            left_over = file._left_over()
            if isinstance(error, OSError | StateFileError) and error.errno in _NO_SPACE:
                # Asked after the removal: what the filesystem had before this file.
                raised = file._error("reserve", error, 0, nbytes, hint=_free_space(path))
            elif isinstance(error, OSError):
                raised = file._error("reserve", error, 0, nbytes)
            if left_over:
                raised.add_note(left_over)
            if raised is error:
                raise
            raise raised from error
        return file

    @classmethod
    def open_existing(
        cls, path: Path, nbytes: int, layer: Layer = OS_LAYER, *, is_direct: bool = False
    ) -> Self:
        """Open a file for reading alone; its directory may be read-only.

        Args:
            path: The file.
            nbytes: The size that it must have.
            layer: The system calls.
            is_direct: Read past the page cache what is aligned; see [Note: Two descriptors].

        Raises:
            StateFileError: it is missing, is no regular file, or is not ``nbytes`` long; or the
                filesystem refuses direct I/O.
            ValueError: ``nbytes`` is not positive.
        """
        file = cls._opened(path, nbytes, "open", os.O_RDONLY, layer)
        try:
            info = file._stat("open")
            if not stat.S_ISREG(info.st_mode):
                raise StateFileError(path, "open", hint="it is not a regular file")
            if info.st_size != nbytes:
                raise StateFileError(path, "open", expected=nbytes, actual=info.st_size)
            if is_direct:
                file._fds.open_direct(os.O_RDONLY)
        except StateFileError:
            file.close()
            raise
        return file

    @classmethod
    def _opened(cls, path: Path, nbytes: int, operation: str, flags: int, layer: Layer) -> Self:
        if nbytes <= 0:
            raise ValueError(f"{path}: a state file has at least one byte, not {nbytes}")
        try:
            return cls(path, nbytes, Descriptors(path, flags, layer), layer)
        except OSError as error:
            raise StateFileError(path, operation, expected=nbytes, errno=error.errno) from error

    @property
    def is_direct(self) -> bool:
        """Whether aligned transfers bypass the page cache."""
        return self._fds.has_direct

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())

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
        address = address_of(view)
        give_up_at = float("inf")
        while done < view.nbytes:
            place = (address and address + done, offset + done, view.nbytes - done)
            fd = -1
            try:
                fd = self._fds.for_transfer(*place)
                moved = call(fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                # The first EAGAIN starts the clock; progress does not stop it.
                give_up_at = min(give_up_at, time.monotonic() + AGAIN_TIMEOUT_S)
                if error.errno == errno.EAGAIN and time.monotonic() < give_up_at:
                    time.sleep(_AGAIN_PAUSE_S)
                    continue
                hint = self._hint(error.errno, fd)
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

    def _hint(self, number: int | None, fd: int) -> str:
        if number in _NO_SPACE:
            return _free_space(self.path)
        if number == errno.EAGAIN:
            return f"the kernel has asked to try again for {AGAIN_TIMEOUT_S:.0f} s"
        return NO_DIRECT if number == errno.EINVAL and self._fds.is_direct(fd) else ""

    def sync(self) -> None:
        """Block until every byte written so far is on the device.

        Raises:
            StateFileError: it is not; every later call raises the same error (rule 4).
        """
        if self._sync_error is not None:
            raise self._sync_error
        try:
            self._layer.fdatasync(self._fds.buffered)
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
            self._layer.posix_fadvise(self._fds.buffered, 0, self.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error("drop_page_cache", error) from error

    def resident_bytes(self) -> int:
        """Return how many of the file's bytes the page cache holds, in whole pages.

        Raises:
            StateFileError: the kernel does not tell.
        """
        try:
            return page_cache.resident_bytes(self._fds.buffered, self.nbytes)
        except OSError as error:
            raise self._error("resident_bytes", error) from error

    def close(self) -> None:
        """Close the file; later transfers raise EBADF. A second call does nothing.

        Raises:
            StateFileError: the filesystem reported an error; the file is closed all the same.
        """
        try:
            self._fds.close()
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
            self._layer.posix_fallocate(self._fds.buffered, 0, self.nbytes)
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

    def _stat(self, operation: str) -> os.stat_result:
        try:
            return self._layer.fstat(self._fds.buffered)
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
