"""What the state store raises when the disk, the directory or the store itself is in trouble.

A user's wrong setting is a `ValueError` instead. These errors travel between ranks (all ranks raise
what one of them met), so each of them survives pickling with its attributes, message and notes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class StateStoreError(RuntimeError):
    """The state store cannot go on; what its files hold is not to be used before a restore.

    Attributes:
        names_ranks: several ranks agreed on it, and its message names those that failed.
    """

    names_ranks = False

    def __reduce__(self) -> tuple[Callable[..., StateStoreError], tuple[Any, ...], dict[str, Any]]:
        # The default would call __init__ with the finished message as its first argument.
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[StateStoreError], args: tuple[Any, ...]) -> StateStoreError:
    return kind.__new__(kind, *args)


class StateFileError(StateStoreError):
    """An operation on one state file failed or moved fewer bytes than it had to.

    Attributes:
        path: The file.
        operation: ``create``, ``open``, ``reserve``, ``read``, ``write``, ``sync``,
            ``drop_page_cache``, ``resident_bytes``, ``close`` or ``remove``.
        offset: Where in the file the operation began, in bytes; None where it has no place.
        expected: Bytes that the operation was to move, reserve or find; None where it moves none.
        actual: Bytes that it did move, reserve or find; None where that is unknown.
        errno: The operating system's error number; None where no system call failed.
    """

    def __init__(
        self,
        path: Path,
        operation: str,
        *,
        offset: int | None = None,
        expected: int | None = None,
        actual: int | None = None,
        errno: int | None = None,
        hint: str = "",
    ) -> None:
        message = f"{path}: {operation} failed"
        if offset is not None:
            message += f" at offset {offset}"
        if expected is not None:
            got = "an unknown number" if actual is None else actual
            message += f": expected {expected} bytes, got {got}"
        super().__init__(_finished(message, errno, hint))
        self.path = path
        self.operation = operation
        self.offset = offset
        self.expected = expected
        self.actual = actual
        self.errno = errno


class DirectoryError(StateStoreError):
    """A directory for state files cannot be made, locked or removed.

    Attributes:
        path: The directory or lock file.
        errno: The operating system's error number; None where no system call failed.
    """

    def __init__(
        self, path: Path, problem: str, *, errno: int | None = None, hint: str = ""
    ) -> None:
        super().__init__(_finished(f"{path}: {problem}", errno, hint))
        self.path = path
        self.errno = errno


def _finished(message: str, errno: int | None, hint: str) -> str:
    if errno is not None:
        message += f": [Errno {errno}] {os.strerror(errno)}"
    return f"{message}; {hint}" if hint else message
