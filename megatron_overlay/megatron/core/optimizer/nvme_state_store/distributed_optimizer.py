"""`DistributedOptimizer` whose FP32 main params and state live in a state store."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ..distrib_optimizer import DistributedOptimizer
from .checkpoint import EntryRecord
from .model_shards import Entry
from .quantised_params import in_sixteen_bits, quantised, require_known
from .resident import Resident
from .streamed_optimizer import (
    StreamedOptimizer,
    log_grad_copies,
    param_names,
    refuse,
    require_known_ddp,
)


class StreamedDistributedOptimizer(StreamedOptimizer, DistributedOptimizer):
    """A `DistributedOptimizer` that streams its state; upstream does everything else."""

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, config, *args, **kwargs)
        if self.is_stub_optimizer:
            return
        require_known_ddp(self.ddp_config)
        # Also those of which this rank has no part, so that all ranks refuse.
        params = (param for buffer in self.buffers for param in buffer.params)
        require_known(params, config.stream_optimizer_state_main_storage)
        self._streamed_params: list[torch.nn.Parameter] = []
        entries = self._entries()
        log_grad_copies(self.ddp_config, entries)
        self._stream(entries, self._residents(), self.data_parallel_group)

    # ---------------------------------------------------------------------- what the store is told

    def _records(self) -> Callable[[torch.nn.Parameter], EntryRecord]:
        names = param_names(self.model_chunks)

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
                mine = record(param)
                cast = quantised(param, mine.start, mine.numel)
                entries.append(Entry(mine, main, group, self._shard_reader(param), cast))
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

    def _copy_main_params_to_model_params(self) -> None:
        """Cast quantised params from what the step parked; other 16-bit ones it has published.

        Upstream's call is a collective over all quantised params of all ranks: a rank that owns
        none of them makes it, too. See [Note: Quantised params]. It also copies native FP32 shards
        into the buffer, of which they are views no longer once they were offloaded and restored.
        """
        # Tripwire: ../distrib_optimizer.py::DistributedOptimizer._get_fp8_params_and_shard_fp32_from_fp8
        # Tripwire: ../../distributed/distributed_data_parallel_config.py::DistributedDataParallelConfig.fp8_param_gather
        store = self._nvme_state_store
        if store is None:
            return
        view = copy.copy(self)
        view.model_float16_groups = [[] for _ in self.model_float16_groups]
        view.shard_fp32_from_float16_groups = [[] for _ in self.model_float16_groups]
        for param, entry in zip(self._streamed_params, store.entries, strict=True):
            if entry.quantised is not None:
                view.model_float16_groups[entry.group].append(param)
                view.shard_fp32_from_float16_groups[entry.group].append(entry.parked())
        super(StreamedOptimizer, view)._copy_main_params_to_model_params()
        if self.ddp_config.fp8_param_gather:
            store.remember_quantised()

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
            values = in_sixteen_bits(tensors[param]).reshape(-1)
            out.copy_(values[begin : begin + out.numel()])

        self._nvme_state_store.refresh_main_from_model_params(copy_from_state_dict)
        for params, shards in zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True):
            for param, shard in zip(params, shards, strict=True):
                owned = self._get_model_param_range_map(param)["param"]
                shard.data.copy_(tensors[param].reshape(-1)[owned.start : owned.end])

    save_parameter_state = refuse("save_parameter_state")
    load_parameter_state = refuse("load_parameter_state")
    get_parameter_state_dp_zero = refuse("get_parameter_state_dp_zero")
    get_parameter_state_dp_reshardable = refuse("get_parameter_state_dp_reshardable")
    load_parameter_state_from_dp_zero = refuse("load_parameter_state_from_dp_zero")
    load_parameter_state_from_dp_reshardable = refuse("load_parameter_state_from_dp_reshardable")
    load_parameter_state_from_fs_model_space = refuse("load_parameter_state_from_fs_model_space")
    load_parameter_state_from_fully_reshardable = refuse(
        "load_parameter_state_from_fully_reshardable"
    )
