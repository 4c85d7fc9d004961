"""Where every element lies: nothing is lost, nothing overlaps, everything is aligned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from megatron.core.optimizer.nvme_state_store.formats import BF16, FORMATS, FP32, SPLIT, Format
from megatron.core.optimizer.nvme_state_store.layout import (
    ALIGN_BYTES,
    ALIGN_NUMEL,
    Bucket,
    Layout,
    make_layout,
    make_whole_layout,
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


def assert_parts_are_apart(bucket: Bucket) -> None:
    """In each segment, parts are aligned, do not overlap, and end where the segment does."""
    for position, numel in enumerate(bucket.numels):
        end = 0
        for part in (piece.parts[position] for piece in bucket.slices):
            assert part.offset >= end
            assert part.offset % ALIGN_NUMEL == 0
            end = part.offset + part.numel
        assert numel == end


def assert_extents_fill_the_snapshot(layout: Layout) -> None:
    """Extents and segments are whole pages, and follow each other to the end of the snapshot."""
    end = 0
    for index, bucket in enumerate(layout.buckets):
        assert bucket.index == index
        assert bucket.offset == end
        assert bucket.starts[0] == 0
        assert bucket.starts[-1] == bucket.nbytes
        for numel, each, (start, stop) in zip(
            bucket.numels, layout.formats, pairwise(bucket.starts), strict=True
        ):
            assert start % ALIGN_BYTES == stop % ALIGN_BYTES == 0
            assert 0 <= stop - start - each.nbytes(numel) < ALIGN_BYTES
        end += bucket.nbytes
    assert layout.nbytes == end


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
        assert_parts_are_apart(bucket)
        for piece in bucket.slices:
            assert piece.start % ALIGN_NUMEL == 0
            assert piece.parts == (piece.parts[0],) * len(layout.segments)


def test_no_bucket_is_above_the_cap(case: tuple[Sequence[int], int, Layout]) -> None:
    """The cap, rounded up to the alignment, holds; a slot holds the largest bucket."""
    _, cap, layout = case
    sizes = [bucket.numel for bucket in layout.buckets]
    assert max(sizes, default=0) <= round_up(cap, ALIGN_NUMEL)
    assert layout.slot_numels == (max(sizes, default=0),) * len(layout.segments)
    assert layout.slot_nbytes == max((bucket.nbytes for bucket in layout.buckets), default=0)


def test_extents_fill_the_snapshot_without_gap(case: tuple[Sequence[int], int, Layout]) -> None:
    """So a bucket is one transfer, and no byte belongs to two."""
    _, _, layout = case
    assert_extents_fill_the_snapshot(layout)


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
    assert layout.formats == (FP32,) * len(layout.segments)
    assert layout.nbytes == (1 + len(keys)) * bare.nbytes
    assert layout.slot_nbytes == (1 + len(keys)) * bare.slot_nbytes
    assert layout.slot_numels == bare.slot_numels * len(layout.segments)
    for bucket, bare_bucket in zip(layout.buckets, bare.buckets, strict=True):
        for piece, bare_piece in zip(bucket.slices, bare_bucket.slices, strict=True):
            assert (piece.entry, piece.start, piece.offset, piece.numel) == (
                bare_piece.entry,
                bare_piece.start,
                bare_piece.offset,
                bare_piece.numel,
            )


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


# ------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize("moment", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("main", [FP32, SPLIT], ids=["fp32", "split"])
@pytest.mark.parametrize("cap", [64, 1024, 10_000])
def test_a_segment_has_the_bytes_of_its_format(cap: int, main: Format, moment: Format) -> None:
    """Where elements lie does not depend on it: only where segments begin does."""
    numels = [100, 5000, 0, 63, 64]
    layout = make_layout(numels, cap, ("a", "b"), (main, moment, FP32))
    exact = make_layout(numels, cap, ("a", "b"))

    assert layout.formats == (main, moment, FP32)
    assert_extents_fill_the_snapshot(layout)
    assert layout.slot_numels == exact.slot_numels
    for bucket, same in zip(layout.buckets, exact.buckets, strict=True):
        assert (bucket.slices, bucket.numels) == (same.slices, same.numels)


def test_smaller_formats_make_smaller_extents() -> None:
    """What all this is for: the bytes that a step moves."""
    numel = 64 * ALIGN_BYTES
    fp8 = FORMATS["fp8e4m3"], FORMATS["fp8e4m3-sqrt"]
    sizes = [
        make_layout([numel], numel, STATES[2], formats).nbytes
        for formats in (None, (FP32, BF16, BF16), (SPLIT, BF16, BF16), (SPLIT, *fp8))
    ]

    assert sizes[:2] == [12 * numel, 8 * numel]
    assert sizes[2] == (6 + 1 / 8) * numel
    assert sizes[3] == (4 + 1 / 8 + 2 * 2 / 64) * numel


def test_a_slot_is_as_large_as_the_largest_extent_of_its_formats() -> None:
    """The largest bucket in bytes need not be the one with the most main params."""
    layout = make_whole_layout(
        [(6400, 64), (640, 64_000)], [0, 1], 10**6, ("L",), (SPLIT, FORMATS["fp8e5m2"])
    )

    assert [bucket.nbytes for bucket in layout.buckets] == [20_480, 73_728]
    assert layout.slot_nbytes == 73_728
    assert_extents_fill_the_snapshot(layout)


@pytest.mark.parametrize("formats", [(), (FP32,), (FP32,) * 3])
def test_each_segment_must_have_a_format(formats: tuple[Format, ...]) -> None:
    """One too few would leave a segment without bytes."""
    with pytest.raises(ValueError, match=f"{len(formats)} formats for 2 segments"):
        make_layout([1], 64, ("a",), formats)
    with pytest.raises(ValueError, match=f"{len(formats)} formats for 2 segments"):
        make_whole_layout([(1, 1)], [0], 64, ("a",), formats)


# ------------------------------------------------------------------------------------ whole entries

SOAP = ("exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R")
Sizes = Sequence[int]
"""Elements of an entry's main params and of each tensor of its state."""


