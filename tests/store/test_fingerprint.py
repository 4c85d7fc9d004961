"""A fingerprint changes with every bit, order and place of the shards, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.fingerprint import (
    COPY_BYTES,
    PIECE_BYTES,
    fingerprint,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.store.launches import Launches

SIZES = [1, 3, 5, 2047, 2048, 2049, 8191, 8192, 8193, 10_000]
"""Elements of 2 bytes: with and without a rest of 8 bytes, and of a row of 2048 of those."""


def make(numel: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def is_same(*pairs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    ours, theirs = zip(*pairs, strict=True)
    return bool(torch.equal(fingerprint(ours), fingerprint(theirs)))


class Reductions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how many rows each reduction over another than the last dimension has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.sum.dim_IntList:
            tensor, dims = args[:2]
            self.rows += [tensor.size(d) for d in dims if d % tensor.dim() != tensor.dim() - 1]
        return func(*args, **(kwargs or {}))


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes at each copy how many bytes of earlier ones are still held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[int] = []
        self._copies: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.clone.default:
            return func(*args, **(kwargs or {}))
        held = [size for copy, size in self._copies if not copy.expired()]  # type: ignore[no-untyped-call]
        self.held.append(sum(held))
        copy = func(*args, **(kwargs or {}))
        self._copies.append((StorageWeakRef(copy.untyped_storage()), copy.nbytes))  # type: ignore[no-untyped-call]
        return copy


def test_a_shard_that_begins_anywhere_is_copied_one_part_at_a_time() -> None:
    shard = torch.zeros(3 * COPY_BYTES, dtype=torch.uint8)[1:]
    with Copies() as seen:
        fingerprint([shard])

    assert len(seen.held) >= 3, "or it is not copied in parts"
    assert max(seen.held) < COPY_BYTES


def evenly(numel: int, count: int, gap: int, begin: int = 0) -> list[torch.Tensor]:
    """Return shards that lie in one buffer, as the params of a model do."""
    buffer = make(begin + (numel + gap) * count, seed=numel)
    starts = range(begin, begin + (numel + gap) * count, numel + gap)
    return [buffer[start : start + numel] for start in starts]


@pytest.mark.parametrize("numel", [1, 3, 4, 5, 8192, 8193, 128 * 8192, 200 * 8192 + 7])
@pytest.mark.parametrize("gap", [0, 1, 3, 4, 64])
def test_shards_of_one_buffer_have_the_numbers_that_each_has_alone(numel: int, gap: int) -> None:
    """Whether they are summed at once, or, since they lie otherwise, one by one."""
    shards = evenly(numel, 3, gap)
    other = make(5)
    for chosen in (
        shards,
        shards[::-1],
        [*shards, shards[0]],
        [shards[0], shards[2]],
        [*shards[:2], other, *shards[1:]],
        [shards[0], shards[0], shards[1]],
    ):
        assert is_same(*((each, each.clone()) for each in chosen))


def test_shards_of_one_buffer_are_summed_at_once() -> None:
    """The experts of a layer are hundreds of matrices; each launch costs its time."""
    shards = evenly(3 * 8192, 64, gap=64)
    counts = []
    for chosen in (shards[:1], shards, shards[::-1]):
        with Launches() as seen:
            fingerprint(chosen)
        counts.append(seen.count)

    alone, together, backwards = counts
    assert alone <= together <= alone + 3
    assert backwards <= together + 1


def test_the_numbers_are_those_of_snapshots() -> None:
    """They are saved: `split` main params are refused to other weights."""
    bits = (torch.arange(3_000_000) * 2654435761 % 65536 - 32768).to(torch.int16)
    uneven = [bits[:2_100_003], bits[2_100_003:]]
    even = list(torch.split(bits, 100_000))

    assert fingerprint(uneven).tolist() == [6597498253859121665, 7444515336847365381]
    assert fingerprint(even).tolist() == [-1620183756631901856, -6388790353005891360]


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 6103, 16382, 16384, 20_000])
def test_no_reduction_over_rows_is_large(rows: int) -> None:
    """CUDA would take space for each of its blocks: twice the bytes that are reduced."""
    shard = torch.zeros(rows * 8192, dtype=torch.bfloat16)
    with Reductions() as seen:
        fingerprint([shard])

    assert seen.rows, "or the mode sees nothing"
    assert max(seen.rows) < 256


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0, 1])
def test_temporaries_on_a_device_are_at_most_those_of_a_copy(shift: int) -> None:
    """Of a bucket of the default size."""
    shard = torch.zeros(50_000_000, dtype=torch.bfloat16, device="cuda").view(torch.uint8)[shift:]
    fingerprint([shard])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fingerprint([shard])
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * COPY_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", SIZES)
def test_equal_shards_have_equal_fingerprints(numel: int, dtype: torch.dtype) -> None:
    """Also where they lie in memory does not matter."""
    shard = make(numel, dtype=dtype)
    assert is_same((shard, torch.cat([shard[:3], shard])[min(3, numel) :]))


@pytest.mark.parametrize("shift", range(1, 9))
@pytest.mark.parametrize("nbytes", [3, 40_001, 2 * COPY_BYTES + 20_003])
def test_a_shard_of_bytes_may_begin_anywhere(nbytes: int, shift: int) -> None:
    """Those of quantised params do; eight bytes are read at once, of a copy where need be."""
    shard = make(10_007).view(torch.uint8).repeat(nbytes // 20_014 + 1)[:nbytes]
    moved = torch.cat([shard[:shift], shard])[min(shift, nbytes) :]
    assert moved.data_ptr() % 8 == min(shift, nbytes) % 8
    assert is_same((shard, moved))
    for index in (0, nbytes // 2, nbytes - 1):
        moved[index] ^= 1
        assert not is_same((shard, moved))
        moved[index] ^= 1


@pytest.mark.parametrize("numel", SIZES)
def test_every_bit_of_every_element_matters(numel: int) -> None:
    """One flipped bit anywhere is noticed."""
    shard = make(numel)
    for index in {0, numel // 2, max(numel - 4, 0), numel - 1, min(8191, numel - 1)}:
        for bit in range(16):
            changed = shard.clone()
            changed.view(torch.int16)[index] ^= 1 << bit if bit < 15 else -(1 << 15)
            assert not is_same((shard, changed)), (index, bit)


def swap(left: int, right: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def swapped(shard: torch.Tensor) -> torch.Tensor:
        changed = shard.clone()
        changed[left], changed[right] = shard[right], shard[left]
        return changed

    return swapped


@pytest.mark.parametrize(
    "change",
    [
        swap(0, 1),
        swap(0, 2048),
        swap(0, 4096 + 7),
        swap(5, 9000),
        swap(9000, 9001),
        swap(9000, 9004),
        swap(0, 4),
        swap(0, 8192),
        swap(7, 8192 + 7),
        swap(8191, 16_384 + 8191),
        swap(20_000, 29_999),
        lambda shard: shard.roll(1),
        lambda shard: shard.roll(4),
        lambda shard: shard.roll(2048),
        lambda shard: shard.roll(8192),
        lambda shard: shard.flip(0),
        lambda shard: -shard,
        torch.zeros_like,
    ],
)
def test_moved_elements_are_noticed(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Within 8 bytes, within a row, over rows, and in the incomplete row at the end."""
    shard = make(30_000)
    assert not is_same((shard, change(shard)))


