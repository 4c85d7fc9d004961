"""A node, and what lies on one of its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from ..budgets import HOST_RESERVE, MIN_HOST_RESERVE_BYTES


@dataclass(frozen=True)
class Machine:
    """A node; what is not known is None.

    Attributes:
        gpus: of a node.
        gpu_bytes: memory of each.
        host_bytes: memory of the node.
        disk_bytes: space in all directories of the node.
        reserve_bytes: of each GPU for all but params, gradients and the optimizer: activations,
            workspaces of libraries, CUDA itself.
    """

    gpus: int
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    reserve_bytes: int = 0

    @property
    def usable_host_bytes(self) -> int | None:
        """What the ranks of a node may pin together: what ``auto`` leaves free stays free."""
        if self.host_bytes is None:
            return None
        reserve = max(int(HOST_RESERVE * self.host_bytes), MIN_HOST_RESERVE_BYTES)
        return max(self.host_bytes - reserve, 0)


@dataclass(frozen=True)
class DeviceBytes:
    """What lies on one GPU at the peak of a step, in bytes.

    Attributes:
        params: of the model.
        grads: with FP32 copies of the shard's, if they are BF16.
        state: main params and moments: all of them in a stock run, else the device tier.
        slots: of the stream, with FP32 copies of what is stored otherwise.
        temporary: of the inner optimizer.
        reserve: see `Machine`.
    """

    params: int
    grads: int
    state: int
    slots: int
    temporary: int
    reserve: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.params + self.grads + self.state + self.slots + self.temporary + self.reserve
