"""What the streamed optimizers share: upstream's step, with the state in a store.

`MixedPrecisionOptimizer.step_with_ready_grads` calls the torch optimizer's `step` and then copies
main params to model params. Here the first streams and publishes, and the second does nothing; all
else that upstream does around them stays its own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..optimizer import MixedPrecisionOptimizer
from .config import GB, store_config
from .errors import StateStoreError
from .model_shards import Entry
from .optimizer_state import shallow_copy
from .resident import Resident
from .store import OptimizerStateStore

MARKER = "nvme_state_store"
FORMAT = 1
"""What stands in a checkpoint in the place of the optimizer's tensors: its format, and how many
steps the state has seen, so that nobody goes on without having loaded it."""
_SCALER = "grad_scaler"

logger = logging.getLogger(__name__)


class _StreamingStep:
    """Stands where the torch optimizer stood: its groups and state, but a step that streams."""

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


def refuse(name: str) -> Callable[..., Any]:
    """Return a method that takes the place of upstream's ``name`` and refuses to be called."""

    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{name}: the optimizer state is streamed from disk and is in no tensor; "
            "save_checkpoint and load_checkpoint keep it beside the model, with --ckpt-format "
            "torch_dist"
        )

    refused.__doc__ = f"Refuse: `{name}` would read or write evicted tensors."
    return refused


def require_known_ddp(ddp_config: Any) -> None:
    """Refuse ways to wrap the model that own its weights or read all main params at once.

    Raises:
        ValueError: one of them is on.
    """
    # Tripwire: ../../distributed/distributed_data_parallel_config.py::DistributedDataParallelConfig.fp4_param_gather
    # Tripwire: ../../distributed/distributed_data_parallel_config.py::DistributedDataParallelConfig.use_megatron_fsdp
    for name in ("fp4_param_gather", "use_megatron_fsdp"):
        if getattr(ddp_config, name):
            raise ValueError(
                f"--stream-optimizer-state-to-disk cannot be used with {name}: it reads all main "
                "params at once; leave it out"
            )


def log_grad_copies(ddp_config: Any, entries: Sequence[Entry]) -> None:
    """Say what upstream's FP32 copies of 16-bit gradients take, if it makes them.

    It makes all of them before it knows the norm that clips them, so not bucket by bucket.
    """
    # Tripwire: ../../distributed/distributed_data_parallel_config.py::DistributedDataParallelConfig.grad_reduce_in_fp32
    if not ddp_config.grad_reduce_in_fp32:
        numel = sum(entry.record.numel for entry in entries)
        logger.info(
            "NVMe optimizer state: a step makes FP32 copies of 16-bit gradients, %.3f GB on the "
            "device; with gradients reduced in FP32 there are none",
            numel * torch.float32.itemsize / GB,
        )


def param_names(model_chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """Return fully qualified names of params, with the model chunk before them."""
    return {
        param: f"{chunk}.{name}"
        for chunk, module in enumerate(model_chunks)
        for name, param in module.named_parameters()
    }


class StreamedOptimizer(MixedPrecisionOptimizer):
    """A mixed-precision optimizer that streams; stands before upstream's class among the bases.

    The store exists from construction on, and is initialized by `StreamedChainedOptimizer`, when
    all ranks can agree on whether it worked.
    """

    optimizer: Any
    _nvme_state_store: OptimizerStateStore | None = None
    _step_error: StateStoreError | None = None

    def _stream(
        self,
        entries: Sequence[Entry],
        residents: Sequence[Resident],
        group: dist.ProcessGroup | None,
        peers: Sequence[Sequence[dist.ProcessGroup]] | None = None,
    ) -> None:
        """Put a store where the torch optimizer is; the arguments are the store's."""
        master = self.optimizer
        self._nvme_state_store = OptimizerStateStore(
            store_config(self.config),
            master,
            entries,
            residents,
            group,
            torch.device("cuda", torch.cuda.current_device()),
            name="optimizer0",
            init_state_fn=self.init_state_fn,
            peers=peers,
        )
        self.optimizer = _StreamingStep(master, self._nvme_state_store.step)

    def nvme_state_stores(self) -> Iterator[OptimizerStateStore]:
        """Yield the store; none if this rank has no trainable param here."""
        if self._nvme_state_store is not None:
            yield self._nvme_state_store

    # ------------------------------------------------------------------------------------- the step

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step as upstream does; a failure of the store is kept for `take_step_error`.

        All ranks learn of it from `StreamedChainedOptimizer`, before any of them gathers params.
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

    # ----------------------------------------------------------------- offloading and checkpoints

    def offload_to_cpu(self) -> None:
        """Move what is resident to the host; the rest is on disk already."""
        if self._nvme_state_store is not None:
            super(StreamedOptimizer, self._of_resident_params()).offload_to_cpu()

    def restore_from_cpu(self) -> None:
        """Move what is resident back."""
        if self._nvme_state_store is not None:
            super(StreamedOptimizer, self._of_resident_params()).restore_from_cpu()

    def _of_resident_params(self) -> StreamedOptimizer:
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

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return format marker and loss scaler; the rest is saved by the checkpoint hooks."""
        content: dict[str, Any] = {MARKER: {"format": FORMAT, "steps": self._steps()}}
        if self.grad_scaler is not None:
            content[_SCALER] = self.grad_scaler.state_dict()
        return content

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what `state_dict` does: it is the same on all ranks."""
        return self.state_dict()

    def _steps(self) -> int | None:
        return None if self._nvme_state_store is None else self._nvme_state_store.steps

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check the format marker, load the loss scaler; the hooks have loaded the rest.

        Raises:
            ValueError: the checkpoint is not one of a streamed optimizer, or its state was not
                loaded.
        """
        marker = state_dict.get(MARKER)
        if not isinstance(marker, dict) or marker.get("format") != FORMAT:
            raise ValueError(
                f"the checkpoint holds no streamed optimizer state (marker {marker}, expected "
                f"format {FORMAT}): load it with --no-load-optim to start afresh from its weights, "
                "or without --stream-optimizer-state-to-disk"
            )
        if marker.get("steps", self._steps()) != self._steps():
            raise ValueError(
                f"the checkpoint's optimizer state has seen {marker['steps']} steps, the state "
                f"here {self._steps()}: it was not loaded; load_checkpoint does that, or "
                "load_stores of the outermost optimizer, before this"
            )
        if self.grad_scaler is None:
            return
        if _SCALER in state_dict:
            self.grad_scaler.load_state_dict(state_dict[_SCALER])
        else:
            logger.warning("the checkpoint holds no state of the loss scaler: it starts afresh")
