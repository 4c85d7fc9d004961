"""Main params that have no storage: handles, until the store initializes them on disk."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def deferred_main_param(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the FP32 handle of a shard or a whole param: its shape and device, and no storage.

    At most one is allocated at a time, for as long as the handle is made. Any read or write of the
    handle's values is an error from then on (a crash on the CPU, an illegal access on CUDA); its
    metadata, attributes, identity and ``grad`` are those of an ordinary tensor.

    It is made of a shape, not of the model param: a quantised one would ignore the dtype.
    """
    handle = torch.empty(tuple(shape), dtype=torch.float32, device=device)
    handle.untyped_storage().resize_(0)
    return handle
