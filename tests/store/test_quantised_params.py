"""What the store is told of quantised params, and which of them are refused."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer.nvme_state_store import quantised_params


class Float8Tensor(torch.Tensor):
    """Of the name of a class that is known."""


class MXFP8Tensor(torch.Tensor):
    """Of the name of one that is not."""


def of(kind: type[torch.Tensor]) -> torch.Tensor:
    return torch.zeros(4).as_subclass(kind)


def test_a_class_that_was_not_compared_with_stock_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it stands among known ones; the message says which recipes there are."""
    monkeypatch.setattr(quantised_params, "is_quantised", lambda param: True)
    quantised_params.require_known([of(Float8Tensor)], "fp32")

    with pytest.raises(ValueError, match=r"class MXFP8Tensor.*tensorwise and blockwise"):
        quantised_params.require_known([of(Float8Tensor), of(MXFP8Tensor)], "fp32")


def test_a_quantised_param_has_no_upper_half_for_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that streams otherwise."""
    monkeypatch.setattr(quantised_params, "is_quantised", lambda param: True)

    with pytest.raises(ValueError, match=r"split cannot be used with params of class Float8Tensor"):
        quantised_params.require_known([of(Float8Tensor)], "split")


def test_a_plain_param_is_not_quantised() -> None:
    """Nor is one of 16 bits."""
    for dtype in (torch.float32, torch.bfloat16):
        param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
        assert quantised_params.quantised(param, 0, 4) is None
        quantised_params.require_known([param], "split")


def test_values_come_from_before_the_first_cast_as_long_as_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then they are dequantised; of both the shard alone, in the param's dtype."""
    param = of(Float8Tensor)
    initial: list[torch.Tensor | None] = [torch.arange(4.0)]
    attributes = {
        "_scale_inv": torch.ones(1),
        "get_high_precision_init_val": lambda: initial[0],
        "clear_high_precision_init_val": lambda: initial.__setitem__(0, None),
    }
    vars(param).update(attributes)
    monkeypatch.setattr(quantised_params, "is_quantised", lambda param: True)
    monkeypatch.setattr(
        quantised_params, "dequantize_fp8_tensor", lambda param: torch.full((4,), 7)
    )

    found = quantised_params.quantised(param, 1, 2)

    assert found is not None
    assert found.values().tolist() == [1, 2]
    assert found.scales().tolist() == list(torch.ones(1).view(torch.uint8))
    found.release()
    assert found.values().tolist() == [7, 7]
