"""Which storages live on the emulated device, and how many bytes they hold.

The emulated device (`tests.emulated_cuda`) keeps every tensor in ordinary CPU memory. What makes a
tensor "a CUDA tensor" is that its *storage* is listed here. Identity belongs to the storage and not
to the tensor, so views, `detach()`, `.data = other` and saved autograd tensors need no care: they
share the storage, and with it the place.

[Note: Death of a storage]
A storage's Python object is preserved by torch for as long as the C++ `StorageImpl` lives, also
when only autograd holds it. So the callback of a weak reference to it fires exactly when the memory
is released, and the counters need no sweep. Keys are addresses of `StorageImpl`s; an address can be
used again only after that callback ran.

Counters are exact bytes (`untyped_storage().nbytes()`), not rounded up to blocks as a caching
allocator does, and know nothing of the scratch memory inside a kernel.
"""

from __future__ import annotations

import enum
import threading
import weakref
from dataclasses import dataclass

import torch


class Place(enum.Enum):
    """Where a storage lives.

    HOST is pageable memory and the place of everything that is not registered. FLOATING is a
    storage that torch's C++ code created by itself (a zero gradient, the output of a composite
    function): C++ reads the real device of its inputs, which is always the CPU, so the intended
    place shows only when the storage first meets another one.
    """

    HOST = "host"
    PINNED = "pinned"
    DEVICE = "device"
    FLOATING = "floating"


@dataclass
class Counter:
    """Bytes and number of live storages of one place, with their peaks and running totals."""

    nbytes: int = 0
    peak_nbytes: int = 0
    num_storages: int = 0
    peak_num_storages: int = 0
    total_allocated_nbytes: int = 0
    total_freed_nbytes: int = 0
    total_allocated_storages: int = 0

    def change(self, nbytes: int, num_storages: int = 0) -> None:
        """Add `nbytes` (negative: released) and `num_storages`."""
        self.nbytes += nbytes
        self.num_storages += num_storages
        if num_storages > 0:
            self.total_allocated_storages += num_storages
            if self.num_storages > self.peak_num_storages:
                self.peak_num_storages = self.num_storages
        if nbytes >= 0:
            self.total_allocated_nbytes += nbytes
            if self.nbytes > self.peak_nbytes:
                self.peak_nbytes = self.nbytes
        else:
            self.total_freed_nbytes -= nbytes

    def reset_peak(self) -> None:
        """Forget earlier peaks: from now on the peak starts at what is live."""
        self.peak_nbytes = self.nbytes
        self.peak_num_storages = self.num_storages


@dataclass(slots=True)
class _Entry:
    reference: weakref.ref[torch.UntypedStorage]
    place: Place
    nbytes: int
    counter: Counter | None


class StorageRegistry:
    """Place and size of every storage that is not plain host memory.

    Thread: any. Weak-reference callbacks may run in the middle of any statement of any thread,
    hence the reentrant lock.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.RLock()
        self.counters = {place: Counter() for place in (Place.DEVICE, Place.PINNED)}

    def place_of(self, storage: torch.UntypedStorage) -> Place:
        """Return where `storage` lives."""
        entry = self._entries.get(storage._cdata)
        return Place.HOST if entry is None else entry.place

    def put(self, storage: torch.UntypedStorage, place: Place) -> None:
        """Record that `storage` lives at `place`; moves the bytes if it was elsewhere."""
        key = storage._cdata
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                if entry.place is place:
                    self._resize(entry, storage.nbytes())
                    return
                self._drop(key)
            if place is Place.HOST:
                return
            nbytes = storage.nbytes()
            reference = weakref.ref(storage, lambda _: self._drop(key))
            counter = self.counters.get(place)
            self._entries[key] = _Entry(reference, place, nbytes, counter)
            if counter is not None:
                counter.change(nbytes, 1)

    def update_size(self, storage: torch.UntypedStorage) -> None:
        """Recount `storage` after something may have resized it."""
        entry = self._entries.get(storage._cdata)
        if entry is not None and entry.nbytes != storage.nbytes():
            with self._lock:
                self._resize(self._entries[storage._cdata], storage.nbytes())

    def _resize(self, entry: _Entry, nbytes: int) -> None:
        """Count the new block before the old one goes: torch allocates, copies, then frees."""
        if nbytes != entry.nbytes and entry.counter is not None:
            entry.counter.change(nbytes)
            entry.counter.change(-entry.nbytes)
        entry.nbytes = nbytes

    def _drop(self, key: int) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None and entry.counter is not None:
                entry.counter.change(-entry.nbytes, -1)


REGISTRY = StorageRegistry()

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of `tensor`, or None if it has none of its own.

    Sparse tensors have none, and subclasses that only wrap other tensors (`ShardedTensor`) refuse.
    """
    try:
        if type(tensor) in _PLAIN:
            return tensor.untyped_storage()
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage()
    except NotImplementedError:
        return None


def place_of(tensor: torch.Tensor) -> Place:
    """Return where `tensor` lives; one without a storage counts as host."""
    storage = storage_of(tensor)
    return Place.HOST if storage is None else REGISTRY.place_of(storage)


def pinned_memory_allocated() -> int:
    """Return the bytes of live pinned host storages."""
    return REGISTRY.counters[Place.PINNED].nbytes


def max_pinned_memory_allocated() -> int:
    """Return the most pinned host bytes that were live at once since the last reset."""
    return REGISTRY.counters[Place.PINNED].peak_nbytes


def reset_peak_pinned_memory() -> None:
    """Start a new peak of pinned host bytes at what is live now."""
    REGISTRY.counters[Place.PINNED].reset_peak()
