"""`LayerWiseDistributedOptimizer` whose children stream, and whose gather can be put off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..layer_wise_optimizer import LayerWiseDistributedOptimizer
from ..optimizer import ChainedOptimizer
from .errors import StateStoreError
from .float16_optimizer import StreamedFloat16Optimizer, streamed_float16_optimizer
from .store import OptimizerStateStore
from .streamed_optimizer import refuse


class StreamedLayerWiseOptimizer(LayerWiseDistributedOptimizer):
    """A `LayerWiseDistributedOptimizer` that streams; args are upstream's."""

    def __init__(
        self,
        optimizers: list[Any],
        config: Any,
        pg_collection: Any = None,
        init_state_fn_list: Any = None,
        model_chunks: Any = None,
    ) -> None:
        self._streamed = streamed_float16_optimizer(model_chunks, pg_collection)
        super().__init__(optimizers, config, pg_collection, init_state_fn_list, model_chunks)

    @property
    def float16_optimizer_class(self) -> Callable[..., StreamedFloat16Optimizer]:
        """What upstream wraps its base optimizers with."""
        return self._streamed

    def nvme_state_stores(self) -> Iterator[OptimizerStateStore]:
        """Yield the stores of the children."""
        for optimizer in self.chained_optimizers:
            yield from optimizer.nvme_state_stores()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step every child; `StreamedChainedOptimizer` calls `gather_params` afterwards."""
        return bool(ChainedOptimizer.step_with_ready_grads(self))

    def take_step_error(self) -> StateStoreError | None:
        """Return the first failure of the children's last step, once."""
        errors = [optimizer.take_step_error() for optimizer in self.chained_optimizers]
        return next((error for error in errors if error is not None), None)

    @torch.no_grad()
    def gather_params(self) -> None:
        """Gather the updated params: the tail of upstream's `step_with_ready_grads`."""
        if self.overlap_param_gather:
            return
        if self.use_buffer_param_sync:
            self.start_param_sync_for_bucket_group_subset()
        else:
            self.allgather_params()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the children's; there is no sharded tensor in it whose replicas would matter."""
        return ChainedOptimizer.sharded_state_dict(self, *args, **kwargs)

    def _synchronize_steps(self) -> None:
        """Nothing to align: each store shows its one counter in all groups of its optimizer."""

    save_state_dict_to_file = refuse("save_state_dict_to_file")
    load_state_dict_from_file = refuse("load_state_dict_from_file")
