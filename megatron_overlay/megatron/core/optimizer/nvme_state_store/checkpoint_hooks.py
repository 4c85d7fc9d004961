"""What `save_checkpoint` and `load_checkpoint` call: the streamed state beside the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .chained_optimizer import StreamedChainedOptimizer

DIRECTORY = "nvme_optimizer_state"
"""Directory of the streamed state inside a checkpoint's directory."""


def save_streamed_state(optimizer: Any, checkpoint_name: str) -> None:
    """Save the state of a streamed optimizer into a checkpoint; do nothing for any other.

    Collective over all ranks. It is complete when this returns, so before Megatron's tracker file
    names the checkpoint, also with ``--async-save``.
    """
    if isinstance(optimizer, StreamedChainedOptimizer):
        optimizer.save_stores(Path(checkpoint_name) / DIRECTORY)


def load_streamed_state(optimizer: Any, checkpoint_name: str) -> None:
    """Load the state of a streamed optimizer; called where Megatron loads the optimizer's.

    Raises:
        ValueError: the checkpoint was saved by the other kind of run.
    """
    # Again: a run with --no-save-optim may have saved over a streamed checkpoint, and upstream then
    # does not look for an optimizer's tensors, where it was to be refused first.
    refuse_streamed_state(optimizer, checkpoint_name)
    if isinstance(optimizer, StreamedChainedOptimizer):
        optimizer.load_stores(Path(checkpoint_name) / DIRECTORY)


def refuse_streamed_state(optimizer: Any, checkpoint_name: str) -> None:
    """Refuse streamed state to any other optimizer; called before Megatron loads anything.

    It would miss its own tensors there, with a KeyError that names the first of them.

    Raises:
        ValueError: the checkpoint was saved by a run that streamed.
    """
    if optimizer is None or isinstance(optimizer, StreamedChainedOptimizer):
        return
    if (Path(checkpoint_name) / DIRECTORY).is_dir():
        raise ValueError(
            f"{checkpoint_name}: the optimizer state was streamed ({DIRECTORY}/): load it with "
            "--stream-optimizer-state-to-disk, or with --no-load-optim to start afresh from "
            "its weights"
        )
