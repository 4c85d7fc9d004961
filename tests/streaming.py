"""Training with streamed state, for `tests.gpt`: the flags, and where its tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.gpt import OptimizerTensor, inner_optimizers, resident_tensors


def flags(directory: Path | str, bucket_numel: int = 20_000) -> list[str]:
    """Return the arguments that stream into ``directory``; the model has several buckets."""
    return [
        "--stream-optimizer-state-to-disk",
        "--stream-optimizer-state-dir",
        str(directory),
        "--stream-optimizer-state-bucket-numel",
        str(bucket_numel),
        "--logging-level",
        "20",
    ]


def streamed_tensors(optimizer: Any) -> Iterator[OptimizerTensor]:
    """Yield main params and moments under the names of `resident_tensors`, read from the store."""
    for name, inner in inner_optimizers(optimizer):
        store = inner._nvme_state_store
        entries = {id(entry.main): index for index, entry in enumerate(store.entries)}
        for group_index, group in enumerate(inner.optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                place = f"{name or 0}/{group_index}/{index}"
                if id(param) not in entries:
                    continue
                for key, tensor in store.read_entry(entries[id(param)]).items():
                    yield OptimizerTensor(f"{key}/{place}", tensor)
                # Torch counts steps in the state of each param; the store in one place for all.
                for key, value in store.keys.counters(store.steps).items():
                    if isinstance(value, torch.Tensor):
                        yield OptimizerTensor(f"{key}/{place}", value)
    for each in resident_tensors(optimizer):
        if not each.tensor.untyped_storage().nbytes():
            continue
        yield each
