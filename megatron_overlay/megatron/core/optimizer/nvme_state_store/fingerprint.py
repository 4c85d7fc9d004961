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

    Args:
        shards: flat contiguous tensors of a 16-bit dtype, or of bytes, on one device.

    Returns:
        Tensor of shape (2,), int64, on the shards' device; zeros if there are none.
    """
    total: torch.Tensor | None = None
    position = 0
    for shard in shards:
        for piece in torch.split(shard.detach().view(torch.uint8), PIECE_BYTES):
            for numbers in _mix(piece):
                position += 1
                weighted = numbers * (2 * position + 1)
                total = weighted if total is None else total + weighted
    return torch.zeros(2, dtype=torch.int64) if total is None else total


def _mix(piece: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield two numbers each of the rows of a piece, of what is less than a row, and than a lane.

    Few kernels: a bucket's fingerprint is limited by their launches.
    """
    rows = piece.numel() // _ROW_BYTES * _ROW_BYTES
    lanes = piece.numel() // _LANE_BYTES * _LANE_BYTES
    if rows:
        by_row, by_column = [], None
        is_aligned = piece.data_ptr() % _LANE_BYTES == 0
        for part in (piece[:rows],) if is_aligned else torch.split(piece[:rows], COPY_BYTES):
            # The copy has no name here: one that outlives its turn makes it two at a time.
            of_rows, of_columns = _sums(part if is_aligned else part.clone())
            by_row.append(of_rows)
            by_column = of_columns if by_column is None else by_column + of_columns
        assert by_column is not None, "there are rows"
        yield torch.stack([_weighted(torch.cat(by_row)), _weighted(by_column)])
    if lanes > rows:
        rest = piece[rows:lanes].clone().view(torch.int64)
        yield torch.stack([rest.sum(), _weighted(rest)])
    if piece.numel() > lanes:
        tail = piece[lanes:].to(torch.int64)
        yield torch.stack([tail.sum(), _weighted(tail)])


def _sums(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of each row of bytes, and of each column of lanes."""
    table = rows.view(torch.int64).view(-1, _ROW_BYTES // _LANE_BYTES)
    return table.sum(dim=1), _column_sums(table)


def _column_sums(table: torch.Tensor) -> torch.Tensor:
    """Return ``table.sum(dim=0)``, in two steps of less than 256 rows each.

    A reduction of CUDA's over any but the last dimension gives columns of 256 rows or more to
    several thread blocks, and each of these space for all its threads: 201 MB for a bucket of 100.
    """
    whole = table.size(0) // _FEW_ROWS * _FEW_ROWS
    groups = table[:whole].view(-1, _FEW_ROWS, table.size(1)).sum(dim=1)
    return torch.cat([groups, table[whole:]]).sum(dim=0)


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum of int64 numbers, each times an odd number of its own; shape ()."""
    return (sums * _weights(sums.device)[: sums.numel()]).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers, as many as a piece has rows."""
    return torch.arange(3, 2 * (PIECE_BYTES // _ROW_BYTES) + 3, 2, device=device)
