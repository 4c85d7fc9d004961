"""A fingerprint of 16-bit shards: has anybody changed the weights behind the store's back?

The store's main params are right only while ``bf16(main) == model shard`` holds (invariant 1). A
load path that replaced the weights and forgot to refresh the main params would be undone by the
next step, silently. So the store remembers a fingerprint of what it published and compares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROW = 2048
PIECE_NUMEL = _ROW * 2048
"""Elements summed at once. CUDA's reductions first widen a whole int16 input to int64 (measured on
an H200: 12 bytes of temporaries an element), so an unbounded shard would need several slots."""


def fingerprint(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return two int64 numbers that depend on every bit of the shards and on its position.

    Sums wrap around, and integer sums do not depend on their order: the result is the same on
    every run. Rows and columns are weighted, so that moved elements are noticed, too. Temporaries
    are at most 12 bytes for each of `PIECE_NUMEL` elements: 50 MB.

    Args:
        shards: flat tensors of a 16-bit dtype, or of bytes, on one device.

    Returns:
        Tensor of shape (2,), int64, on the shards' device; zeros if there are none.
    """
    total: torch.Tensor | None = None
    position = 0
    for shard in shards:
        # Bytes stay bytes: a shard of them may start and end anywhere.
        flat = shard.detach() if shard.dtype == torch.uint8 else shard.detach().view(torch.int16)
        for bits in torch.split(flat, PIECE_NUMEL):
            position += 1
            weighted = _mix(bits) * (2 * position + 1)
            total = weighted if total is None else total + weighted
    return torch.zeros(2, dtype=torch.int64) if total is None else total


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Return the two numbers of one piece, int16 or uint8 and flat."""
    whole = bits.numel() // _ROW * _ROW
    table, rest = bits[:whole].view(-1, _ROW), bits[whole:]
    by_row = table.sum(dim=1, dtype=torch.int64)
    by_column = table.sum(dim=0, dtype=torch.int64)
    rows = torch.arange(1, by_row.numel() + 1, device=bits.device)
    columns = torch.arange(1, _ROW + 1, device=bits.device)
    tail = (rest.to(torch.int64) * columns[: rest.numel()]).sum()
    return torch.stack(
        [
            (by_row * (2 * rows + 1)).sum() + tail,
            (by_column * (2 * columns + 1)).sum() + 31 * rest.sum(dtype=torch.int64),
        ]
    )
