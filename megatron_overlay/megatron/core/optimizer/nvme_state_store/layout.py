"""Where every element of the state lies: entries -> buckets -> segments -> byte extents.

Integers only. A rank's main-param shards (*entries*) are laid end to end and cut into *buckets* of
at most ``bucket_numel`` elements. An entry may be cut, because one embedding can exceed any slot
and an elementwise optimizer does not care. In the file a bucket is one extent: its main params,
then each tensor of the optimizer's state (*segments*: one, two or three of them so far), each
starting at a multiple of 4096 bytes. Adam's:

    entries   |---- a ----||-- b --||----------- c -----------|
    buckets   |------- 0 -------||------- 1 -------||--- 2 ---|
    file      |main 0|exp_avg 0|exp_avg_sq 0|main 1|exp_avg 1|exp_avg_sq 1|main 2| ...

Slices start at multiples of ``ALIGN_NUMEL`` elements, in the bucket as well as in their entry, so
that a vectorised kernel sees the same alignment as on a whole shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGN_NUMEL = 64
"""Alignment of slices, in elements: 256 bytes of FP32, 128 of BF16."""
ALIGN_BYTES = 4096
"""Alignment of segments in the file: what direct I/O needs on every disk in use."""
FLOAT32_BYTES = 4
MAIN = 0
"""Index of the segment of main params, in every layout."""
MAIN_NAME = "main"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slice:
    """Elements ``[start, start + numel)`` of an entry, at ``offset`` (elements) of their bucket."""

    entry: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """The unit that is streamed.

    Attributes:
        index: position in the layout.
        numel: elements, with the padding between slices.
        slices: what it holds, in order.
        offset: start of its extent in the file, in bytes.
        segment_nbytes: bytes from the start of one segment to the next.
        num_segments: as many as the layout has.
    """

    index: int
    numel: int
    slices: tuple[Slice, ...]
    offset: int
    segment_nbytes: int
    num_segments: int

    @property
    def nbytes(self) -> int:
        """Size of its extent in the file."""
        return self.segment_nbytes * self.num_segments


@dataclass(frozen=True)
class Layout:
    """All buckets of a store.

    Attributes:
        segments: names: `MAIN_NAME`, then the keys of the optimizer's state; FP32 each.
        buckets: in the order in which a step walks them.
        nbytes: bytes of all buckets; zero if this rank has no part of any param.
        slot_numel: elements of the largest bucket: what a slot must hold.
    """

    segments: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    nbytes: int
    slot_numel: int

    @property
    def file_nbytes(self) -> int:
        """Size of the file: it has at least one page, since a state file is never empty."""
        return max(self.nbytes, ALIGN_BYTES)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the largest bucket: what a host slot must hold."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)


def _cut(numels: Sequence[int], cap: int) -> Iterator[list[Slice]]:
    """Yield the slices of each bucket of at most ``cap`` elements."""
    slices: list[Slice] = []
    used = 0
    for entry, numel in enumerate(numels):
        start = 0
        while start < numel:
            if cap - used < min(numel - start, ALIGN_NUMEL):
                yield slices
                slices, used = [], 0
            taken = min(numel - start, cap - used)
            slices.append(Slice(entry, start, taken, used))
            start += taken
            used = round_up(used + taken, ALIGN_NUMEL)
    if slices:
        yield slices


def make_layout(numels: Sequence[int], bucket_numel: int, state_keys: Sequence[str]) -> Layout:
    """Lay out entries of the given sizes.

    Args:
        numels: elements of each entry; zero is allowed (this rank has no part of a param).
        bucket_numel: cap of a bucket in elements; rounded up to `ALIGN_NUMEL`.
        state_keys: the tensors that the optimizer keeps of each param, each as large as the param.

    Returns:
        The layout; every element of every entry lies in exactly one slice.

    Raises:
        ValueError: a size is negative, or a name is there twice.
    """
    segments = (MAIN_NAME, *state_keys)
    if len(set(segments)) != len(segments):
        raise ValueError(f"segments {', '.join(segments)} must have names of their own")
    if bucket_numel < 1 or any(numel < 0 for numel in numels):
        raise ValueError(f"bucket_numel {bucket_numel} and numels must not be negative")
    buckets = []
    offset = 0
    for index, slices in enumerate(_cut(numels, round_up(bucket_numel, ALIGN_NUMEL))):
        numel = slices[-1].offset + slices[-1].numel
        segment_nbytes = round_up(numel * FLOAT32_BYTES, ALIGN_BYTES)
        buckets.append(Bucket(index, numel, tuple(slices), offset, segment_nbytes, len(segments)))
        offset += buckets[-1].nbytes
    slot_numel = max((bucket.numel for bucket in buckets), default=0)
    return Layout(segments, tuple(buckets), offset, slot_numel)
