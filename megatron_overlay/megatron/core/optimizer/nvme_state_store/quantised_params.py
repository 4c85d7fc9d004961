"""Quantised model params: how the store sees what Transformer Engine keeps of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.fp4_utils import is_nvfp4tensor
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

from ..distrib_optimizer import DistributedOptimizer
from .formats import SPLIT
from .model_shards import Quantised

SCALES = {"Float8Tensor": "_scale_inv", "Float8BlockwiseQTensor": "_rowwise_scale_inv"}
"""Classes whose shards are bytes, one a value, and where they keep the scales that belong to these:
the recipes delayed and tensorwise, and blockwise."""


def is_quantised(param: torch.Tensor) -> bool:
    """Return whether a param is of a class of Transformer Engine's that keeps few bits."""
    return bool(DistributedOptimizer._is_distopt_quantized_param(param) or is_nvfp4tensor(param))


def require_known(params: Iterable[torch.Tensor], main_storage: str) -> None:
    """Refuse quantised params of which it was not shown that streaming casts them as stock does.

    Raises:
        ValueError: MXFP8 shares the gradients' memory, NVFP4 has two values in a byte, and what a
            recipe of one's own does is unknown. ``split`` main params need the others' 16 bits.
    """
    for param in params:
        kind = type(param).__name__
        if is_quantised(param) and main_storage == SPLIT.name:
            raise ValueError(
                f"--stream-optimizer-state-main-storage split cannot be used with params of class "
                f"{kind}: they are not the upper half of the main params; use fp32"
            )
        if is_quantised(param) and kind not in SCALES:
            raise ValueError(
                f"--stream-optimizer-state-to-disk cannot be used with params of class {kind}: "
                "what it streams are 16-bit params and 8-bit ones of the recipes delayed, "
                "tensorwise and blockwise; use --fp8-recipe with one of these, or leave out "
                "--fp8-param-gather"
            )


def quantised(param: torch.Tensor, start: int, numel: int) -> Quantised | None:
    """Return what the store must know of the shard ``[start, start + numel)`` of a param."""
    if not is_quantised(param):
        return None
    scales = SCALES[type(param).__name__]

    def values() -> torch.Tensor:
        initial = getattr(param, "get_high_precision_init_val", lambda: None)()
        whole = dequantize_fp8_tensor(param) if initial is None else initial
        shard: torch.Tensor = whole.view(-1)[start : start + numel]
        return shard.to(param.device)

    def scale_bytes() -> torch.Tensor:
        tensor: torch.Tensor = getattr(param, scales)
        return tensor.contiguous().view(-1).view(torch.uint8)

    return Quantised(
        dtype=param.dtype,
        values=values,
        scales=scale_bytes,
        release=getattr(param, "clear_high_precision_init_val", lambda: None),
    )


def in_sixteen_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a state dict as 16-bit or FP32 values."""
    values: torch.Tensor = dequantize_fp8_tensor(tensor) if is_float8tensor(tensor) else tensor
    return values
