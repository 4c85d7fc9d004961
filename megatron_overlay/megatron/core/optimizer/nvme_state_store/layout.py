"""Where every element of the state lies: entries -> buckets -> segments -> byte extents.

Integers only. A rank's main-param shards (*entries*) are laid end to end and cut into *buckets*. A
bucket is one extent of bytes: its main params, then each tensor of the optimizer's state
(*segments*), each starting at a multiple of 4096 bytes, in the format of its kind (`formats`).
Offsets are those in a snapshot; where a bucket lives during a run is another matter (`placement`).
Adam's:

    entries   |---- a ----||-- b --||----------- c -----------|
    buckets   |------- 0 -------||------- 1 -------||--- 2 ---|
    extents   |main 0|exp_avg 0|exp_avg_sq 0|main 1|exp_avg 1|exp_avg_sq 1|main 2| ...

`make_layout` cuts inside an entry, because one embedding can exceed any slot and an elementwise
optimizer does not care. `make_whole_layout` keeps entries whole, for optimizers that look at
matrices; the state of one may have other sizes than its main params (SOAP's factors of an m x n
matrix are m x m and n x n), and a bucket that holds a single large entry exceeds the cap.

Slices start at multiples of ``ALIGN_NUMEL`` elements, in the bucket as well as in their entry, so
that a vectorised kernel sees the same alignment as on a whole shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .formats import FP32, Format

ALIGN_NUMEL = 64
"""Alignment of slices, in elements: 256 bytes of FP32, 128 of BF16."""
ALIGN_BYTES = 4096
"""Alignment of segments in the file: what direct I/O needs on every disk in use."""
MAIN = 0
"""Index of the segment of main params, in every layout."""
MAIN_NAME = "main"
_SEGMENTS_OF_ADAM = 3
"""Main params and two moments: what the cap of a bucket counts as one element."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Part:
    """Elements ``[offset, offset + numel)`` of one segment of a bucket."""

    offset: int
    numel: int


@dataclass(frozen=True)
class Slice:
    """What a bucket holds of an entry: main params from ``start`` on, and the state of these.

    Attributes:
        entry: index of the entry.
        start: its first element here; zero for an entry that is whole.
        parts: where it lies in each segment of the bucket.
    """

    entry: int
    start: int
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Elements of main params."""
        return self.parts[MAIN].numel

    @property
    def offset(self) -> int:
        """Their first element in the segment of main params."""
        return self.parts[MAIN].offset


@dataclass(frozen=True)
class Bucket:
    """The unit that is streamed.

    Attributes:
        index: position in the layout.
        slices: what it holds, in order.
        offset: start of its extent in a snapshot, in bytes.
        numels: elements of each segment, with the padding between slices.
        starts: byte offset of each segment in the extent, and the size of the extent.
    """

    index: int
    slices: tuple[Slice, ...]
    offset: int
    numels: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of main params, with the padding between slices."""
        return self.numels[MAIN]

    @property
    def nbytes(self) -> int:
        """Size of its extent."""
        return self.starts[-1]


@dataclass(frozen=True)
class Layout:
    """All buckets of a store.

    Attributes:
        segments: names: `MAIN_NAME`, then the keys of the optimizer's state.
        formats: how the elements of each are stored.
        buckets: in the order in which a step walks them.
        nbytes: bytes of all buckets; zero if this rank has no part of any param.
        slot_numels: elements of the largest bucket, for each segment: what a slot must hold.
    """

    segments: tuple[str, ...]
    formats: tuple[Format, ...]
    buckets: tuple[Bucket, ...]
    nbytes: int
    slot_numels: tuple[int, ...]

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the largest bucket: what a slot must hold."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)


def make_layout(
    numels: Sequence[int],
    bucket_numel: int,
    state_keys: Sequence[str],
    formats: Sequence[Format] | None = None,
) -> Layout:
    """Lay out entries that may be cut.

    Args:
        numels: elements of each entry; zero is allowed (this rank has no part of a param).
        bucket_numel: cap of a bucket in elements; rounded up to `ALIGN_NUMEL`.
        state_keys: the tensors that the optimizer keeps of each param, each as large as the param.
        formats: how main params and each of these tensors are stored; None: FP32.

    Returns:
        The layout; every element of every entry lies in exactly one slice.

    Raises:
        ValueError: a size is negative, or a name is there twice.
    """
    _require_sizes(bucket_numel, numels)
    count = 1 + len(state_keys)
    cuts = [
        [Slice(entry, start, (Part(offset, numel),) * count) for entry, start, numel, offset in cut]
        for cut in _cut(numels, round_up(bucket_numel, ALIGN_NUMEL))
    ]
    return _assemble(cuts, state_keys, formats)


