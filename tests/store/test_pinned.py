"""Pinned memory is there, zero and aligned, is given back at once, and nothing of a failure stays.

CUDA's part is recorded, emulated in a rank, and real in the tests marked ``gpu``.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store import pinned
from megatron.core.optimizer.nvme_state_store.errors import StateStoreError
from megatron.core.optimizer.nvme_state_store.memory import address_of
from megatron.core.optimizer.nvme_state_store.pinned import PinnedBytes

from tests.rank_pool import RankPool
from tests.store.failing_file import missing_ability

MIB = 1 << 20
_cuda: Any = torch.cuda  # whose stubs leave types out


class Runtime:
    """Records what is registered with CUDA; `refuses` makes it return that error."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0
        if not self.refuses:
            self.registered[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        if not self.refuses:
            del self.registered[address]
        return self.refuses


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def mapped_bytes(address: int) -> int:
    """Return the size of the mapping around an address, 0 if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return stop - start
    return 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, 3 * MIB + 1])
def test_it_is_zero_aligned_and_registered(nbytes: int, runtime: Runtime) -> None:
    memory = PinnedBytes(nbytes)

    assert memory.tensor.dtype == torch.uint8
    assert memory.tensor.shape == (nbytes,)
    assert not memory.tensor.any()
    assert runtime.registered == {memory.tensor.data_ptr(): nbytes}
    memory.release()
    assert not runtime.registered


def test_all_pages_are_there_at_once(runtime: Runtime) -> None:
    """With several threads and pieces: the pages at their borders, too."""
    before = resident_bytes()
    memory = PinnedBytes(3 * pinned._PIECE_BYTES + 5, num_threads=3)
    # Other memory of this process comes and goes.
    assert resident_bytes() - before > 3 * pinned._PIECE_BYTES - 8 * MIB
    memory.release()
    assert resident_bytes() - before < 8 * MIB


def test_views_are_of_the_same_bytes(runtime: Runtime) -> None:
    memory = PinnedBytes(8192)
    memory.tensor[4096:4100] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    view = memory.view(4096, 8192)

    assert bytes(view[:5]) == bytes([1, 2, 3, 4, 0])
    assert address_of(view) == memory.tensor.data_ptr() + 4096
    view[4] = 9
    assert memory.tensor[4100] == 9
    for start, stop in [(-1, 2), (0, 8193), (5, 4)]:
        with pytest.raises(ValueError, match="do not lie within"):
            memory.view(start, stop)


def test_nothing_is_pinned_for_nothing(runtime: Runtime) -> None:
    memory = PinnedBytes(0)

    assert memory.tensor.shape == (0,)
    assert memory.view(0, 0).nbytes == 0
    assert not runtime.registered
    memory.release()
    with pytest.raises(ValueError, match="-1 bytes"):
        PinnedBytes(-1)


def test_released_memory_is_given_back(runtime: Runtime) -> None:
    memory = PinnedBytes(64 * MIB)
    address = memory.tensor.data_ptr()
    assert mapped_bytes(address) >= 64 * MIB
    before = resident_bytes()

    memory.release()
    memory.release()

    assert before - resident_bytes() > 56 * MIB
    assert not runtime.registered
    for use in (lambda: memory.tensor, lambda: memory.view(0, 1)):
        with pytest.raises(StateStoreError, match=r"67108864 bytes .* were released"):
            use()


@pytest.mark.parametrize("kind", ["tensor", "view"])
def test_memory_that_is_still_looked_at_goes_with_the_last_look(
    kind: str, runtime: Runtime
) -> None:
    memory = PinnedBytes(64 * MIB)
    address = memory.tensor.data_ptr()
    look: Any = memory.tensor[MIB:] if kind == "tensor" else memory.view(MIB, 64 * MIB)
    look[0] = 7
    memory.release()

    assert not runtime.registered
    assert look[0] == 7
    assert mapped_bytes(address) >= 64 * MIB
    before = resident_bytes()
    del look
    gc.collect()
    assert before - resident_bytes() > 56 * MIB


def test_what_cuda_refuses_is_not_kept(runtime: Runtime) -> None:
    runtime.refuses = 2
    before = resident_bytes()

    with pytest.raises(StateStoreError, match="cannot pin 67108864 bytes") as caught:
        PinnedBytes(64 * MIB)

    assert "cudaHostRegister returned error 2" in str(caught.value)
    assert "bytes can be had" in str(caught.value)
    # Although the error is still there, with its traceback.
    assert resident_bytes() - before < 8 * MIB


def test_without_cuda_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "cudart", fail)

    with pytest.raises(StateStoreError, match="not compiled with CUDA"):
        PinnedBytes(4096)


def test_more_than_can_be_had_is_warned_of_before_it_is_taken(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Taking it may end with this process being killed, or with a larger virtual machine."""
    monkeypatch.setattr(pinned, "host_memory", lambda: (5 * MIB, 9 * MIB))

    PinnedBytes(5 * MIB).release()
    assert not caplog.records
    PinnedBytes(6 * MIB).release()

    assert "6291456 bytes of host memory" in caplog.text
    assert "5242880 can be had: if this process is killed now" in caplog.text


def test_more_than_there_can_be_is_an_error(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> tuple[int, int]:
        raise OSError("no /proc")

    monkeypatch.setattr(pinned, "host_memory", fail)

    for nbytes in (1 << 62, 1 << 80):
        with pytest.raises(StateStoreError, match="an unknown number of bytes can be had"):
            PinnedBytes(nbytes)
    assert not runtime.registered


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Errors to return for each kind of advice, the last one for ever; 0 does it."""
    errors: dict[int, list[int]] = {}
    real = pinned._advise

    def advise(address: int, nbytes: int, kind: int) -> None:
        left = errors.get(kind, [0])
        number = left.pop(0) if len(left) > 1 else left[0]
        if number:
            raise OSError(number, os.strerror(number))
        real(address, nbytes, kind)

    monkeypatch.setattr(pinned, "_advise", advise)
    return errors


@pytest.mark.parametrize(("huge", "is_said"), [(0, True), (40 * MIB, False), (None, False)])
def test_small_pages_are_said_since_they_make_disks_slow(
    huge: int | None,
    is_said: bool,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pinned, "huge_nbytes", lambda address, nbytes: huge)

    PinnedBytes(64 * MIB).release()
    PinnedBytes(MIB).release()

    said = [text for text in caplog.messages if "in huge pages" in text]
    assert len(said) == int(is_said)
    assert all("only 0 of 67108864 bytes" in text for text in said)


def test_an_old_kernel_touches_the_pages(
    runtime: Runtime, advice: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    advice[pinned._MADV_POPULATE_WRITE] = [errno.EINVAL]
    monkeypatch.setattr(pinned, "prefer_huge_pages", lambda mapped: None)
    before = resident_bytes()
    memory = PinnedBytes(64 * MIB)

    assert resident_bytes() - before > 56 * MIB
    assert not memory.tensor.any()


@pytest.mark.parametrize("kind", [pinned._MADV_POPULATE_WRITE, pinned._MADV_WIPEONFORK])
def test_pages_that_cannot_be_had_are_an_error_and_the_rest_is_given_back(
    kind: int, runtime: Runtime, advice: dict[int, list[int]]
) -> None:
    advice[kind] = [0, errno.ENOMEM] if kind == pinned._MADV_POPULATE_WRITE else [errno.ENOMEM]
    before = resident_bytes()

    with pytest.raises(StateStoreError, match="Cannot allocate memory"):
        PinnedBytes(3 * pinned._PIECE_BYTES)

    assert not runtime.registered
    assert resident_bytes() - before < 8 * MIB


def test_what_cuda_does_not_let_go_stays_mapped(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next memory at this address would be taken for pinned."""
    kept: list[Any] = []
    monkeypatch.setattr(pinned, "_unreleasable", kept)
    memory = PinnedBytes(4096)
    address = memory.tensor.data_ptr()
    runtime.refuses = 700

    with pytest.raises(StateStoreError, match=r"cannot unpin 4096 bytes .* error 700"):
        memory.release()

    assert mapped_bytes(address) >= 4096
    memory.release()
    assert len(kept) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_zeros_and_takes_nothing_from_its_parent(runtime: Runtime) -> None:
    """What the device would copy stays the parent's own, and the child's release does nothing."""
    memory = PinnedBytes(MIB)
    memory.tensor.fill_(7)
    child = os.fork()
    if child == 0:
        try:
            is_zero = not any(memory.view(0, MIB))
            memory.view(0, MIB)[:] = b"x" * MIB
            memory.release()
            os._exit(0 if is_zero and runtime.registered else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert bytes(memory.view(0, MIB)) == b"\x07" * MIB
    memory.release()


def bytes_are_counted_as_pinned() -> None:
    """On the emulated device, whose copies to the host need nothing of it."""
    from tests import emulated_cuda

    before = emulated_cuda.pinned_memory_allocated()
    memory = PinnedBytes(10_000)
    assert emulated_cuda.pinned_memory_allocated() - before == 10_000
    device = torch.arange(0, 100, dtype=torch.uint8, device="cuda")
    memory.tensor[50:150].copy_(device, non_blocking=True)
    assert bytes(memory.view(50, 150)) == bytes(range(100))
    memory.release()
    assert emulated_cuda.pinned_memory_allocated() == before


def test_it_works_on_the_emulated_device(ranks: RankPool) -> None:
    ranks.run(bytes_are_counted_as_pinned)


# On a real device


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        missing_ability("needs a CUDA device")
    return torch.device("cuda")


@pytest.mark.gpu
def test_copies_both_ways_return_before_they_are_done(device: torch.device) -> None:
    """From pageable memory they would not, and the host could do nothing meanwhile."""
    memory = PinnedBytes(64 * MIB)
    there = torch.full((64 * MIB - 100,), 5, dtype=torch.uint8, device=device)
    part = memory.tensor[100:]
    assert part.is_pinned()
    for target, source in ((part, there), (there, part)):
        done = _cuda.Event()
        _cuda._sleep(1_000_000_000)
        target.copy_(source, non_blocking=True)
        done.record()
        assert not done.query()
        done.synchronize()
    assert bytes(memory.view(98, 103)) == b"\x00\x00\x05\x05\x05"
    memory.release()
    assert not part.is_pinned()


@pytest.mark.gpu
def test_a_large_range_is_one_piece(device: torch.device) -> None:
    """Copies may lie anywhere in it."""
    nbytes = 12 << 30
    memory = PinnedBytes(nbytes)
    there = torch.arange(0, 255, dtype=torch.uint8, device=device).repeat(MIB)
    for start in range(0, nbytes - there.numel(), 1_111_111_111):
        memory.tensor[start : start + there.numel()].copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert bytes(memory.view(start + 250, start + 258)) == bytes(
            [250, 251, 252, 253, 254, 0, 1, 2]
        )
    memory.release()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_the_device_and_the_host_share_pages_although_a_child_was_forked(
    device: torch.device,
) -> None:
    """Copy-on-write would leave the device with the old ones."""
    memory = PinnedBytes(16 * MIB)
    memory.tensor.fill_(1)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # lives until the parent has closed its end
        os._exit(0)
    memory.tensor.fill_(2)
    there = memory.tensor.to(device)
    assert bool((there == 2).all())
    memory.tensor.copy_(there.fill_(3))
    assert memory.view(0, 16 * MIB) == b"\x03" * (16 * MIB)
    os.close(write_end)
    os.waitpid(child, 0)
    os.close(read_end)
    memory.release()


def test_what_nobody_released_is_unpinned_before_it_is_unmapped(runtime: Runtime) -> None:
    """Else the driver would still call its address pinned when it is used again."""
    memory = PinnedBytes(MIB)
    assert runtime.registered

    del memory
    gc.collect()

    assert not runtime.registered


def test_forgotten_memory_that_cuda_keeps_stays_mapped(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    memory = PinnedBytes(MIB)
    address = memory.tensor.data_ptr()
    runtime.refuses = 999

    del memory
    gc.collect()

    assert "forgotten pinned memory stays pinned" in caplog.text
    assert mapped_bytes(address) >= MIB
