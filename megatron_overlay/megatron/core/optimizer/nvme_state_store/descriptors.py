"""The descriptors of one state file: one for the page cache, one for direct I/O.

[Note: Two descriptors]
A file for direct I/O has a second descriptor with O_DIRECT. A transfer, or what is left of one that
came short, goes through it if place, length and memory address are multiples of 4096; else, like
the small and unaligned transfers of checkpoints, through the first one and the page cache. On local
filesystems both see the same bytes: before a direct read the kernel writes the range's dirty pages
to the device, around a direct write it drops the range's pages (open(2) and Linux's mm/filemap.c;
`direct_io` shows it on the directory in use). What is not safe is a buffered write beside a direct
one of the same block at the same time, since the kernel writes whole blocks; segments begin at
multiples of 4096, and requests in flight together do not overlap, so that two such transfers never
share one. `sync` is needed with direct I/O too: blocks that were reserved count as unwritten until
the filesystem has noted otherwise, and the device has a cache of its own.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .errors import StateFileError
from .layout import ALIGN_BYTES
from .system_calls import Layer

NO_DIRECT = (
    f"its filesystem refuses direct I/O in blocks of {ALIGN_BYTES} bytes; "
    "use --stream-optimizer-state-io auto or buffered, or another directory"
)
"""What to do about it, for an error's text."""


class Descriptors:
    """An open file, and the same file opened for direct I/O once `open_direct` was called.

    Args:
        path: The file.
        flags: Of open(2).
        layer: The system calls.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, flags: int, layer: Layer) -> None:
        self._path = path
        self._layer = layer
        self._direct = -1
        self._buffered = layer.open(path, flags | os.O_CLOEXEC, 0o600)

    @property
    def has_direct(self) -> bool:
        """Whether aligned transfers bypass the page cache."""
        return self._direct >= 0

    @property
    def buffered(self) -> int:
        """The descriptor for all but direct transfers.

        Raises:
            OSError: EBADF after `close`.
        """
        if self._buffered < 0:
            raise OSError(errno.EBADF, "closed")
        return self._buffered

    def open_direct(self, flags: int) -> None:
        """Open the file for direct I/O, too; ``flags`` are those of open(2).

        Raises:
            StateFileError: the filesystem refuses it, or the path leads to another file by now.
        """
        try:
            self._direct = self._layer.open(self._path, flags | os.O_DIRECT | os.O_CLOEXEC, 0)
            infos = [self._layer.fstat(fd) for fd in (self._direct, self.buffered)]
        except OSError as error:
            hint = NO_DIRECT if error.errno == errno.EINVAL else "opening it for direct I/O"
            raise StateFileError(self._path, "open", errno=error.errno, hint=hint) from error
        if len({(info.st_dev, info.st_ino) for info in infos}) > 1:
            raise StateFileError(self._path, "open", hint="it was replaced while it was opened")

    def for_transfer(self, address: int, offset: int, nbytes: int) -> int:
        """Return the descriptor for a transfer; an address of 0 is unknown, so not aligned.

        Raises:
            OSError: EBADF after `close`.
        """
        is_aligned = address != 0 and (address | offset | nbytes) % ALIGN_BYTES == 0
        return self._direct if self.has_direct and is_aligned else self.buffered

    def is_direct(self, fd: int) -> bool:
        """Return whether ``fd`` is the one for direct I/O."""
        return self.has_direct and fd == self._direct

    def close(self) -> None:
        """Close both. A second call does nothing.

        Raises:
            OSError: the filesystem reported an error; both are closed all the same.
        """
        fds = [fd for fd in (self._direct, self._buffered) if fd >= 0]
        self._direct = self._buffered = -1
        failed: OSError | None = None
        for fd in fds:
            try:
                self._layer.close(fd)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
