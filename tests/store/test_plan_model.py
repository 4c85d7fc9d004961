"""Params are counted as they were published."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store.plan.hf import hf_architecture
from megatron.core.optimizer.nvme_state_store.plan.model import model_of

from tests.store.plans import DEEPSEEK_V3, LLAMA_8B, MIXTRAL, QWEN2_05B, QWEN3_8B, QWEN3_30B


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_8B, 8_030_261_248),
        (QWEN2_05B, 494_032_768),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_30B, 30_532_122_624),
        (MIXTRAL, 46_702_792_704),
        # Less the router's corrections, which no optimizer steps: one for each expert of 58 layers.
        (DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_count_is_the_published_one(config: dict[str, Any], published: int) -> None:
    architecture, _ = hf_architecture(config)
    assert model_of(architecture).numel() == published
