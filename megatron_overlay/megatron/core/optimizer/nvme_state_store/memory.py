"""Where bytes lie in memory, and memory that begins at a page, as direct I/O needs it."""

from __future__ import annotations

import ctypes
import mmap


def address_of(view: memoryview) -> int:
    """Return where a contiguous view begins; 0 if it is empty or read-only.

    Python tells the address of writable memory alone.
    """
    if view.readonly or not view.nbytes:
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def page_aligned(nbytes: int) -> memoryview:
    """Return new memory of ``nbytes`` > 0 that begins at a page, all zeros.

    It is freed with the last view of it.

    Raises:
        OSError: there is not so much.
    """
    return memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
