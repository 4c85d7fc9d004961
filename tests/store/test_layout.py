"""Where every element lies: nothing is lost, nothing overlaps, everything is aligned."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from megatron.core.optimizer.nvme_state_store.layout import (
    ALIGN_BYTES,
    ALIGN_NUMEL,
    FLOAT32_BYTES,
    Layout,
    make_layout,
    round_up,
)

STATES = ((), ("exp_avg",), ("exp_avg", "exp_avg_sq"))
"""Keys of SGD without momentum, Lion and Adam."""
CASES: list[tuple[Sequence[int], int]] = [
    ([], 100),
    ([0], 100),
    ([0, 0, 5, 0], 100),
    ([1], 1),
    ([64, 64, 64], 64),
    ([64, 64, 64], 128),
    ([63, 1, 65], 64),
    ([1000], 64),
    ([1000], 65),
    ([10, 1000, 10], 128),
    ([128, 127, 129], 256),
    ([5000], 10**9),
]
GENERATOR = random.Random(5)
CASES += [
    (
        [GENERATOR.choice([0, 1, 63, 64, 65, GENERATOR.randrange(3000)]) for _ in range(20)],
        GENERATOR.randrange(1, 1500),
    )
    for _ in range(50)
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[Sequence[int], int, Layout]:
    numels, cap = request.param
    return numels, cap, make_layout(numels, cap, STATES[len(numels) % 3])


def test_every_element_lies_in_exactly_one_slice(case: tuple[Sequence[int], int, Layout]) -> None:
    """The slices of an entry follow each other from its first element to its last."""
    numels, _, layout = case
    reached = [0] * len(numels)
    for bucket in layout.buckets:
        assert bucket.slices
        for piece in bucket.slices:
            assert piece.numel > 0
            assert piece.start == reached[piece.entry]
            reached[piece.entry] += piece.numel
    assert reached == list(numels)


def test_slices_of_a_bucket_are_aligned_and_do_not_overlap(
    case: tuple[Sequence[int], int, Layout],
) -> None:
    """A slice starts at a multiple of 64 elements, in its bucket and in its entry."""
    _, _, layout = case
    for bucket in layout.buckets:
        end = 0
        for piece in bucket.slices:
            assert piece.offset >= end
            assert piece.offset % ALIGN_NUMEL == piece.start % ALIGN_NUMEL == 0
            end = piece.offset + piece.numel
        assert bucket.numel == end


def test_no_bucket_is_above_the_cap(case: tuple[Sequence[int], int, Layout]) -> None:
    """The cap, rounded up to the alignment, holds; a slot holds the largest bucket."""
    _, cap, layout = case
    sizes = [bucket.numel for bucket in layout.buckets]
    assert max(sizes, default=0) <= round_up(cap, ALIGN_NUMEL)
    assert layout.slot_numel == max(sizes, default=0)
    assert layout.slot_nbytes == max((bucket.nbytes for bucket in layout.buckets), default=0)


def test_extents_fill_the_file_without_gap(case: tuple[Sequence[int], int, Layout]) -> None:
    """Extents and segments start at pages and follow each other to the end of the file."""
    _, _, layout = case
    end = 0
    for index, bucket in enumerate(layout.buckets):
        assert bucket.index == index
        assert bucket.offset == end
        assert bucket.segment_nbytes % ALIGN_BYTES == 0
        assert bucket.segment_nbytes >= bucket.numel * FLOAT32_BYTES
        end += bucket.segment_nbytes * len(layout.segments)
    assert layout.nbytes == end
    assert layout.file_nbytes == max(end, ALIGN_BYTES)


def test_an_entry_that_fits_one_bucket_is_cut_only_at_its_border() -> None:
    """Buckets are filled: only the last one may have room left."""
    layout = make_layout([100, 300, 50, 700], 256, ())

    used = [round_up(bucket.numel, ALIGN_NUMEL) for bucket in layout.buckets]
    assert used[:-1] == [256] * (len(used) - 1)


def test_same_sizes_give_the_same_layout() -> None:
    """A checkpoint's layout can be compared with this run's."""
    assert make_layout([100, 300], 256, ["a"]) == make_layout([100, 300], 256, ["a"])


@pytest.mark.parametrize("keys", STATES, ids=len)
def test_a_bucket_has_the_main_params_and_each_state_tensor(keys: tuple[str, ...]) -> None:
    """One, two or three segments; nothing else of the layout depends on them."""
    layout = make_layout([100, 5000], 1024, keys)
    bare = make_layout([100, 5000], 1024, ())

    assert layout.segments == ("main", *keys)
    assert layout.nbytes == (1 + len(keys)) * bare.nbytes
    assert layout.slot_nbytes == (1 + len(keys)) * bare.slot_nbytes
    assert layout.slot_numel == bare.slot_numel
    assert [b.slices for b in layout.buckets] == [b.slices for b in bare.buckets]


@pytest.mark.parametrize("keys", [("main",), ("exp_avg", "exp_avg")])
def test_a_name_is_that_of_one_segment(keys: tuple[str, ...]) -> None:
    """Else one would hide the other."""
    with pytest.raises(ValueError, match="names of their own"):
        make_layout([1], 64, keys)


@pytest.mark.parametrize(("numels", "cap"), [([1], 0), ([1], -5), ([-1], 10)])
def test_negative_sizes_are_refused(numels: list[int], cap: int) -> None:
    """A wrong argument does not become a wrong layout."""
    with pytest.raises(ValueError, match="must not be negative"):
        make_layout(numels, cap, ())
