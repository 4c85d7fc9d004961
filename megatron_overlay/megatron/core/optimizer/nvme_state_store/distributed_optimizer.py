"""`DistributedOptimizer` whose FP32 main params and state live in a state store."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch

from ..distrib_optimizer import DistributedOptimizer
from .checkpoint import EntryRecord
from .config import store_config
from .errors import StateStoreError
from .model_shards import Entry
from .optimizer_state import shallow_copy
from .resident import Resident
from .store import OptimizerStateStore

MARKER = "nvme_state_store"
FORMAT = {"format": 1}
"""What stands in a checkpoint in the place of the optimizer's tensors."""
_SCALER = "grad_scaler"

logger = logging.getLogger(__name__)


class _StreamingStep:
    """Stands where the torch optimizer stood: its groups and state, but a step that streams.

    `MixedPrecisionOptimizer.step_with_ready_grads` calls `step` and then copies main params to
    model params; this step has published them already.
    """

    def __init__(self, master: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
        self.master = master
        self.step = step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The master's param groups, live."""
        return self.master.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.master.param_groups = groups

    @property
    def state(self) -> Any:
        """The master's state: of resident params only."""
        return self.master.state

    @state.setter
    def state(self, state: Any) -> None:
        self.master.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The master's defaults."""
        return self.master.defaults


def _refuse(name: str) -> Callable[..., Any]:
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{name}: the optimizer state is streamed from disk and is in no tensor; "
            "save_checkpoint and load_checkpoint keep it beside the model, with --ckpt-format "
            "torch_dist"
        )

    refused.__doc__ = f"Refuse: `{name}` would read or write evicted tensors."
    return refused