def make_whole_layout(
    numels: Sequence[Sequence[int]],
    groups: Sequence[int],
    bucket_numel: int,
    state_keys: Sequence[str],
    formats: Sequence[Format] | None = None,
) -> Layout:
    """Lay out entries that stay whole.

    Args:
        numels: of each entry, the elements of its main params and of each tensor of its state.
        groups: param group of each entry, ascending; a bucket never holds entries of two, so that
            ranks whose updates of one group communicate have the same buckets there.
        bucket_numel: cap of a bucket, counted in elements with two moments: all its segments
            together have at most ``3 * bucket_numel`` elements, unless it holds a single entry.
        state_keys: the tensors that the optimizer keeps of each param.
        formats: how main params and each of these tensors are stored; None: FP32.

    Returns:
        The layout; every entry that has elements lies in exactly one slice.

    Raises:
        ValueError: a size is negative, a name is there twice, or a group comes back.
    """
    if list(groups) != sorted(groups):
        raise ValueError(f"groups {groups} must be ascending")
    _require_sizes(bucket_numel, [numel for sizes in numels for numel in sizes])
    runs: list[list[Slice]] = []
    ends = [0] * (1 + len(state_keys))
    group = None
    for entry, sizes in enumerate(numels):
        if not sizes[MAIN]:
            continue
        starts = [round_up(end, ALIGN_NUMEL) for end in ends]
        total = sum(starts) + sum(sizes)
        if group != groups[entry] or total > _SEGMENTS_OF_ADAM * bucket_numel:
            runs.append([])
            group = groups[entry]
            starts = [0] * len(starts)
        parts = tuple(Part(start, numel) for start, numel in zip(starts, sizes, strict=True))
        runs[-1].append(Slice(entry, 0, parts))
        ends = [part.offset + part.numel for part in parts]
    return _assemble(runs, state_keys, formats)


def _require_sizes(bucket_numel: int, numels: Sequence[int]) -> None:
    if bucket_numel < 1 or any(numel < 0 for numel in numels):
        raise ValueError(f"bucket_numel {bucket_numel} and numels must not be negative")


def _cut(numels: Sequence[int], cap: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield (entry, start, numel, offset) of each slice of a bucket of at most ``cap`` elements."""
    slices: list[tuple[int, int, int, int]] = []
    used = 0
    for entry, numel in enumerate(numels):
        start = 0
        while start < numel:
            if cap - used < min(numel - start, ALIGN_NUMEL):
                yield slices
                slices, used = [], 0
            taken = min(numel - start, cap - used)
            slices.append((entry, start, taken, used))
            start += taken
            used = round_up(used + taken, ALIGN_NUMEL)
    if slices:
        yield slices


def _assemble(
    runs: Sequence[Sequence[Slice]], state_keys: Sequence[str], formats: Sequence[Format] | None
) -> Layout:
    """Give each run of slices an extent."""
    segments = (MAIN_NAME, *state_keys)
    formats = (FP32,) * len(segments) if formats is None else tuple(formats)
    if len(formats) != len(segments):
        raise ValueError(f"{len(formats)} formats for {len(segments)} segments")
    if len(set(segments)) != len(segments):
        raise ValueError(f"segments {', '.join(segments)} must have names of their own")
    buckets = []
    offset = 0
    for index, slices in enumerate(runs):
        last = slices[-1].parts
        numels = tuple(part.offset + part.numel for part in last)
        sizes = [
            round_up(each.nbytes(numel), ALIGN_BYTES)
            for each, numel in zip(formats, numels, strict=True)
        ]
        starts = tuple(accumulate(sizes, initial=0))
        buckets.append(Bucket(index, tuple(slices), offset, numels, starts))
        offset += buckets[-1].nbytes
    slot_numels = tuple(
        max((bucket.numels[position] for bucket in buckets), default=0)
        for position in range(len(segments))
    )
    return Layout(segments, formats, tuple(buckets), offset, slot_numels)
