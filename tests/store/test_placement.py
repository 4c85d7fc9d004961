"""Buckets fill the budgets and no more, evenly over the walk; the rest is striped over disks."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import pytest
from megatron.core.optimizer.nvme_state_store import placement
from megatron.core.optimizer.nvme_state_store.formats import BF16, FP32, SPLIT
from megatron.core.optimizer.nvme_state_store.layout import (
    ALIGN_BYTES,
    Bucket,
    Layout,
    make_layout,
    make_whole_layout,
)
from megatron.core.optimizer.nvme_state_store.placement import Placement, Tier, place_buckets


def equal_buckets(count: int) -> Layout:
    """Return a layout of buckets of one page."""
    return make_layout([1024 * count], 1024, ())


@dataclass
class Case:
    """A layout, budgets, directories, and where the buckets came to be."""

    layout: Layout
    device_budget: int
    host_budget: int
    volumes: int

    def __post_init__(self) -> None:
        self.placement = place_buckets(
            self.layout, self.device_budget, self.host_budget, self.volumes
        )

    def buckets(self, tier: Tier, volume: int = 0) -> list[Bucket]:
        return [
            bucket
            for bucket, place in zip(self.layout.buckets, self.placement.places, strict=True)
            if (place.tier, place.volume) == (tier, volume)
        ]


def random_case(seed: int) -> Case:
    """Return buckets of similar or of very different sizes, and any budgets."""
    chooser = random.Random(seed)
    count = chooser.choice([0, 1, 2, 7, 40])
    if seed % 2:
        formats = chooser.choice([(FP32, FP32, FP32), (SPLIT, BF16, BF16)])
        layout = make_layout([5000] * count, chooser.randrange(1, 9000), ("a", "b"), formats)
    else:
        sizes = [(chooser.randrange(1, 99_000), chooser.randrange(99_000)) for _ in range(count)]
        layout = make_whole_layout(sizes, [0] * count, chooser.randrange(1, 50_000), ("a",))
    budgets = [
        chooser.choice([0, 1, chooser.randrange(layout.nbytes + 1), layout.nbytes, 2**50])
        for _ in range(2)
    ]
    return Case(layout, budgets[0], budgets[1], chooser.randrange(1, 5))


@pytest.fixture(params=range(120))
def case(request: pytest.FixtureRequest) -> Case:
    return random_case(request.param)


def test_budgets_are_never_exceeded(case: Case) -> None:
    """What is said of the sizes of the tiers is the sum of their buckets."""
    placed = case.placement
    assert placed.device_nbytes <= case.device_budget
    assert placed.host_nbytes <= case.host_budget
    sizes = [sum(each.nbytes for each in case.buckets(tier)) for tier in (Tier.DEVICE, Tier.HOST)]
    assert [placed.device_nbytes, placed.host_nbytes] == sizes
    assert placed.volume_nbytes == tuple(
        sum(each.nbytes for each in case.buckets(Tier.DISK, volume))
        for volume in range(case.volumes)
    )
    assert placed.disk_nbytes == case.layout.nbytes - sum(sizes)


def test_every_bucket_has_a_place_of_its_own(case: Case) -> None:
    """Extents of a tier or a directory follow each other: none is lost, none overlaps."""
    assert len(case.placement.places) == len(case.layout.buckets)
    ends: dict[tuple[Tier, int], int] = {}
    for bucket, place in zip(case.layout.buckets, case.placement.places, strict=True):
        assert place.tier is Tier.DISK or place.volume == 0
        assert 0 <= place.volume < case.volumes
        assert place.offset == ends.get((place.tier, place.volume), 0)
        ends[place.tier, place.volume] = place.offset + bucket.nbytes
    found = sorted(index for tier in Tier for index in case.placement.indices(tier))
    assert found == list(range(len(case.layout.buckets)))


def test_places_begin_at_pages(case: Case) -> None:
    """Direct I/O needs it of files, and of the memory of the host tier."""
    assert all(place.offset % ALIGN_BYTES == 0 for place in case.placement.places)


def assert_spread(buckets: list[Bucket], taken: set[int], budget: int) -> None:
    """At each point of the walk the share of the budget so far is used, but for a bucket."""
    total = sum(each.nbytes for each in buckets)
    used = seen = largest = 0
    for bucket in buckets:
        seen += bucket.nbytes
        used += bucket.nbytes if bucket.index in taken else 0
        largest = max(largest, bucket.nbytes)
        share_times_total = min(budget, total) * seen
        assert share_times_total - largest * total <= used * total <= share_times_total


def test_buckets_of_a_tier_are_spread_evenly_over_the_walk(case: Case) -> None:
    """Of the device over all buckets, of the host over those that are left."""
    everything = list(case.layout.buckets)
    on_device = set(case.placement.indices(Tier.DEVICE))
    left = [bucket for bucket in everything if bucket.index not in on_device]
    assert_spread(everything, on_device, case.device_budget)
    assert_spread(left, set(case.placement.indices(Tier.HOST)), case.host_budget)


def test_directories_get_the_same_share_at_each_point_of_the_walk(case: Case) -> None:
    """But for one bucket: all disks work from the first bucket to the last."""
    used = [0] * case.volumes
    for bucket, place in zip(case.layout.buckets, case.placement.places, strict=True):
        if place.tier is Tier.DISK:
            assert used[place.volume] == min(used)
            used[place.volume] += bucket.nbytes
    assert max(used) - min(used) <= case.layout.slot_nbytes


def test_equal_buckets_go_to_the_directories_in_turn() -> None:
    """Also where those of other tiers come between."""
    placed = place_buckets(equal_buckets(9), 0, 3 * ALIGN_BYTES, 2)
    places = [placed.places[index] for index in placed.indices(Tier.DISK)]
    assert [place.volume for place in places] == [0, 1, 0, 1, 0, 1]
    assert [place.offset for place in places] == [0, 0, 4096, 4096, 8192, 8192]


def test_the_picture_of_the_documentation_is_what_happens() -> None:
    """Ten buckets, budgets of two and six."""
    assert placement.__doc__ is not None
    rows = {
        tier: re.search(rf"^    {tier.value} .*$", placement.__doc__, re.MULTILINE) for tier in Tier
    }
    walk = re.search(r"^    walk .*$", placement.__doc__, re.MULTILINE)
    assert walk is not None
    columns = {match.start(): int(match[0]) for match in re.finditer(r"\d", walk[0])}
    placed = place_buckets(equal_buckets(10), 2 * ALIGN_BYTES, 6 * ALIGN_BYTES, 1)
    for tier, row in rows.items():
        assert row is not None
        letter = "D" if tier is Tier.DISK else tier.value[0]
        picture = row[0].split("budgets")[0].ljust(max(columns) + 1)
        drawn = [number for column, number in columns.items() if picture[column] == letter]
        assert drawn == placed.indices(tier)
        assert picture.split() == [tier.value, *letter * len(drawn)]


def test_the_device_comes_before_the_host_and_the_host_before_the_disk() -> None:
    """The faster, the fewer: each tier takes all that its budget allows."""
    layout = equal_buckets(8)
    for device, host, expected in (
        (layout.nbytes, layout.nbytes, (8, 0, 0)),
        (5 * ALIGN_BYTES, layout.nbytes, (5, 3, 0)),
        (0, layout.nbytes - 1, (0, 7, 1)),
        (ALIGN_BYTES - 1, ALIGN_BYTES, (0, 1, 7)),
    ):
        placed = place_buckets(layout, device, host, 1)
        assert tuple(len(placed.indices(tier)) for tier in Tier) == expected


@pytest.mark.parametrize("budgets", [(0, 2**40), (2**40, 0), (4 * ALIGN_BYTES, 4 * ALIGN_BYTES)])
def test_without_a_directory_everything_must_fit_into_memory(budgets: tuple[int, int]) -> None:
    """Then none is needed."""
    placed = place_buckets(equal_buckets(8), *budgets, 0)
    assert placed.indices(Tier.DISK) == []
    assert (placed.volume_nbytes, placed.disk_nbytes) == ((), 0)


def test_a_bucket_without_any_place_is_refused() -> None:
    """Not left out."""
    with pytest.raises(ValueError, match="left for the disk, and there is no directory"):
        place_buckets(equal_buckets(8), 4 * ALIGN_BYTES, 4 * ALIGN_BYTES - 1, 0)


@pytest.mark.parametrize("budgets", [(-1, 0), (0, -1)])
def test_a_negative_budget_is_refused(budgets: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        place_buckets(equal_buckets(1), *budgets, 1)


@pytest.mark.parametrize("volumes", [0, 1, 3])
def test_a_rank_without_buckets_needs_nothing(volumes: int) -> None:
    """It may have no part of any param."""
    placed = place_buckets(make_layout([], 64, ()), 10, 10, volumes)
    assert placed == Placement((), 0, 0, (0,) * volumes)
