"""A bucket while it is resident: between the device slot, the gradients and the model's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .bucket_optimizer import ResidentSlice
from .checkpoint import EntryRecord, Strides
from .encoding import rounds_to
from .errors import StateStoreError
from .fingerprint import fingerprint
from .layout import MAIN, Bucket
from .staging import ResidentBucket

E4M3_RELATIVE, E4M3_ABSOLUTE = 1.02 / 16, 2.0**-10 / 112
"""Bound of the error of an 8-bit value, relative to itself and to the largest of its shard: half a
unit in the last of 3 bits, and of the smallest number; the 2 % are for the rounding of scales and
of 16-bit values (measured with every recipe: 0.92 to 0.97 of the bound)."""
_COMPARED_NUMEL = 1 << 22
"""Elements that are compared with the model at once: 3 bytes each of temporaries, 23 of an 8-bit
param."""

CopyFn = Callable[[int, int, torch.Tensor], None]
"""``copy_fn(entry, start, out)`` fills ``out`` (FP32, flat, on the device) with the elements
``[start, start + out.numel())`` of an entry's main-param shard."""


@dataclass(frozen=True)
class Quantised:
    """What else there is of an 8-bit model param: `Entry.model_shard` are its bytes.

    [Note: Quantised params]
    Quantising needs the largest value of a whole param, or of blocks that ranks share, so upstream
    casts all params of all ranks in one collective call. It starts with rounding the main params to
    the param's 16-bit dtype and never looks at FP32 again (Transformer Engine's
    `quantize_master_weights`, every recipe). Those 16 bits have a free home: the gradient, which
    nobody needs after the update. So `publish` parks them there, and the optimizer makes upstream's
    call with the parked tensors when all buckets are done. The slices of an entry ascend, so that
    its parked half never reaches gradients which are still to be read.

    Attributes:
        dtype: 16-bit dtype that the cast starts from.
        values: returns the shard in that dtype, flat: from before it was first cast, if that is
            still known, else dequantised.
        scales: returns what belongs to the bytes, as bytes.
        release: forgets the values from before the first cast.
    """

    dtype: torch.dtype
    values: Callable[[], torch.Tensor]
    scales: Callable[[], torch.Tensor]
    release: Callable[[], None]


