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
        main: its FP32 handle without storage; carries ``grad``. Shape (record.numel,) of a shard,
            the param's own of a whole param.
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
        shapes: if entries are whole, the shapes of each one's main params and state.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        device: torch.device,
        shapes: Sequence[Sequence[tuple[int, ...]]] | None = None,
    ) -> None:
        self.entries = tuple(entries)
        self._shapes = shapes
        self._strides: dict[int, dict[str, tuple[int, ...]]] = {}
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
        """Raise a `StateStoreError` if the model's shards are not those last published.

        Or if one of them has no gradient.
        """
        now = fingerprint(self._model_slices(bucket))
        if not torch.equal(now, self._fingerprints[bucket.index]):
            names = sorted({self.entries[piece.entry].record.name for piece in bucket.slices})
            raise StateStoreError(
                f"bucket {bucket.index} ({', '.join(names)}): the model params are not those the "
                "store published: something replaced them without refreshing the main params; "
                "call reload_model_params() after loading weights"
            )
        for piece in bucket.slices:
            if self.entries[piece.entry].main.grad is None:
                raise StateStoreError(f"{self.entries[piece.entry].record.name} has no gradient")

    def slices(self, bucket: Bucket, device: DeviceSlot) -> list[ResidentSlice]:
        """Return the slices of a bucket that was checked, with their gradients, for the update."""
        slices = []
        for piece in bucket.slices:
            entry = self.entries[piece.entry]
            assert entry.main.grad is not None, "checked"
            grad = entry.main.grad.view(-1)[piece.start : piece.start + piece.numel]
            tensors = [
                device.segment(bucket, index)[part.offset : part.offset + part.numel]
                for index, part in enumerate(piece.parts)
            ]
            if self._shapes is not None:
                shapes = self._shapes[piece.entry]
                grad = grad.view(shapes[MAIN])
                tensors = [each.view(shape) for each, shape in zip(tensors, shapes, strict=True)]
            moments = dict(zip(device.segments, tensors, strict=True))
            for key, strides in self._strides.get(piece.entry, {}).items():
                moments[key] = moments[key].as_strided(moments[key].shape, strides)
            main = moments.pop(device.segments[MAIN])
            slices.append(ResidentSlice(entry.group, entry.main, main, grad, moments))
        return slices

    def keep_strides(self, bucket: Bucket, slices: Sequence[ResidentSlice]) -> None:
        """Remember in which order of memory the update left the state of whole params.

        It is not saved: after a load they are row by row, as in stock's own resumed run.
        """
        if self._shapes is None:
            return
        for piece, resident in zip(bucket.slices, slices, strict=True):
            strides = {
                key: value.stride()
                for key, value in resident.moments.items()
                if not value.is_contiguous()
            }
            if strides:
                self._strides[piece.entry] = strides
            else:
                self._strides.pop(piece.entry, None)

    def forget_strides(self) -> None:
        """All state is row by row again."""
        self._strides.clear()

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