class StreamedDistributedOptimizer(DistributedOptimizer):
    """A `DistributedOptimizer` that streams its state; upstream does everything else.

    The store exists from construction on, and is initialized by `StreamedChainedOptimizer`, when
    all ranks can agree on whether it worked.
    """

    optimizer: Any
    _nvme_state_store: OptimizerStateStore | None = None

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, config, *args, **kwargs)
        self._step_error: StateStoreError | None = None
        if self.is_stub_optimizer:
            return
        # Tripwire: ../../distributed/distributed_data_parallel_config.py::DistributedDataParallelConfig.fp8_param_gather
        # Tripwire: ../../distributed/distributed_data_parallel_config.py::DistributedDataParallelConfig.fp4_param_gather
        # Tripwire: ../../distributed/distributed_data_parallel_config.py::DistributedDataParallelConfig.use_megatron_fsdp
        for name in ("fp8_param_gather", "fp4_param_gather", "use_megatron_fsdp"):
            if getattr(self.ddp_config, name):
                raise ValueError(
                    f"--stream-optimizer-state-to-disk cannot be used with {name}: it reads all "
                    f"main params at once; leave it out"
                )
        self._streamed_params: list[torch.nn.Parameter] = []
        master = self.optimizer
        self._nvme_state_store = OptimizerStateStore(
            store_config(config),
            master,
            self._entries(),
            self._residents(),
            self.data_parallel_group,
            torch.device("cuda", torch.cuda.current_device()),
            name="optimizer0",
            init_state_fn=self.init_state_fn,
        )
        self.optimizer = _StreamingStep(master, self._nvme_state_store.step)

    # ---------------------------------------------------------------------- what the store is told

    def _records(self) -> Callable[[torch.nn.Parameter], EntryRecord]:
        names = {
            param: f"{chunk}.{name}"
            for chunk, module in enumerate(self.model_chunks)
            for name, param in module.named_parameters()
        }

        def record(param: torch.nn.Parameter) -> EntryRecord:
            owned = self._get_model_param_range_map(param)["param"]
            return EntryRecord(names[param], tuple(param.shape), owned.start, owned.size)

        return record

    def _entries(self) -> list[Entry]:
        record = self._records()
        entries = []
        for group, (params, mains) in enumerate(
            zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True)
        ):
            for param, main in zip(params, mains, strict=True):
                self._streamed_params.append(param)
                entries.append(Entry(record(param), main, group, self._shard_reader(param)))
        return entries

    def _residents(self) -> list[Resident]:
        record = self._records()
        return [
            Resident(record(param), shard, group)
            for group, (params, shards) in enumerate(
                zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True)
            )
            for param, shard in zip(params, shards, strict=True)
        ]

    def _shard_reader(self, param: torch.nn.Parameter) -> Callable[[], torch.Tensor]:
        """Return a function that finds the shard in the buffer that the param gather reads.

        The buffer is looked up at every call: DDP may have offloaded and restored it.
        """
        # Tripwire: ../distrib_optimizer.py::DistributedOptimizer._build_model_gbuf_param_range_map
        # Tripwire: ../distrib_optimizer.py::DistributedOptimizer._build_model_param_gbuf_map
        # Tripwire: ../../distributed/param_and_grad_buffer.py::_ParamAndGradBuffer.buckets
        # Tripwire: ../../distributed/param_and_grad_buffer.py::_ParamAndGradBucket.param_data
        owned = self._get_model_param_range_map(param)["gbuf_world_in_bucket"]
        buffer, _, bucket = self.model_param_gbuf_map[param]

        def shard() -> torch.Tensor:
            data: torch.Tensor = self.buffers[buffer].buckets[bucket].param_data
            return data.view(-1)[owned.start : owned.end]

        return shard

    # ------------------------------------------------------------------------------------- the step

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step as upstream does; a failure of the store is kept for `take_step_error`.

        All ranks that gather from each other fail together, so none of them starts the gather.
        Ranks outside that group learn of it from `StreamedChainedOptimizer`.
        """
        try:
            return bool(super().step_with_ready_grads())
        except StateStoreError as error:
            self._step_error = error
            return False

    def take_step_error(self) -> StateStoreError | None:
        """Return the failure of the last step, once."""
        error, self._step_error = self._step_error, None
        return error

    def _copy_main_params_to_model_params(self) -> None:
        """Nothing is left to copy: the step published every bucket while it was resident.

        Native FP32 shards are views of the buffer that the gather reads.
        """

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Refresh the main params on disk, from the model or from more precise tensors."""
        if self._nvme_state_store is None:
            return
        if state_dict is None:
            self._nvme_state_store.refresh_main_from_model_params()
            return
        tensors = self._build_model_param_to_state_dict_param_map(state_dict)

        def copy_from_state_dict(entry: int, start: int, out: torch.Tensor) -> None:
            param = self._streamed_params[entry]
            begin = self._get_model_param_range_map(param)["param"].start + start
            out.copy_(tensors[param].reshape(-1)[begin : begin + out.numel()])

        self._nvme_state_store.refresh_main_from_model_params(copy_from_state_dict)
        for params, shards in zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True):
            for param, shard in zip(params, shards, strict=True):
                owned = self._get_model_param_range_map(param)["param"]
                shard.data.copy_(tensors[param].reshape(-1)[owned.start : owned.end])

    # ----------------------------------------------------------------- offloading and checkpoints

    def offload_to_cpu(self) -> None:
        """Move what is resident to the host; the rest is on disk already."""
        if self._nvme_state_store is not None:
            super(StreamedDistributedOptimizer, self._of_resident_params()).offload_to_cpu()

    def restore_from_cpu(self) -> None:
        """Move what is resident back."""
        if self._nvme_state_store is not None:
            super(StreamedDistributedOptimizer, self._of_resident_params()).restore_from_cpu()

    def _of_resident_params(self) -> StreamedDistributedOptimizer:
        """Return a view of this optimizer whose groups hold resident params only."""
        assert self._nvme_state_store is not None, "a stub has no params"
        kept = {id(resident.param) for resident in self._nvme_state_store.resident}
        view = copy.copy(self)
        view.optimizer = shallow_copy(self.optimizer.master)
        view.optimizer.param_groups = [
            {**group, "params": [param for param in group["params"] if id(param) in kept]}
            for group in self.optimizer.param_groups
        ]
        return view

    def state_dict(self) -> dict[str, Any]:
        """Return format marker and loss scaler; the rest is saved by the checkpoint hooks."""
        content: dict[str, Any] = {MARKER: dict(FORMAT)}
        if self.grad_scaler is not None:
            content[_SCALER] = self.grad_scaler.state_dict()
        return content

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what `state_dict` does: it is the same on all ranks."""
        return self.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check the format marker, load the loss scaler; the hooks load the rest.

        Raises:
            ValueError: the checkpoint is not one of a streamed optimizer.
        """
        if state_dict.get(MARKER) != FORMAT:
            raise ValueError(
                "the checkpoint holds no streamed optimizer state (marker "
                f"{state_dict.get(MARKER)}, expected {FORMAT}): load it with --no-load-optim to "
                "start afresh from its weights, or without --stream-optimizer-state-to-disk"
            )
        if self.grad_scaler is None:
            return
        if _SCALER in state_dict:
            self.grad_scaler.load_state_dict(state_dict[_SCALER])
        else:
            logger.warning("the checkpoint holds no state of the loss scaler: it starts afresh")

    save_parameter_state = _refuse("save_parameter_state")
    load_parameter_state = _refuse("load_parameter_state")
    get_parameter_state_dp_zero = _refuse("get_parameter_state_dp_zero")
    get_parameter_state_dp_reshardable = _refuse("get_parameter_state_dp_reshardable")
    load_parameter_state_from_dp_zero = _refuse("load_parameter_state_from_dp_zero")
    load_parameter_state_from_dp_reshardable = _refuse("load_parameter_state_from_dp_reshardable")
    load_parameter_state_from_fs_model_space = _refuse("load_parameter_state_from_fs_model_space")
    load_parameter_state_from_fully_reshardable = _refuse(
        "load_parameter_state_from_fully_reshardable"
    )
