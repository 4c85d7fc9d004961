"""What the kernel's page cache holds of a file."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

_WINDOW = 1 << 30
"""Bytes that are mapped at once to ask what is cached; a multiple of the page size."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


def resident_bytes(fd: int, nbytes: int) -> int:
    """Return how many of a file's first ``nbytes`` the page cache holds, in whole pages.

    Raises:
        OSError: the kernel does not tell.
    """
    return min(nbytes, sum(_resident_pages(fd, nbytes)) * mmap.PAGESIZE)


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
