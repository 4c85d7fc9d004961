"""The system calls by which a state file is touched, as a seam for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


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