@dataclass(frozen=True)
class Entry:
    """One main-param shard.

    Attributes:
        record: what it is a shard of.
        main: its FP32 handle without storage; carries ``grad``. Shape (record.numel,) of a shard,
            the param's own of a whole param.
        group: index of its param group in the master optimizer.
        model_shard: returns the model's shard, flat, where the param gather reads it: 16-bit, or
            bytes of a quantised param.
        quantised: what else there is of a quantised param, or None.
    """

    record: EntryRecord
    main: torch.Tensor
    group: int
    model_shard: Callable[[], torch.Tensor]
    quantised: Quantised | None = None

    def shard(self) -> torch.Tensor:
        """Return the model's shard, which is there.

        Raises:
            StateStoreError: its storage was released: a framework has offloaded the params. To read
                it would be an illegal memory access.
        """
        shard = self.model_shard()
        if not shard.untyped_storage().nbytes():
            raise StateStoreError(
                f"{self.record.name}: the model params are offloaded; restore them before a step, "
                "a refresh, a save or a load of the optimizer state"
            )
        return shard

    def values(self) -> torch.Tensor:
        """Return the model's shard in 16 bits, flat."""
        return self.shard() if self.quantised is None else self.quantised.values()

    def parked(self) -> torch.Tensor:
        """Return where the 16-bit main params of a quantised param wait for the cast, flat."""
        assert self.quantised is not None and self.main.grad is not None, "it was just stepped"
        assert self.main.grad.dtype == torch.float32 and self.main.grad.is_contiguous()
        return self.main.grad.view(-1).view(self.quantised.dtype)[: self.record.numel]


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

    def fill(self, bucket: Bucket, resident: ResidentBucket, copy_fn: CopyFn | None) -> None:
        """Fill the main params of a bucket from the model's shards, or from ``copy_fn``."""
        main = resident.segment(bucket, MAIN)
        for piece in bucket.slices:
            out = main[piece.offset : piece.offset + piece.numel]
            if copy_fn is None:
                values = self.entries[piece.entry].values()
                out.copy_(values[piece.start : piece.start + piece.numel])
            else:
                copy_fn(piece.entry, piece.start, out)
        self._remember_norms(bucket, resident)
        self.remember(bucket)

    def release_initial_values(self) -> None:
        """Forget from which values quantised params were made: the main params have them now."""
        for entry in self.entries:
            if entry.quantised is not None:
                entry.quantised.release()

    def check(self, buckets: Sequence[Bucket]) -> None:
        """Raise a `StateStoreError` if the model's shards are not those last published.

        Or if one of them has no gradient.
        """
        self.check_published(buckets)
        for bucket in buckets:
            for piece in bucket.slices:
                if self.entries[piece.entry].main.grad is None:
                    raise StateStoreError(
                        f"{self.entries[piece.entry].record.name} has no gradient"
                    )

    def check_published(self, buckets: Sequence[Bucket]) -> None:
        """Raise a `StateStoreError` if the model's shards are not those last published.

        Waits for the device once, not for each bucket.
        """
        changed = self._changed(buckets, [self._fingerprints[each.index] for each in buckets])
        if changed is not None:
            raise StateStoreError(
                f"{self._named(changed)}: the model params are not those the store published: "
                "something replaced them without refreshing the main params; call "
                "reload_model_params() after loading weights"
            )

    def fingerprints(self, buckets: Sequence[Bucket]) -> tuple[tuple[int, ...], ...]:
        """Return what is known of the shards, as numbers that another run can compare."""
        return tuple(tuple(self._fingerprints[each.index].tolist()) for each in buckets)

    def require(self, buckets: Sequence[Bucket], saved: Sequence[Sequence[int]]) -> None:
        """Raise a `StateStoreError` if the model's shards are not those of a snapshot.

        ``split`` main params would come out as other numbers.
        """
        known = [torch.tensor(each, dtype=torch.int64, device=self._norms.device) for each in saved]
        changed = self._changed(buckets, known)
        if changed is not None:
            raise StateStoreError(
                f"{self._named(changed)}: the model params are not those that were saved with the "
                "optimizer state: weights and optimizer state are of different checkpoints"
            )

    def _changed(self, buckets: Sequence[Bucket], known: Sequence[torch.Tensor]) -> Bucket | None:
        """Return the first bucket whose shards have another fingerprint."""
        if not buckets:
            return None
        now = torch.stack([self._fingerprint(bucket) for bucket in buckets])
        differs = (now != torch.stack(list(known))).any(dim=1).tolist()
        return next((each for each, changed in zip(buckets, differs, strict=True) if changed), None)

    def _named(self, bucket: Bucket) -> str:
        names = sorted({self.entries[piece.entry].record.name for piece in bucket.slices})
        return f"bucket {bucket.index} ({', '.join(names)})"

    def slices(self, bucket: Bucket, resident: ResidentBucket) -> list[ResidentSlice]:
        """Return the slices of a bucket that was checked, with their gradients, for the update."""
        slices = []
        for piece in bucket.slices:
            entry = self.entries[piece.entry]
            assert entry.main.grad is not None, "checked"
            grad = entry.main.grad.view(-1)[piece.start : piece.start + piece.numel]
            tensors = [
                resident.segment(bucket, index)[part.offset : part.offset + part.numel]
                for index, part in enumerate(piece.parts)
            ]
            if self._shapes is not None:
                shapes = self._shapes[piece.entry]
                grad = grad.view(shapes[MAIN])
                tensors = [each.view(shape) for each, shape in zip(tensors, shapes, strict=True)]
            moments = dict(zip(resident.segments, tensors, strict=True))
            for key, strides in self._strides.get(piece.entry, {}).items():
                moments[key] = moments[key].as_strided(moments[key].shape, strides)
            main = moments.pop(resident.segments[MAIN])
            slices.append(ResidentSlice(entry.group, entry.main, main, grad, moments))
        return slices

    @property
    def strides(self) -> Strides:
        """(entry, key, strides) of state that an update left in another order than row by row.

        It lies so in the file, too. A class may make such tensors, and products round by it.
        """
        return tuple(
            (entry, key, strides)
            for entry, by_key in sorted(self._strides.items())
            for key, strides in sorted(by_key.items())
        )

    @strides.setter
    def strides(self, strides: Strides) -> None:
        self._strides = {}
        for entry, key, each in strides:
            self._strides.setdefault(entry, {})[key] = each

    def keep_strides(self, bucket: Bucket, slices: Sequence[ResidentSlice]) -> None:
        """Remember in which order of memory the update left the state of whole params."""
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

    def publish(self, bucket: Bucket, resident: ResidentBucket) -> None:
        """Round the main params of a bucket into the model's shards, or park them for the cast.

        What is parked is not remembered before `remember_quantised`.
        """
        main = resident.segment(bucket, MAIN)
        targets, sources = [], []
        for piece in bucket.slices:
            entry = self.entries[piece.entry]
            target = entry.shard() if entry.quantised is None else entry.parked()
            targets.append(target[piece.start : piece.start + piece.numel])
            sources.append(main[piece.offset : piece.offset + piece.numel])
        torch._foreach_copy_(targets, sources)
        self._remember_norms(bucket, resident)
        if not self._has_quantised(bucket):
            self.remember(bucket)

    def remember_quantised(self, buckets: Sequence[Bucket]) -> None:
        """Keep the fingerprints of quantised params, after the cast."""
        for bucket in buckets:
            if self._has_quantised(bucket):
                self.remember(bucket)

    def compare(self, bucket: Bucket, resident: ResidentBucket) -> None:
        """Raise a `StateStoreError` if the main params of a bucket are not the model's.

        They must round to 16-bit shards. Quantised ones can't be compared exactly: to cast them
        again would need the whole param. So weights of another run are found, weights of a step
        before or after this one are not.
        """
        main = resident.segment(bucket, MAIN)
        for piece in bucket.slices:
            entry = self.entries[piece.entry]
            where = slice(piece.start, piece.start + piece.numel)
            ours = main[piece.offset : piece.offset + piece.numel]
            values = entry.values()
            is_same = _rounds_to if entry.quantised is None else _is_near(values)
            pairs = (torch.split(each, _COMPARED_NUMEL) for each in (ours, values[where]))
            if not all(map(is_same, *pairs)):
                raise StateStoreError(
                    f"the main params of {entry.record.name} do not round to its model params: "
                    "weights and optimizer state are of different checkpoints"
                )
        self._remember_norms(bucket, resident)
        self.remember(bucket)

    def rounds(self, bucket: Bucket, resident: ResidentBucket) -> torch.Tensor:
        """Return whether the main params of a bucket round to its 16-bit shards: shape (), bool."""
        main = resident.segment(bucket, MAIN)
        flags = []
        for piece in bucket.slices:
            shard = self.entries[piece.entry].shard()
            ours = main[piece.offset : piece.offset + piece.numel]
            flags.append(rounds_to(ours, shard[piece.start : piece.start + piece.numel]))
        return torch.stack(flags).all()

    def remember(self, bucket: Bucket) -> None:
        """Keep the fingerprint of what the model has."""
        self._fingerprints[bucket.index] = self._fingerprint(bucket)

    def _fingerprint(self, bucket: Bucket) -> torch.Tensor:
        parts = []
        for piece in bucket.slices:
            entry = self.entries[piece.entry]
            parts.append(entry.shard()[piece.start : piece.start + piece.numel])
            if entry.quantised is not None:
                parts.append(entry.quantised.scales())
        return fingerprint(parts)

    def _has_quantised(self, bucket: Bucket) -> bool:
        return any(self.entries[piece.entry].quantised is not None for piece in bucket.slices)

    def _remember_norms(self, bucket: Bucket, resident: ResidentBucket) -> None:
        main = resident.segment(bucket, MAIN)
        norms = torch.stack(
            torch._foreach_norm(
                [main[piece.offset : piece.offset + piece.numel] for piece in bucket.slices]
            )
        )
        entries = [piece.entry for piece in bucket.slices]
        known = self._norms[entries[0] : entries[-1] + 1]
        if bucket.slices[0].start:  # the others of a bucket begin with it
            norms[0] = torch.hypot(known[0], norms[0])
        if len(entries) == known.numel():
            known.copy_(norms)
        else:  # between them are some of which this rank has no element
            for entry, norm in zip(entries, norms, strict=True):
                self._norms[entry].copy_(norm)


def _rounds_to(main: torch.Tensor, shard: torch.Tensor) -> bool:
    """Return whether main params round to a 16-bit shard."""
    return torch.equal(main.to(shard.dtype).view(torch.int16), shard.view(torch.int16))


def _is_near(values: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Return what tells whether main params are as near as E4M3 is to a part of ``values``."""
    low, high = torch.aminmax(values)
    largest = torch.maximum(-low, high).float()

    def is_near(main: torch.Tensor, part: torch.Tensor) -> bool:
        error = (main.to(part.dtype).float() - part.float()).abs_()
        return bool((error <= main.abs() * E4M3_RELATIVE + largest * E4M3_ABSOLUTE).all())

    return is_near
