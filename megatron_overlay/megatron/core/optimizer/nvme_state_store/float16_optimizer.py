"""`Float16OptimizerWithFloat16Params` whose FP32 main params and state live in a state store.

It sees whole params: where there is no distributed optimizer, and under the layer-wise one, which
gives each rank some of the params. Nothing is gathered here, so the store meets no other ranks but
those with which the update of a matrix communicates (Muon under tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from ..optimizer import Float16OptimizerWithFloat16Params
from .checkpoint import EntryRecord
from .model_shards import Entry
from .quantised_params import is_quantised
from .resident import Resident
from .streamed_optimizer import (
    StreamedOptimizer,
    log_grad_copies,
    param_names,
    require_known_ddp,
)


def streamed_float16_optimizer(
    model_chunks: Sequence[torch.nn.Module] | None, pg_collection: ProcessGroupCollection | None
) -> Callable[..., StreamedFloat16Optimizer]:
    """Return what takes upstream's arguments and knows the model and its process groups."""
    return partial(
        StreamedFloat16Optimizer, model_chunks=model_chunks or (), pg_collection=pg_collection
    )


class StreamedFloat16Optimizer(StreamedOptimizer, Float16OptimizerWithFloat16Params):
    """A `Float16OptimizerWithFloat16Params` that streams; upstream does everything else.

    Args:
        model_chunks: whose params these are.
        pg_collection: None: those of `parallel_state`.
        args: upstream's.
    """

    def __init__(
        self,
        *args: Any,
        model_chunks: Sequence[torch.nn.Module],
        pg_collection: ProcessGroupCollection | None,
    ) -> None:
        super().__init__(*args)
        if self.is_stub_optimizer:
            return
        for chunk in model_chunks:  # also params of other ranks, so that all refuse
            if hasattr(chunk, "ddp_config"):
                require_known_ddp(chunk.ddp_config)
            for param in chunk.parameters():
                if is_quantised(param):
                    raise ValueError(
                        "--stream-optimizer-state-to-disk cannot be used with quantised params "
                        f"(here {type(param).__name__}) but under the distributed optimizer: any "
                        "other casts each param by itself when all main params are there; leave "
                        "out --fp8-param-gather"
                    )
        names = param_names(model_chunks)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        peers = [_peers(group, pg_collection) for group in self.optimizer.param_groups]
        entries = self._entries(names)
        for chunk in model_chunks[:1]:  # all are wrapped alike
            if hasattr(chunk, "ddp_config"):
                log_grad_copies(chunk.ddp_config, entries)
        self._stream(entries, self._residents(names), None, peers)

    def _entries(self, names: dict[torch.nn.Parameter, str]) -> list[Entry]:
        return [
            Entry(_record(names, param), main, group, partial(_flat, param))
            for group, (params, mains) in enumerate(
                zip(self.float16_groups, self.fp32_from_float16_groups, strict=True)
            )
            for param, main in zip(params, mains, strict=True)
        ]

    def _residents(self, names: dict[torch.nn.Parameter, str]) -> list[Resident]:
        return [
            Resident(_record(names, param), param, group)
            for group, params in enumerate(self.fp32_from_fp32_groups)
            for param in params
        ]

    def _copy_main_params_to_model_params(self) -> None:
        """Nothing is left to copy: the step published every bucket while it was resident.

        Native FP32 params are stepped where the model has them.
        """

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Refresh the main params on disk from the model.

        Raises:
            ValueError: they should come from a state dict, which upstream cannot do either.
        """
        if state_dict is not None:
            raise ValueError(
                "--load-main-params-from-ckpt: Megatron loads main params from a checkpoint under "
                "the distributed optimizer only; leave it out"
            )
        if self._nvme_state_store is not None:
            self._nvme_state_store.refresh_main_from_model_params()


def _record(names: dict[torch.nn.Parameter, str], param: torch.nn.Parameter) -> EntryRecord:
    return EntryRecord(names[param], tuple(param.shape), 0, param.numel())


def _flat(param: torch.nn.Parameter) -> torch.Tensor:
    """Return a param's values where they are now: DDP may have offloaded and restored them."""
    return param.data.view(-1)


def _peers(
    group: dict[str, Any], pg_collection: ProcessGroupCollection
) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of more than one rank with which updates of a param group may communicate.

    Upstream tells expert params from others by their names, this by their group; an update over
    fewer ranks than meet here is safe.
    """
    # Tripwire: ../emerging_optimizers.py::TensorParallelMuon.orthogonalize
    # Tripwire: ../emerging_optimizers.py::TensorParallelMuon.scaled_orthogonalize_fn_with_gtp_remat
    is_expert = group.get("is_expert_parallel", False)
    names = ("expt_tp", "expt_gtp_remat") if is_expert else ("tp", "gtp_remat")
    found = (getattr(pg_collection, name, None) for name in names)
    return tuple(each for each in found if each is not None and dist.get_world_size(each) > 1)
