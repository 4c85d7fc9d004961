"""The outermost optimizer of a streamed run: where all ranks agree that no disk failed.

Expert children exist on some ranks only, and a child agrees only with the ranks it gathers from.
The outermost optimizer exists once on every rank, so here the whole world meets: once after
construction, once per step, and around refresh, save and load.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..distrib_optimizer import DistributedOptimizer
from ..optimizer import ChainedOptimizer
from .agreement import agree, gather
from .budgets import Budgets, Memory, host_memory, resolve_budgets
from .checkpoint import PreparedSnapshot
from .config import store_config
from .errors import StateStoreError
from .filesystems import boot_id
from .layer_wise_optimizer import StreamedLayerWiseOptimizer
from .metrics import metrics_of
from .store import OptimizerStateStore, new_generation


def streamed_chain(optimizer: ChainedOptimizer) -> StreamedChainedOptimizer:
    """Return the outermost optimizer around what upstream made, whose children stream."""
    if isinstance(optimizer, StreamedLayerWiseOptimizer):
        return StreamedChainedOptimizer([optimizer])
    return StreamedChainedOptimizer(optimizer.chained_optimizers)


class StreamedChainedOptimizer(ChainedOptimizer):
    """A `ChainedOptimizer` whose children stream their state.

    Raises:
        StateStoreError: on all ranks, if the store of any could not be initialized.
        ValueError: on all ranks, if those of a node would pin more memory than it has.
    """

    def __init__(self, chained_optimizers: list[Any]) -> None:
        super().__init__(chained_optimizers)
        self._num_agreed = 0
        rank = dist.get_rank() if dist.is_initialized() else 0
        for index, store in enumerate(self._stores()):
            store.name = f"rank{rank:05d}/optimizer{index}"
        self._share_slots()
        budgets = self._budgets(rank)
        whole = sum(store.layout.nbytes for store in self._stores())
        try:
            self._together(
                lambda store: store.initialize_main_from_model_params(
                    budgets.share(store.layout.nbytes, whole)
                )
            )
        except StateStoreError:
            for store in self._stores():  # the process may live on; its files are of no use
                store.close()
            raise

    def _share_slots(self) -> None:
        """Give each store the part of the slots that it has of this rank's state.

        Ranks walk the same buckets of whole params, so there the part must be the same on all.
        """
        stores = list(self._stores())
        whole = max(sum(store.layout.nbytes for store in stores), 1)
        mine = [Fraction(store.layout.nbytes, whole) for store in stores]
        of_ranks = gather(mine, dist.group.WORLD).values()
        for index, store in enumerate(stores):
            largest = max(parts[index] for parts in of_ranks if index < len(parts))
            store.use_part(mine[index] if store.keys.is_elementwise else largest)

    def _budgets(self, rank: int) -> Budgets:
        """Return what this rank's stores may keep in memory; all ranks measure at the same time.

        Raises:
            StateStoreError: on all ranks, if one cannot tell.
            ValueError: on all ranks, if those of a node would pin more memory than it has.
        """
        stores = list(self._stores())
        error: Exception | None = None
        try:
            host_free, host_total = host_memory()
            device_free, device_total = torch.cuda.mem_get_info()
        except (OSError, KeyError, ValueError, RuntimeError) as caught:
            error = caught
        self._agree(error)
        mine = Memory(
            node=boot_id(),
            hostname=socket.gethostname(),
            host_free=host_free,
            host_total=host_total,
            device_free=device_free,
            device_total=device_total,
            slot_nbytes=sum(store.max_slot_nbytes for store in stores),
            state_nbytes=sum(store.layout.nbytes for store in stores),
        )
        memory = gather(mine, dist.group.WORLD)
        return resolve_budgets(store_config(self.config), rank, memory)

    @property
    def _nvme_state_store(self) -> OptimizerStateStore | None:
        """The store, if there is exactly one."""
        stores = list(self._stores())
        return stores[0] if len(stores) == 1 else None

    def _stores(self) -> Iterator[OptimizerStateStore]:
        for optimizer in self.chained_optimizers:
            yield from optimizer.nvme_state_stores()

    def _agree(self, error: Exception | None, *, is_fatal: bool = True) -> None:
        """Raise on all ranks if any brings an error; if fatal, no store is usable any more."""
        try:
            agree(error, dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()))
        except StateStoreError as agreed:
            if is_fatal:
                for store in self._stores():
                    store.fail(str(agreed))
            raise

    def _together(
        self, call: Callable[[OptimizerStateStore], Any], *, is_fatal: bool = True
    ) -> list[Any]:
        """Call every store of this rank, then agree with all ranks that none failed."""
        error: Exception | None = None
        results = []
        for store in self._stores():
            try:
                results.append(call(store))
            except StateStoreError as caught:
                error = error or caught
        self._agree(error, is_fatal=is_fatal)
        return results

    @property
    def _lone_layer_wise(self) -> StreamedLayerWiseOptimizer | None:
        """The layer-wise optimizer that would be the outermost one in a stock run."""
        # Tripwire: ../layer_wise_optimizer.py::LayerWiseDistributedOptimizer.count_zeros
        # Tripwire: ../layer_wise_optimizer.py::LayerWiseDistributedOptimizer.has_grad_norm_group
        # Tripwire: ../layer_wise_optimizer.py::LayerWiseDistributedOptimizer._get_grad_norm_for_group
        # Tripwire: ../layer_wise_optimizer.py::LayerWiseDistributedOptimizer.get_grad_norm
        first, *others = self.chained_optimizers or [None]
        return first if isinstance(first, StreamedLayerWiseOptimizer) and not others else None

    def count_zeros(self) -> Any:
        """Count over the ranks that stock's outermost optimizer counts over."""
        lone = self._lone_layer_wise
        return super().count_zeros() if lone is None else lone.count_zeros()

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """Ask the ranks that stock's outermost optimizer asks."""
        lone = self._lone_layer_wise
        if lone is not None:
            return bool(lone.has_grad_norm_group(grad_norm_group))
        return bool(super().has_grad_norm_group(grad_norm_group))

    def _get_grad_norm_for_group(self, grad_norm_group: str) -> Any:
        lone = self._lone_layer_wise
        if lone is not None:
            return lone._get_grad_norm_for_group(grad_norm_group)
        return super()._get_grad_norm_for_group(grad_norm_group)

    @torch.no_grad()
    def step(self) -> Any:
        """Step as upstream does; also a rank that skips the step tells the others that it is well.

        A threshold of the gradient norm lets ranks skip that have params of the main norm, and not
        those that have none.
        """
        self._num_agreed = 0
        result = super().step()
        while self._num_agreed < self._agreements_of_a_step:
            self._agree_on_step(None)
        return result

    @property
    def _agreements_of_a_step(self) -> int:
        return 2 if self.config.overlap_param_gather_with_optimizer_step else 1

    def _agree_on_step(self, error: Exception | None) -> None:
        self._num_agreed += 1
        self._agree(error)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step every child, agree with all ranks that no store failed, then gather params.

        Each child of upstream gathers params after its own step, so ranks would wait in the gather
        for one whose other child has failed. So the gathers are put off, of distributed optimizers
        with upstream's own means.

        Raises:
            StateStoreError: on all ranks, if the store of any failed.
        """
        is_overlapped = any(
            isinstance(each, DistributedOptimizer) and each.ddp_config.overlap_param_gather
            for each in self.chained_optimizers
        )
        deferred = [] if is_overlapped else self._enable_deferred_mxfp8_param_sync()
        success = True
        try:
            for position, optimizer in enumerate(self.chained_optimizers):
                success &= bool(optimizer.step_with_ready_grads())
                if position == 0 and self.config.overlap_param_gather_with_optimizer_step:
                    # Every rank has this child, and starts a gather before the others step.
                    self._agree_on_step(optimizer.take_step_error())
                    optimizer.model_chunks[0].start_param_sync(force_dispatch=True)
        finally:
            self._disable_deferred_mxfp8_param_sync()
        errors = [optimizer.take_step_error() for optimizer in self.chained_optimizers]
        self._agree_on_step(next((error for error in errors if error is not None), None))
        for optimizer in self.chained_optimizers:
            if isinstance(optimizer, StreamedLayerWiseOptimizer):
                optimizer.gather_params()
        self._start_deferred_mxfp8_param_sync(deferred)
        return success

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Refresh the main params of every child.

        Raises:
            StateStoreError: on all ranks, if the store of any failed.
        """
        error: Exception | None = None
        # Also the children after one that failed: their other ranks may be waiting for this one.
        state_dicts = self._split_state_dict(state_dict)
        for optimizer, part in zip(self.chained_optimizers, state_dicts, strict=True):
            try:
                optimizer.reload_model_params(state_dict=part)
            except StateStoreError as caught:
                error = error or caught
        self._agree(error)

    def _synchronize_steps(self) -> None:
        """Nothing to align: each store shows its one counter in all groups of its optimizer.

        Upstream's would fail at a child without params (a frozen dense model whose experts train).
        """

    def metrics(self) -> dict[str, float]:
        """Return what the last step of this rank's stores did: see `metrics_of`."""
        return metrics_of(self._stores())

    def close_stores(self) -> None:
        """Remove the files of this rank and give all memory back; nothing works after it.

        A process that makes its optimizer anew calls it first. It is no collective.
        """
        for store in self._stores():
            store.close()

    def drain_stores(self) -> None:
        """Wait until all that the last step began is on disk; a later step or save does that, too.

        Raises:
            StateStoreError: on all ranks, if a write of any had failed.
        """
        self._together(lambda store: store.drain())

    def offload_to_cpu(self) -> None:
        """Move what is resident to the host, and give the device slots back.

        Raises:
            StateStoreError: on all ranks, if a write of any had failed.
        """
        self._together(lambda store: store.release_slots())
        super().offload_to_cpu()

    def save_stores(self, base_dir: Path) -> None:
        """Save every store below ``base_dir``.

        Raises:
            StateStoreError: on all ranks, if the store of any failed. If it was a write of the last
                step, no store is usable.
        """
        self.drain_stores()  # what is lost at home is no mere failure to save
        generation = new_generation(dist.group.WORLD)
        prepared: dict[OptimizerStateStore, PreparedSnapshot] = {}

        def prepare(store: OptimizerStateStore) -> None:
            prepared[store] = store.prepare_save(base_dir, generation)

        try:
            self._together(prepare, is_fatal=False)
        except StateStoreError:
            for snapshot in prepared.values():
                snapshot.discard()
            raise
        self._together(lambda store: store.commit_save(prepared[store]), is_fatal=False)

    def load_stores(self, base_dir: Path) -> None:
        """Load every store from ``base_dir``.

        Raises:
            ValueError: on all ranks, if there is no streamed state at all.
            StateStoreError: on all ranks, if it is missing for some stores, damaged, foreign, or of
                different saves.
        """
        loaded = self._together(lambda store: store.load_from(base_dir))
        saves = [(store.steps, store.generation) for store in self._stores()]
        by_rank = gather((loaded, saves), dist.group.WORLD)
        flags = [flag for found, _ in by_rank.values() for flag in found]
        if not any(flags):
            raise ValueError(
                f"{base_dir}: the checkpoint holds no streamed optimizer state: load it with "
                "--no-load-optim to start afresh from its weights, or without "
                "--stream-optimizer-state-to-disk"
            )
        if not all(flags) or len({save for _, saves in by_rank.values() for save in saves}) > 1:
            reason = (
                f"{base_dir}: streamed optimizer state is incomplete or of different saves: "
                f"(found, [(step, save), ...]) by rank {by_rank}"
            )
            for store in self._stores():
                store.fail(reason)
            raise StateStoreError(reason)
