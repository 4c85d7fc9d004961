"""A fingerprint changes with every bit, order and place of the shards, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.fingerprint import PIECE_NUMEL, fingerprint

SIZES = [1, 5, 2047, 2048, 2049, 10_000]


def make(numel: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def is_same(*pairs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    ours, theirs = zip(*pairs, strict=True)
    return bool(torch.equal(fingerprint(ours), fingerprint(theirs)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", SIZES)
def test_equal_shards_have_equal_fingerprints(numel: int, dtype: torch.dtype) -> None:
    """Also where they lie in memory does not matter."""
    shard = make(numel, dtype=dtype)
    assert is_same((shard, torch.cat([shard[:3], shard])[min(3, numel) :]))


@pytest.mark.parametrize("numel", SIZES)
def test_every_bit_of_every_element_matters(numel: int) -> None:
    """One flipped bit anywhere is noticed."""
    shard = make(numel)
    for index in {0, numel // 2, numel - 1, min(2047, numel - 1), min(2048, numel - 1)}:
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
        lambda shard: shard.roll(1),
        lambda shard: shard.roll(2048),
        lambda shard: shard.flip(0),
        lambda shard: -shard,
        torch.zeros_like,
    ],
)
def test_moved_elements_are_noticed(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Within a row, over rows, and in the incomplete row at the end."""
    shard = make(10_000)
    assert not is_same((shard, change(shard)))


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
    shard = torch.randn(2 * PIECE_NUMEL + 5).to(torch.bfloat16)
    first, second, rest = torch.split(shard, PIECE_NUMEL)

    exchanged = torch.cat([second, first, rest])

    assert not torch.equal(fingerprint([shard]), fingerprint([exchanged]))
