"""Failures are collective: either no rank of a group failed, or all of them raise the same error.

A rank that raises alone leaves the others waiting in their next collective until it times out. So
wherever a disk may fail on one rank, all ranks meet here before they go on (invariant 5).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .errors import StateStoreError


def agree(
    error: BaseException | None, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Raise on every rank of ``group`` if any of them brings an error.

    One all-reduce of one number if nobody failed.

    Args:
        error: what went wrong on this rank, or None.
        group: the ranks that must agree; None if there is only this one, or no process group.
        device: where the group's backend wants its tensors.

    Raises:
        StateStoreError: at least one rank failed. The message is the same on all ranks and names
            each that failed; on a rank that failed, the cause is its own error.
    """
    agreed = agreed_error(error, group, device)
    if agreed is not None:
        raise agreed


def agreed_error(
    error: BaseException | None, group: dist.ProcessGroup | None, device: torch.device
) -> StateStoreError | None:
    """Return what `agree` would raise, for ranks that must go on to meet others.

    An error that this returned may be brought to the next meeting: its text stays as it is.
    """
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        if error is None or isinstance(error, StateStoreError):
            return error
        return _caused(StateStoreError(_describe(error)), error)
    failed = torch.tensor([int(error is not None)], dtype=torch.int32, device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not failed.item():
        return None
    told: list[tuple[str, bool] | None] = [None] * dist.get_world_size(group)
    mine = None if error is None else (_describe(error), getattr(error, "names_ranks", False))
    dist.all_gather_object(told, mine, group=group)
    ranks_by_text: dict[tuple[str, bool], list[str]] = {}
    for rank, text in zip(dist.get_process_group_ranks(group), told, strict=True):
        if text is not None:
            ranks_by_text.setdefault(text, []).append(str(rank))
    causes = [
        text if names_ranks else f"rank {', '.join(ranks)}: {text}"
        for (text, names_ranks), ranks in ranks_by_text.items()
    ]
    agreed = StateStoreError("; ".join(causes))
    agreed.names_ranks = True
    return _caused(agreed, error)


def _caused(agreed: StateStoreError, error: BaseException | None) -> StateStoreError:
    agreed.__cause__ = error
    return agreed


def _describe(error: BaseException) -> str:
    # Errors of ours that were agreed before keep their text.
    return str(error) if isinstance(error, StateStoreError) else f"{type(error).__name__}: {error}"


def gather[T](value: T, group: dist.ProcessGroup | None) -> dict[int, T]:
    """Return the value that each rank of ``group`` brings, by global rank."""
    if group is None or not dist.is_initialized():
        return {0: value}
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return dict(zip(dist.get_process_group_ranks(group), values, strict=True))
