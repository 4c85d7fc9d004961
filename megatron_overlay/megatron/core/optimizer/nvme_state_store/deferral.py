"""Main params that have no storage: handles, until the store initializes them on disk."""

from __future__ import annotations

import torch


def deferred_main_param(shard_model_param: torch.Tensor) -> torch.Tensor:
    """Return the FP32 handle of a 16-bit shard: its shape and device, and no storage.

    At most one FP32 shard is allocated at a time, for as long as the handle is made. Any read or
    write of the handle's values is an error from then on (a crash on the CPU, an illegal access on
    CUDA); its metadata, attributes, identity and ``grad`` are those of an ordinary tensor.
    """
    handle = torch.empty_like(shard_model_param, dtype=torch.float32)
    handle.untyped_storage().resize_(0)
    return handle
