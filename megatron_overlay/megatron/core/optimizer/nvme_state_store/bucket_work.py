"""What a store does to a bucket while it is resident: fill, update, publish, compare, read.

It all runs on the caller's stream in order of the calls, after the bucket's upload and before its
download. What is resident at other times is none of its business: that is the pipeline's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .agreement import agreed_error
from .bucket_optimizer import update_slices
from .casting import Casts
from .config import StoreConfig
from .errors import StateStoreError
from .formats import main_format, moment_format
from .layout import Bucket, Layout, make_layout, make_whole_layout
from .model_shards import CopyFn, Entry, ModelShards
from .optimizer_state import InitStateFn, discover_state, state_shapes
from .pipeline import Stage, Stages
from .staging import ResidentBucket


class BucketWork:
    """The entries of a store, bucket by bucket.

    Attributes:
        keys: what state the optimizer's class keeps.
        layout: the buckets.
        shards: the model's side of the entries.

    Args:
        config: validated settings.
        optimizer: the master optimizer, whose class does the updates.
        entries: what is streamed, in the order of the layout.
        device: where the model is.
        init_state_fn: upstream's, if it has one for this class.
        peers: None if the entries are flat shards, else, for each param group, the groups of ranks
            that the updates of its whole params communicate with.

    Raises:
        ValueError: the class keeps state that does not stream.
    """

    def __init__(
        self,
        config: StoreConfig,
        optimizer: torch.optim.Optimizer,
        entries: Sequence[Entry],
        device: torch.device,
        init_state_fn: InitStateFn | None,
        peers: Sequence[Sequence[dist.ProcessGroup]] | None,
    ) -> None:
        self._optimizer = optimizer
        self._entries = tuple(entries)
        self._device = device
        is_whole = peers is not None
        self.keys = discover_state(optimizer, device, init_state_fn, is_whole=is_whole)
        self._shapes = self._shapes_of_entries(init_state_fn)
        self._peers: Sequence[Sequence[dist.ProcessGroup]]
        if self.keys.is_elementwise:
            self.shards = ModelShards(self._entries, device)
            self._peers = ((),) * len(optimizer.param_groups)
        else:
            self.shards = ModelShards(self._entries, device, self._shapes)
            self._peers = peers or ()
        self.lay_out(config)

    def _shapes_of_entries(self, init_state_fn: InitStateFn | None) -> list[list[tuple[int, ...]]]:
        """Return, for each entry, the shapes of its main params and of its state."""

        @functools.cache
        def shapes(shape: tuple[int, ...], group: int) -> list[tuple[int, ...]]:
            of_state = state_shapes(self._optimizer, self.keys, init_state_fn, shape, group)
            return [shape, *of_state]

        return [shapes(tuple(entry.main.shape), entry.group) for entry in self._entries]

    def lay_out(self, config: StoreConfig) -> None:
        """Cut the entries into buckets; before there is any."""
        formats = [main_format(config.main_storage)]
        formats += [moment_format(key, config.moment_dtype) for key in self.keys.tensors]
        self.layout: Layout
        if self.keys.is_elementwise:
            numels = [entry.record.numel for entry in self._entries]
            self.layout = make_layout(numels, config.bucket_numel, self.keys.tensors, formats)
        else:
            self.layout = make_whole_layout(
                [[math.prod(shape) for shape in each] for each in self._shapes],
                [entry.group for entry in self._entries],
                config.bucket_numel,
                self.keys.tensors,
                formats,
            )
        self._casts = Casts(self.layout, self._entries)

    # ------------------------------------------------------------------------------------- a step

    def stages(self, step: int) -> Stages:
        """Return what a step does to each bucket.

        Args:
            step: the optimizer steps before this one.
        """

        def update(bucket: Bucket, resident: ResidentBucket) -> None:
            self._casts.decode(bucket, resident)
            slices = self.shards.slices(bucket, resident)
            update_slices(self._optimizer, self.keys, slices, step)
            self.shards.keep_strides(bucket, slices)

        def publish(bucket: Bucket, resident: ResidentBucket) -> None:
            self.shards.publish(bucket, resident)
            self._casts.encode(bucket, resident, step)

        return Stages(self._meet, update, publish)

    def _meet(self, bucket: Bucket, error: Exception | None) -> Exception | None:
        for group in self._peers[self._entries[bucket.slices[0].entry].group]:
            error = agreed_error(error, group, self._device)
        return error

    def hold_meetings(self, error: Exception) -> Exception:
        """Go to all meetings of a step that this rank cannot make: its peers wait there."""
        for bucket in self.layout.buckets:
            error = self._meet(bucket, error) or error
        return error

    # ----------------------------------------------------------------------- refresh, save and load

    def fill(
        self, bucket: Bucket, resident: ResidentBucket, copy_fn: CopyFn | None
    ) -> list[torch.Tensor]:
        """Fill the main params of a bucket, and make its stored bytes.

        Args:
            bucket: which one.
            resident: where it is.
            copy_fn: gives more precise values than the model's shards have; None takes the shards.

        Returns:
            What must be true: shape (), bool, on the device.
        """
        self.shards.fill(bucket, resident, copy_fn)
        must_round = self._casts.is_split and copy_fn is not None
        found = [self.shards.rounds(bucket, resident)] if must_round else []
        self._casts.encode_main(bucket, resident)
        return found

    def fingerprints_to_save(self) -> tuple[tuple[int, ...], ...]:
        """Return what a snapshot must know of the model to be of use with no other."""
        return self.shards.fingerprints(self.layout.buckets) if self._casts.is_split else ()

    def require_saved(self, fingerprints: Sequence[Sequence[int]]) -> None:
        """Raise a `StateStoreError` if the model is not the one that a snapshot needs."""
        if not self._casts.is_split:
            return
        if len(fingerprints) != len(self.layout.buckets):
            raise StateStoreError("the snapshot lacks the fingerprints that split needs")
        self.shards.require(self.layout.buckets, fingerprints)

    def compare(self, bucket: Bucket, resident: ResidentBucket) -> None:
        """Raise a `StateStoreError` if restored main params do not round to the model's."""
        self._casts.decode_main(bucket, resident)
        self.shards.compare(bucket, resident)

    def read_entry(
        self, index: int, look_at: Callable[[Bucket, Stage, int], object]
    ) -> dict[str, torch.Tensor]:
        """Return an entry's main params and state, FP32 on the host.

        Args:
            index: of the entry.
            look_at: makes a bucket resident and calls a stage; of `Pipeline`.
        """
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self.layout.segments}

        def look(bucket: Bucket, resident: ResidentBucket) -> None:
            self._casts.decode(bucket, resident)
            for piece in bucket.slices:
                if piece.entry == index:
                    for position, part in enumerate(piece.parts):
                        segment = resident.segment(bucket, position)
                        values = segment[part.offset : part.offset + part.numel].cpu()
                        found[self.layout.segments[position]].append(values.clone())

        for bucket in self.layout.buckets:
            if any(piece.entry == index for piece in bucket.slices):
                look_at(bucket, look, bucket.nbytes)
        result = {
            name: torch.cat(pieces).view(shape) if pieces else torch.zeros(shape)
            for (name, pieces), shape in zip(found.items(), self._shapes[index], strict=True)
        }
        for entry, key, strides in self.shards.strides:
            if entry == index:
                result[key] = result[key].as_strided(result[key].shape, strides)
        return result
