"""Page-aligned host memory that the device copies to and from by itself, given back at once.

Not `pin_memory=True`: torch's caching host allocator rounds sizes up to powers of two (a slot of
2.1 GB takes 4.3) and never gives memory back to the system; and it faults pages in one by one.
Here the pages are faulted in by several threads, and then registered with CUDA as they are.

The range is registered in one piece, since a copy may lie anywhere in it, and a copy across the
border of two registered pieces is an invalid argument to CUDA.

[Note: Fork]
A fork would make the parent's pages copy-on-write: the parent's next write goes to a new page,
while the device still copies from and to the old one. So children get the range without its pages
(MADV_WIPEONFORK): they read zeros there, the parent keeps its pages, and a fork does not copy the
tables of pages. Not MADV_DONTFORK: the child's copy of the mapping object, when it is collected,
would unmap whatever the child has put at that address by then.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from .budgets import host_memory
from .errors import StateStoreError
from .layout import round_up
from .memory import huge_nbytes, prefer_huge_pages

logger = logging.getLogger(__name__)

DEFAULT_NUM_THREADS = 8
_PIECE_BYTES = 64 << 20
"""What one call faults in; a multiple of any page size."""
_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PinnedBytes:
    """A range of pinned host memory; zeros at first.

    Blocks until all pages are there and registered.

    Args:
        nbytes: Its size; may be 0, then nothing is pinned.
        num_threads: Fault pages in at the same time.

    Attributes:
        nbytes: Its size.

    Raises:
        StateStoreError: the memory is not there, or CUDA refuses it; nothing is kept. (CUDA may
            tell its refusal a second time, from the next kernel that is checked.)
        ValueError: ``nbytes`` is negative.
    """

    def __init__(self, nbytes: int, num_threads: int = DEFAULT_NUM_THREADS) -> None:
        if nbytes < 0:
            raise ValueError(f"cannot pin {nbytes} bytes")
        self.nbytes = nbytes
        self._pid = os.getpid()
        self._address = 0
        self._map: mmap.mmap | None = None
        self._tensor: torch.Tensor | None = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            self._map = _mapped(nbytes, num_threads)
            self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
            address = self._tensor.data_ptr()
            try:
                _call("cudaHostRegister", address, nbytes, 0)
            except BaseException as error:
                # The traceback keeps this object; it must not keep the memory.
                self._tensor = self._map = None
                if not isinstance(error, Exception):
                    raise
                raise _error(nbytes, "pin", error) from error
            self._address = address
            forgotten = weakref.finalize(self, _unpin_forgotten, self._map, address, self._pid)
            forgotten.atexit = False  # the driver may be gone by then
            self._forgotten = forgotten

    @property
    def tensor(self) -> torch.Tensor:
        """All of it, uint8, shape (nbytes,).

        Raises:
            StateStoreError: it was released.
        """
        if self._tensor is None:
            raise StateStoreError(f"{self.nbytes} bytes of pinned memory were released")
        return self._tensor

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``, for the disk.

        Raises:
            ValueError: they do not lie within.
            StateStoreError: it was released.
        """
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"bytes {start} to {stop} do not lie within {self.nbytes}")
        return memoryview(self.tensor.numpy())[start:stop]

    def release(self) -> None:
        """Unpin and give the memory back. A second call does nothing, nor does a forked child's.

        No copy may be under way, on the device or by an I/O engine. Tensors and views of it that
        still exist stay valid, though unpinned: the memory goes with the last of them.

        Raises:
            StateStoreError: CUDA refuses; the memory stays pinned until the process ends.
        """
        address, self._address = self._address, 0
        if not address or os.getpid() != self._pid:
            return
        self._forgotten.detach()
        try:
            _call("cudaHostUnregister", address)
        except Exception as error:
            # Never unmapped: the driver would still know the address as pinned when it is reused.
            _unreleasable.append(self._map)
            raise _error(self.nbytes, "unpin", error) from error
        finally:
            # Not closed: that raises while there are views of it, and goes by itself without any.
            self._tensor = self._map = None


_unreleasable: list[mmap.mmap | None] = []


def _unpin_forgotten(mapped: mmap.mmap, address: int, pid: int) -> None:
    """Unpin what nobody released, before it is unmapped and its address used again."""
    if os.getpid() != pid:
        return
    try:
        _call("cudaHostUnregister", address)
    except Exception as error:
        _unreleasable.append(mapped)
        logger.warning("forgotten pinned memory stays pinned: %s", error)


def _mapped(nbytes: int, num_threads: int) -> mmap.mmap:
    """Return private memory of ``nbytes``, rounded up to pages, that is really there."""
    free = _free_bytes()
    if free is not None and nbytes > free:
        # No error: some virtual machines get more memory only once it is used.
        logger.warning(
            "pinning %d bytes of host memory for optimizer state, although %d can be had: if this "
            "process is killed now, use smaller buckets or a smaller host tier",
            nbytes,
            free,
        )
    try:
        mapped = mmap.mmap(-1, round_up(nbytes, mmap.PAGESIZE), mmap.MAP_PRIVATE)
    except (OSError, ValueError, OverflowError) as error:
        raise _error(nbytes, "have", error) from error
    try:
        _fault_in(mapped, num_threads)
    except BaseException as error:
        mapped.close()
        if not isinstance(error, OSError):
            raise
        raise _error(nbytes, "have", error) from error
    return mapped


def _fault_in(mapped: mmap.mmap, num_threads: int) -> None:
    address, nbytes = ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped)
    _advise(address, nbytes, _MADV_WIPEONFORK)
    prefer_huge_pages(mapped)
    with ThreadPoolExecutor(num_threads, "nvme-state-store-pin") as pool:
        pieces = [
            pool.submit(_fault_in_piece, address + start, min(_PIECE_BYTES, nbytes - start))
            for start in range(0, nbytes, _PIECE_BYTES)
        ]
    for piece in pieces:
        piece.result()
    huge = huge_nbytes(address, nbytes) if nbytes >= _PIECE_BYTES else None
    if huge is not None and huge < nbytes // 2:
        logger.warning(
            "only %d of %d bytes of pinned host memory are in huge pages: direct I/O may take "
            "several times as long; see /sys/kernel/mm/transparent_hugepage/enabled, which must be "
            "madvise or always",
            huge,
            nbytes,
        )


def _advise(address: int, nbytes: int, advice: int) -> None:
    if _LIBC.madvise(address, nbytes, advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _fault_in_piece(address: int, nbytes: int) -> None:
    try:
        _advise(address, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel that does not know it
            raise
        ctypes.memset(address, 0, nbytes)  # releases the GIL, too


def _call(function: str, *arguments: int) -> None:
    """Call a function of the CUDA runtime; an error is a RuntimeError."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = int(getattr(runtime, function)(*arguments))
    if result != 0:
        raise RuntimeError(f"{function} returned error {result}")


def _free_bytes() -> int | None:
    try:
        return host_memory()[0]
    except (OSError, KeyError, ValueError):
        return None  # this is for messages alone


def _error(nbytes: int, what: str, error: BaseException) -> StateStoreError:
    free = _free_bytes()
    return StateStoreError(
        f"cannot {what} {nbytes} bytes of host memory for optimizer state: {error} "
        f"({'an unknown number of' if free is None else free} bytes can be had); use smaller "
        "buckets or a smaller host tier"
    )
