"""Between the stored bytes of a resident bucket and the FP32 tensors that are updated.

Casts happen on the device, in order of the caller's stream, and never cross the bus: what travels
is what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .encoding import decode, encode, join_main, split_main, split_parts, upper_halves
from .formats import FP32, SPLIT, is_dithered
from .layout import MAIN, Bucket, Layout
from .model_shards import Entry
from .staging import ResidentBucket


class Casts:
    """The formats of a layout, and the model's shards, in which ``split`` main params have a half.

    Args:
        layout: the formats of its segments.
        entries: whose model shards the main params were published to.
    """

    def __init__(self, layout: Layout, entries: Sequence[Entry]) -> None:
        self._formats = layout.formats
        self._is_dithered = [is_dithered(name) for name in layout.segments]
        self._entries = entries

    @property
    def is_split(self) -> bool:
        """Whether main params are stored without what the model's shards have."""
        return self._formats[MAIN] == SPLIT

    def decode(self, bucket: Bucket, resident: ResidentBucket) -> None:
        """Make the FP32 segments of a bucket, before its update."""
        self.decode_main(bucket, resident)
        for index in range(MAIN + 1, len(self._formats)):
            if self._formats[index] != FP32:
                stored = self._stored(bucket, resident, index)
                decode(self._formats[index], stored, resident.segment(bucket, index))

    def decode_main(self, bucket: Bucket, resident: ResidentBucket) -> None:
        """Make the main params of a bucket alone; the model's shards are those last published."""
        if not self.is_split:
            return
        upper = upper_halves(resident.segment(bucket, MAIN))
        targets, sources = [], []
        for piece in bucket.slices:
            shard = self._entries[piece.entry].shard()
            targets.append(upper[piece.offset : piece.offset + piece.numel])
            sources.append(shard[piece.start : piece.start + piece.numel].view(torch.int16))
        # Their own halves are then joined in place: one pass more, for far fewer launches.
        torch._foreach_copy_(targets, sources)
        for main, low, ties in self._runs(bucket, resident):
            join_main(upper_halves(main), low, ties, main)

    def encode(self, bucket: Bucket, resident: ResidentBucket, step: int) -> None:
        """Make the stored bytes of a bucket, when its main params have been published.

        Args:
            bucket: which one.
            resident: where it is.
            step: the optimizer steps before this one. Another step has another noise.
        """
        self.encode_main(bucket, resident)
        for index in range(MAIN + 1, len(self._formats)):
            if self._formats[index] != FP32:
                stored = self._stored(bucket, resident, index)
                seed = _seed(step, bucket, index) if self._is_dithered[index] else None
                encode(self._formats[index], resident.segment(bucket, index), stored, seed)

    def encode_main(self, bucket: Bucket, resident: ResidentBucket) -> None:
        """Make the stored bytes of its main params alone."""
        if self.is_split:
            for main, low, ties in self._runs(bucket, resident):
                split_main(main, low, ties)

    def _stored(self, bucket: Bucket, resident: ResidentBucket, index: int) -> torch.Tensor:
        nbytes = self._formats[index].nbytes(bucket.numels[index])
        return resident.stored_segment(bucket, index)[:nbytes]

    def _runs(
        self, bucket: Bucket, resident: ResidentBucket
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield main params, low halves and bits of slices that follow each other without a gap.

        What a bucket has of a mixture of experts are many small slices, and what each of them alone
        would need are kernel launches. Between two runs is padding, whose bytes stay as they are.
        """
        main = resident.segment(bucket, MAIN)
        low, ties = split_parts(self._stored(bucket, resident, MAIN), bucket.numel)
        ends = [piece.offset + piece.numel for piece in bucket.slices]
        starts = [piece.offset for piece in bucket.slices]
        breaks = [index for index in range(1, len(starts)) if starts[index] != ends[index - 1]]
        for first, last in zip([0, *breaks], [*breaks, len(starts)], strict=True):
            # Slices begin at multiples of 64: their bits begin with a byte.
            start, stop = starts[first], ends[last - 1]
            yield main[start:stop], low[start:stop], ties[start // 8 : -(-stop // 8)]


def _seed(step: int, bucket: Bucket, index: int) -> int:
    """Return a number that no other step, bucket or segment of a store has."""
    return (step << 64) + (bucket.index << 16) + index