def soap_sizes(rows: int, columns: int) -> Sizes:
    """Return what SOAP keeps of a matrix: two moments, two factors and their eigenbases."""
    factors = (rows * rows, columns * columns)
    return (*(rows * columns,) * 3, *factors, *factors)


def random_sizes(chooser: random.Random) -> Sizes:
    """Return the sizes of a matrix, wide, tall or without elements on this rank."""
    rows = chooser.choice([0, 1, 3, 8, chooser.randrange(1, 50)])
    return soap_sizes(rows, chooser.choice([1, 8, 64, chooser.randrange(1, 50)]))


def random_groups(chooser: random.Random) -> list[list[Sizes]]:
    """Return the entries of four param groups; some have none, or none with elements."""
    return [[random_sizes(chooser) for _ in range(chooser.randrange(9))] for _ in range(4)]


def laid_out(groups: Sequence[Sequence[Sizes]], cap: int) -> Layout:
    """Lay out the entries of param groups, one group after the other."""
    return make_whole_layout(
        [sizes for entries in groups for sizes in entries],
        [group for group, entries in enumerate(groups) for _ in entries],
        cap,
        SOAP,
    )


Whole = tuple[list[Sizes], list[int], int, Layout]
"""Sizes and group of each entry, the cap, and their layout."""


@pytest.fixture(params=range(40))
def whole(request: pytest.FixtureRequest) -> Whole:
    chooser = random.Random(request.param)
    groups = random_groups(chooser)
    cap = chooser.choice([1, 64, chooser.randrange(1, 20_000)])
    numels = [sizes for entries in groups for sizes in entries]
    group_of = [group for group, entries in enumerate(groups) for _ in entries]
    return numels, group_of, cap, laid_out(groups, cap)


def test_every_entry_with_elements_lies_whole_in_one_bucket(whole: Whole) -> None:
    """In order, each tensor of its state at its own size; one without elements lies nowhere."""
    numels, _, _, layout = whole
    slices = [piece for bucket in layout.buckets for piece in bucket.slices]

    assert [piece.entry for piece in slices] == [i for i, sizes in enumerate(numels) if sizes[0]]
    for piece in slices:
        assert piece.start == 0
        assert tuple(part.numel for part in piece.parts) == numels[piece.entry]
    assert all(bucket.slices for bucket in layout.buckets)


def test_segments_of_whole_entries_have_their_own_alignment(whole: Whole) -> None:
    """A factor starts where a kernel likes it, whatever the sizes of the others are."""
    *_, layout = whole
    for bucket in layout.buckets:
        assert_parts_are_apart(bucket)
    assert_extents_fill_the_snapshot(layout)


def test_a_slot_has_room_for_each_segment_of_every_bucket(whole: Whole) -> None:
    """And for no more than the largest, which may be another bucket for each segment."""
    *_, layout = whole
    for position, numel in enumerate(layout.slot_numels):
        assert numel == max((bucket.numels[position] for bucket in layout.buckets), default=0)


def test_all_segments_of_a_bucket_are_under_the_cap_together(whole: Whole) -> None:
    """Three times the cap, as of Adam; only an entry that is alone may be larger."""
    _, _, cap, layout = whole
    for bucket in layout.buckets:
        assert sum(bucket.numels) <= 3 * cap or len(bucket.slices) == 1


