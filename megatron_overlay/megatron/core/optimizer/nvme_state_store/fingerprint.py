"""A fingerprint of 16-bit shards: has anybody changed the weights behind the store's back?

The store's main params are right only while ``bf16(main) == model shard`` holds (invariant 1). A
load path that replaced the weights and forgot to refresh the main params would be undone by the
next step, silently. So the store remembers a fingerprint of what it published and compares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROW = 2048


def fingerprint(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return two int64 numbers that depend on every bit of the shards and on its position.

    Sums wrap around, and integer sums do not depend on their order: the result is the same on
    every run. Rows and columns are weighted, so that moved elements are noticed, too; no
    temporary is larger than 8 bytes for each row of 2048 elements.

    Args:
        shards: flat tensors of a 16-bit dtype on one device.

    Returns:
        Tensor of shape (2,), int64, on the shards' device; zeros if there are none.
    """
    total: torch.Tensor | None = None
    for position, shard in enumerate(shards, start=1):
        bits = shard.detach().view(torch.int16)
        whole = bits.numel() // _ROW * _ROW
        table = bits[:whole].view(-1, _ROW)
        rest = bits[whole:].sum(dtype=torch.int64)
        by_row = table.sum(dim=1, dtype=torch.int64)
        by_column = table.sum(dim=0, dtype=torch.int64)
        weights = torch.arange(1, _ROW + 1, device=bits.device)
        tail = (bits[whole:].to(torch.int64) * weights[: bits.numel() - whole]).sum()
        rows = torch.arange(1, by_row.numel() + 1, device=bits.device)
        mixed = torch.stack(
            [
                (by_row * (2 * rows + 1)).sum() + tail,
                (by_column * (2 * weights + 1)).sum() + 31 * rest,
            ]
        )
        mixed = mixed * (2 * position + 1)
        total = mixed if total is None else total + mixed
    return torch.zeros(2, dtype=torch.int64) if total is None else total