@pytest.mark.parametrize("numel", [2, 3, 8193, 8194, 8195])
def test_moved_elements_of_the_last_bytes_are_noticed(numel: int) -> None:
    """Of less than eight, which are summed by themselves."""
    shard = make(numel)
    for other in range(max(numel - 9, 0), numel - 1):
        assert not is_same((shard, swap(other, numel - 1)(shard)))


def test_what_is_copied_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that begins anywhere may be as large as a bucket."""
    sizes: list[int] = []
    real = torch.Tensor.clone

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    shard = torch.zeros(3 * COPY_BYTES + 2, dtype=torch.uint8)
    fingerprint([shard[:-1]])
    assert max(sizes, default=0) < 100_000, "one that is aligned is summed where it is"
    fingerprint([shard[1:]])
    assert max(sizes) == COPY_BYTES


def test_order_of_the_shards_matters() -> None:
    """Two shards of one size that were exchanged are noticed."""
    first, second = make(3000, 1), make(3000, 2)
    assert not torch.equal(fingerprint([first, second]), fingerprint([second, first]))


def test_negative_zero_differs_from_zero() -> None:
    """Bits are compared, not values: NaNs do not hide anything, either."""
    assert not is_same(
        (torch.zeros(4, dtype=torch.bfloat16), -torch.zeros(4, dtype=torch.bfloat16))
    )
    nans = torch.full((4,), float("nan"), dtype=torch.bfloat16)
    assert is_same((nans, nans.clone()))


def test_no_shards_have_a_fingerprint() -> None:
    """A rank without a part of any param has nothing to compare."""
    assert fingerprint([]).tolist() == [0, 0]


def test_pairs_of_opposite_changes_do_not_cancel() -> None:
    """No structure of the sums makes likely changes collide: one ulp up and one ulp down."""
    shard = make(4096 + 100)
    seen = set()
    for index in range(0, shard.numel(), 3):
        changed = shard.clone()
        changed.view(torch.int16)[index] += 1
        changed.view(torch.int16)[(index * 7 + 11) % shard.numel()] -= 1
        seen.add(tuple(fingerprint([changed]).tolist()))
    assert tuple(fingerprint([shard]).tolist()) not in seen
    assert len(seen) == len(range(0, shard.numel(), 3))


def test_pieces_that_changed_places_are_noticed() -> None:
    """A shard is summed in pieces; exchanging two whole pieces must show."""
    numel = PIECE_BYTES // 2
    shard = make(1005).repeat(2 * numel // 1005 + 1)[: 2 * numel + 5]
    first, second, rest = torch.split(shard, numel)

    exchanged = torch.cat([second, first, rest])

    assert not torch.equal(fingerprint([shard]), fingerprint([exchanged]))
