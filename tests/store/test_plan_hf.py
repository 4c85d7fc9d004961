"""A config.json gives sizes, or says what is missing or not understood."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store.plan.hf import hf_architecture

from tests.store.plans import LLAMA_8B


def test_what_is_not_understood_is_warned_of() -> None:
    config = {**LLAMA_8B, "mamba_d_state": 16, "vision_config": {"a": 1}, "rope_theta": 1e6}
    config["layer_types"] = ["linear_attention", "full_attention"]

    (warning,) = hf_architecture(config)[1]

    assert "mamba_d_state" in warning
    assert "vision_config" in warning
    assert "linear_attention" in warning
    assert "rope_theta" not in warning
    assert hf_architecture(LLAMA_8B)[1] == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", None, "expected hidden_size, a positive whole number"),
        ("vocab_size", "many", "vocab_size many: expected a whole number"),
    ],
)
def test_a_config_without_a_size_says_which(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_architecture({**LLAMA_8B, name: value})
