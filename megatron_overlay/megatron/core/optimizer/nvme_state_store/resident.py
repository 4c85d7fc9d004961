"""Native FP32 params: they have no main copy, stay on the device, and are saved as tensors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .checkpoint import EntryRecord
from .errors import StateStoreError
from .optimizer_state import StateKeys


@dataclass(frozen=True)
class Resident:
    """A native FP32 shard: it has no main copy, stays on the device, and steps there."""

    record: EntryRecord
    param: torch.Tensor
    group: int


def resident_state(optimizer: torch.optim.Optimizer, residents: Sequence[Resident]) -> bytes | None:
    """Serialize resident params and their optimizer state; None if there are none."""
    if not residents:
        return None
    content = []
    for resident in residents:
        state = {
            key: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state.get(resident.param, {}).items()
        }
        record = resident.record
        # A clone: the shard is a view, and saving it would save the whole buffer.
        param = resident.param.detach().cpu().clone()
        content.append((record.name, record.start, record.numel, param, state))
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def set_resident_state(
    optimizer: torch.optim.Optimizer,
    keys: StateKeys,
    residents: Sequence[Resident],
    content: bytes | None,
) -> None:
    """Restore what `resident_state` returned.

    Raises:
        StateStoreError: it is of other params.
    """
    saved = [] if content is None else torch.load(io.BytesIO(content), map_location="cpu")
    ours = [(each.record.name, each.record.start, each.record.numel) for each in residents]
    if [(name, start, numel) for name, start, numel, _, _ in saved] != ours:
        raise StateStoreError("the checkpoint holds other native FP32 params than this rank")
    for resident, (_, _, _, param, state) in zip(residents, saved, strict=True):
        resident.param.data.copy_(param)
        optimizer.state[resident.param] = {
            key: value.to(_device(key, keys, resident)) if torch.is_tensor(value) else value
            for key, value in state.items()
        }


def _device(key: str, keys: StateKeys, resident: Resident) -> torch.device:
    """Return where a class wants a tensor of its state: torch has its counters on the host."""
    counter = keys.param_counters.get(key)
    return counter.device if torch.is_tensor(counter) else resident.param.device
