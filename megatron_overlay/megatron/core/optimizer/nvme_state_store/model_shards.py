"""A bucket while it is resident: between the device slot, the gradients and the model's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .bucket_optimizer import ResidentSlice
from .checkpoint import EntryRecord
from .errors import StateStoreError
from .fingerprint import fingerprint
from .layout import MAIN, Bucket
from .staging import DeviceSlot

CopyFn = Callable[[int, int, torch.Tensor], None]
"""``copy_fn(entry, start, out)`` fills ``out`` (FP32, flat, on the device) with the elements
``[start, start + out.numel())`` of an entry's main-param shard."""


@dataclass(frozen=True)
class Entry:
    """One main-param shard.

    Attributes:
        record: what it is a shard of.
        main: its FP32 handle, shape (record.numel,), without storage; carries ``grad``.
        group: index of its param group in the master optimizer.
        model_shard: returns the 16-bit shard, flat, where the param gather reads it.
    """

    record: EntryRecord
    main: torch.Tensor
    group: int
    model_shard: Callable[[], torch.Tensor]


class ModelShards:
    """The entries of a store, and what is known of each bucket from when it was resident.

    Main params are exact and the model's 16-bit shards are their rounding (invariant 1): a
    fingerprint of the shards is kept from every publish or fill, and compared before the next use.

    Args:
        entries: in the order of the layout.
        device: where the model is.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device) -> None:
        self.entries = tuple(entries)
        self._fingerprints: dict[int, torch.Tensor] = {}
        self._norms = torch.zeros(max(len(self.entries), 1), dtype=torch.float32, device=device)
        for index, entry in enumerate(self.entries):
            # What a reader of norms may use instead of the evicted storage: shape (1,), on device.
            entry.main.nvme_l2_norm = self._norms[index : index + 1]  # type: ignore[attr-defined]

    def fill(self, bucket: Bucket, device: DeviceSlot, copy_fn: CopyFn | None) -> None:
        """Fill the main params of a bucket from the model's shards, or from ``copy_fn``."""
        main = device.segment(bucket, MAIN)
        for piece, shard in zip(bucket.slices, self._model_slices(bucket), strict=True):
            out = main[piece.offset : piece.offset + piece.numel]
            if copy_fn is None:
                out.copy_(shard)
            else:
                copy_fn(piece.entry, piece.start, out)
        self._remember(bucket, device)

    def check(self, bucket: Bucket) -> None:
        """Raise a `StateStoreError` if the model's shards are not those last published."""
        now = fingerprint(self._model_slices(bucket))
        if not torch.equal(now, self._fingerprints[bucket.index]):
            names = sorted({self.entries[piece.entry].record.name for piece in bucket.slices})
            raise StateStoreError(
                f"bucket {bucket.index} ({', '.join(names)}): the model params are not those the "
                "store published: something replaced them without refreshing the main params; "
                "call reload_model_params() after loading weights"
            )

    def slices(self, bucket: Bucket, device: DeviceSlot) -> list[ResidentSlice]:
        """Return the slices of a bucket with their gradients, for the update.

        Raises:
            StateStoreError: an entry has no gradient.
        """
        slices = []
        for piece in bucket.slices:
            entry = self.entries[piece.entry]
            if entry.main.grad is None:
                raise StateStoreError(f"{entry.record.name} has no gradient")
            where = slice(piece.offset, piece.offset + piece.numel)
            slices.append(
                ResidentSlice(
                    group=entry.group,
                    main=device.segment(bucket, MAIN)[where],
                    grad=entry.main.grad.view(-1)[piece.start : piece.start + piece.numel],
                    moments={
                        name: device.segment(bucket, index)[where]
                        for index, name in enumerate(device.segments)
                        if index != MAIN
                    },
                )
            )
        return slices

    def publish(self, bucket: Bucket, device: DeviceSlot) -> None:
        """Round the main params of a bucket into the model's shards."""
        main = device.segment(bucket, MAIN)
        for piece, shard in zip(bucket.slices, self._model_slices(bucket), strict=True):
            shard.copy_(main[piece.offset : piece.offset + piece.numel])
        self._remember(bucket, device)

    def compare(self, bucket: Bucket, device: DeviceSlot) -> None:
        """Raise a `StateStoreError` if the main params of a bucket do not round to the shards."""
        main = device.segment(bucket, MAIN)
        for piece, shard in zip(bucket.slices, self._model_slices(bucket), strict=True):
            rounded = main[piece.offset : piece.offset + piece.numel].to(shard.dtype)
            if not torch.equal(rounded.view(torch.int16), shard.view(torch.int16)):
                name = self.entries[piece.entry].record.name
                raise StateStoreError(
                    f"the main params of {name} do not round to its model params: weights and "
                    "optimizer state are of different checkpoints"
                )
        self._remember(bucket, device)

    def _model_slices(self, bucket: Bucket) -> list[torch.Tensor]:
        return [
            self.entries[piece.entry].model_shard()[piece.start : piece.start + piece.numel]
            for piece in bucket.slices
        ]

    def _remember(self, bucket: Bucket, device: DeviceSlot) -> None:
        """Keep the fingerprint of a bucket and the norms of its entries."""
        self._fingerprints[bucket.index] = fingerprint(self._model_slices(bucket))
        main = device.segment(bucket, MAIN)
        for piece in bucket.slices:
            norm = torch.linalg.vector_norm(main[piece.offset : piece.offset + piece.numel])
            known = self._norms[piece.entry]
            known.copy_(norm if piece.start == 0 else torch.hypot(known, norm))