def test_a_bucket_ends_where_the_next_entry_has_no_room_or_another_group(whole: Whole) -> None:
    """Else a step would make more transfers than it must."""
    numels, groups, cap, layout = whole
    for bucket, following in pairwise(layout.buckets):
        first = following.slices[0].entry
        starts = [round_up(numel, ALIGN_NUMEL) for numel in bucket.numels]
        has_room = sum(starts) + sum(numels[first]) <= 3 * cap
        assert not has_room or groups[first] != groups[bucket.slices[0].entry]


def test_a_bucket_never_holds_entries_of_two_groups(whole: Whole) -> None:
    _, groups, _, layout = whole
    for bucket in layout.buckets:
        assert len({groups[piece.entry] for piece in bucket.slices}) == 1


def shape_of_group(layout: Layout, groups: Sequence[Sequence[Sizes]], group: int) -> list[object]:
    """Return what peers must agree on: the entries of each bucket, by place in their group."""
    first = sum(len(entries) for entries in groups[:group])
    places = range(first, first + len(groups[group]))
    return [
        (
            [(piece.entry - first, piece.parts) for piece in bucket.slices],
            bucket.numels,
            bucket.starts,
        )
        for bucket in layout.buckets
        if bucket.slices[0].entry in places
    ]


@pytest.mark.parametrize("shared", range(4))
@pytest.mark.parametrize("seed", range(20))
def test_peers_of_one_group_have_the_same_buckets_of_it(seed: int, shared: int) -> None:
    """Whatever else they have: others may be of ranks that this one never meets, or nothing."""
    chooser = random.Random(100 + seed)
    cap = chooser.randrange(100, 8000)
    entries = [soap_sizes(chooser.randrange(1, 40), chooser.randrange(1, 40)) for _ in range(12)]
    neighbours = [random_groups(chooser) for _ in range(4)]
    neighbours.append([[], [], [], []])
    neighbours.append([[soap_sizes(0, 8)] * 3 for _ in range(4)])
    found = []
    for groups in neighbours:
        groups[shared] = entries
        found.append(shape_of_group(laid_out(groups, cap), groups, shared))

    assert len(found[0]) > 1
    assert all(each == found[0] for each in found)


def test_a_large_entry_is_alone_and_those_beside_it_are_not_with_it() -> None:
    """An embedding may exceed any cap."""
    small, large = soap_sizes(4, 4), soap_sizes(100, 4)
    layout = laid_out([[small, small, large, small, small]], 300)

    held = [[piece.entry for piece in bucket.slices] for bucket in layout.buckets]
    assert held == [[0, 1], [2], [3, 4]]


def test_state_smaller_than_its_params_takes_less_room() -> None:
    """Muon's second moment may be a row, a column or a number."""
    layout = make_whole_layout([(5000, 5000, 100), (5000, 5000, 1)], [0, 0], 10**6, ("a", "b"))

    assert layout.slot_numels == (round_up(5000, ALIGN_NUMEL) + 5000,) * 2 + (129,)


@pytest.mark.parametrize("groups", [[], [[], []], [[soap_sizes(0, 8)], [soap_sizes(0, 3)]]])
def test_without_elements_there_is_no_bucket(groups: list[list[Sizes]]) -> None:
    """R of a matrix without rows has elements, and is not kept either."""
    layout = laid_out(groups, 100)
    assert (layout.buckets, layout.nbytes, layout.slot_nbytes) == ((), 0, 0)
    assert layout.slot_numels == (0,) * 7


@pytest.mark.parametrize(
    ("sizes", "cap", "keys", "tells"),
    [
        ((8, 8), 0, ("a",), "must not be negative"),
        ((-1, 8), 64, ("a",), "must not be negative"),
        ((8, -1), 64, ("a",), "must not be negative"),
        ((8, 8), 64, ("main",), "names of their own"),
        ((8, 8, 8), 64, ("a", "a"), "names of their own"),
        ((8, 8, 8), 64, ("a",), "longer"),
        ((8, 8), 64, ("a", "b"), "shorter"),
    ],
)
def test_wrong_arguments_of_whole_entries_are_refused(
    sizes: Sizes, cap: int, keys: tuple[str, ...], tells: str
) -> None:
    """Negative sizes, a name twice, or another number of sizes than of tensors."""
    with pytest.raises(ValueError, match=tells):
        make_whole_layout([sizes], [0], cap, keys)


def test_param_groups_must_ascend() -> None:
    """Else peers of one group could have other buckets of it."""
    with pytest.raises(ValueError, match="must be ascending"):
        make_whole_layout([(8,), (8,), (8,)], [0, 1, 0], 64, ())
