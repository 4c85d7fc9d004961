"""What tests of plans share: a plan as JSON, known arguments, and published models."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from megatron.core.optimizer.nvme_state_store.__main__ import main

ADAM = ("exp_avg", "exp_avg_sq")
PREFIX = "--stream-optimizer-state-"
PLAIN = ["--params", "2e9"]
FULL = [*PLAIN, "--gpu", "h200", "--host-gb", "128", "--disk-gb", "100", "--activation-gb", "50"]
FAST = ["--pcie-gb-per-s", "50", "--disk-gb-per-s", "2"]


def plan(*arguments: object) -> dict[str, Any]:
    """Return a plan of arguments, as JSON; its exit status must say whether anything fits."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["plan", "--json", *map(str, arguments)])
    made: dict[str, Any] = json.loads(out.getvalue())
    assert status == int(made["suggested"] is None)
    return made


def only(made: dict[str, Any], main_storage: str = "fp32", moment_dtype: str = "fp32") -> Any:
    """Return the one choice with these formats, or the one with nothing in memory."""
    formats = (main_storage, moment_dtype)
    return next(
        each for each in made["choices"] if (each["main_storage"], each["moment_dtype"]) == formats
    )


LLAMA_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
    **{"vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192},
}
QWEN2_05B = {
    **{"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24},
    **{"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864},
    **{"vocab_size": 151936, "tie_word_embeddings": True},
}
QWEN3_8B = {
    **{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288},
    **{"vocab_size": 151936, "tie_word_embeddings": False},
}
QWEN3_30B = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144},
    **{"moe_intermediate_size": 768, "num_experts": 128, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False},
}
MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
    **{"num_local_experts": 8, "vocab_size": 32000, "tie_word_embeddings": False},
}
DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432},
    **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280},
    **{"tie_word_embeddings": False, "num_nextn_predict_layers": 1},
}
