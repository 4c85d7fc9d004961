"""A fingerprint of 16-bit shards: has anybody changed the weights behind the store's back?

The store's main params are right only while ``bf16(main) == model shard`` holds (invariant 1). A
load path that replaced the weights and forgot to refresh the main params would be undone by the
next step, silently. So the store remembers a fingerprint of what it published and compares.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

_LANE_BYTES = 8
_ROW_BYTES = 2048 * _LANE_BYTES
PIECE_BYTES = 16384 * _ROW_BYTES
"""Bytes that are summed at once, as a table of lanes."""
_FEW_ROWS = 128
"""Of the 16384 rows of a piece, so that as many groups of them are few, too."""
COPY_BYTES = 2048 * _ROW_BYTES
"""Bytes of it that are copied at once, if it does not begin at a multiple of 8."""


def fingerprint(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return two int64 numbers that depend on every bit of the shards and on its position.

    Bytes are summed eight at a time, as they lie: CUDA's reductions widen smaller integers first,
    which takes twelve bytes of temporaries for two. Sums wrap around, and integer sums do not
    depend on their order: the result is the same on every run. Rows and columns are weighted, so
    that moved elements are noticed, too. Temporaries are at most `COPY_BYTES` (34 MB).

    Kernel launches limit it, some 15 for a shard of any size. So shards that follow each other and
    lie evenly in one buffer, as the matrices of a layer's experts do, are summed at once, to the
    same numbers.

    Args:
        shards: flat contiguous tensors of a 16-bit dtype, or of bytes, on one device.

    Returns:
        Tensor of shape (2,), int64, on the shards' device; zeros if there are none.
    """
    total: torch.Tensor | None = None
    position = 0
    for table, is_backwards in _tables([each.detach().view(torch.uint8) for each in shards]):
        pieces = torch.split(table, PIECE_BYTES, dim=1)
        mixed = [numbers for piece in pieces for numbers in _mix(piece)]
        count = table.size(0)
        for index, numbers in enumerate(mixed):
            first, step = 2 * (position + index) + 3, 2 * len(mixed)
            if count == 1:
                weighted = numbers[:, 0] * first
            else:
                weights = torch.arange(first, first + step * count, step, device=table.device)
                weights = weights.flip(0) if is_backwards else weights
                weighted = (numbers * weights).sum(dim=1)
            total = weighted if total is None else total + weighted
        position += len(mixed) * count
    return torch.zeros(2, dtype=torch.int64) if total is None else total


def _tables(shards: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield shards of bytes as rows of tables, and whether the first shard is the last row."""
    steps = [*map(_step, shards, shards[1:]), 0]
    start = 0
    while start < len(shards):
        step, stop = steps[start], start + 1
        while step and steps[stop - 1] == step:
            stop += 1
        lowest = shards[stop - 1] if step < 0 else shards[start]
        stride = abs(step) or _ROW_BYTES  # of a single row any will do that lanes divide
        yield lowest.as_strided((stop - start, lowest.numel()), (stride, 1)), step < 0
        start = stop


def _step(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return how many bytes after a shard the next one begins; 0 if one table can't hold both."""
    step = other.data_ptr() - one.data_ptr()
    in_one_table = (
        one.numel() == other.numel() <= abs(step)
        and not one.data_ptr() % _LANE_BYTES
        and not step % _LANE_BYTES
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )
    return step if in_one_table else 0


def _mix(table: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield two numbers each of the lanes in whole rows, of other lanes, and of other bytes.

    Args:
        table: of shape (shards, bytes); more shards than one begin at multiples of a lane.

    Returns:
        Tensors of shape (2, shards).
    """
    rows = table.size(1) // _ROW_BYTES * _ROW_BYTES
    lanes = table.size(1) // _LANE_BYTES * _LANE_BYTES
    is_aligned = table.data_ptr() % _LANE_BYTES == 0
    if rows:
        by_row, by_column = [], None
        whole = table[:, :rows]
        for part in (whole,) if is_aligned else torch.split(whole, COPY_BYTES, dim=1):
            # The copy has no name here: one that outlives its turn makes it two at a time.
            of_rows, of_columns = _sums(part if is_aligned else part.clone())
            by_row.append(of_rows)
            by_column = of_columns if by_column is None else by_column + of_columns
        assert by_column is not None, "there are rows"
        all_rows = by_row[0] if len(by_row) == 1 else torch.cat(by_row, dim=1)
        yield torch.stack([_weighted(all_rows), _weighted(by_column)])
    if lanes > rows:
        rest = table[:, rows:lanes]
        rest = (rest if is_aligned else rest.clone()).view(torch.int64)
        yield torch.stack([rest.sum(dim=1), _weighted(rest)])
    if table.size(1) > lanes:
        tail = table[:, lanes:].to(torch.int64)
        yield torch.stack([tail.sum(dim=1), _weighted(tail)])


def _sums(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of each row of bytes of a table's shards, and of each column of lanes.

    A reduction of CUDA's over any but the last dimension gives columns of 256 rows or more to
    several thread blocks, and each of these space for all its threads: 201 MB for a bucket of 100.
    So columns are summed in two steps of less than 256 rows each.
    """
    table = rows.view(torch.int64)
    table = table.view(table.size(0), -1, _ROW_BYTES // _LANE_BYTES)
    whole = table.size(1) // _FEW_ROWS * _FEW_ROWS
    columns = table[:, whole:].sum(dim=1)
    if whole:
        groups = table[:, :whole].view(table.size(0), -1, _FEW_ROWS, table.size(2))
        columns += groups.sum(dim=2).sum(dim=1)
    return table.sum(dim=2), columns


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum of each shard's int64 numbers, each times an odd number of its own."""
    return (sums * _weights(sums.device)[: sums.size(1)]).sum(dim=1)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers, as many as a piece has rows."""
    return torch.arange(3, 2 * (PIECE_BYTES // _ROW_BYTES) + 3, 2, device=device)
