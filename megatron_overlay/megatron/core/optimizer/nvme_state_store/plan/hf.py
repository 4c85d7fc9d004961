"""The architecture in a config.json of Hugging Face's kind.

Only sizes are read: no model is loaded, and the library is not imported. What is in a config, looks
like a size and is not known here is warned of, since the count may then be wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .architecture import Architecture, LatentAttention

# Families whose MLPs have two matrices, and LayerNorm and biases everywhere.
_PLAIN_MLP = {"gpt2", "gpt_neox", "gptj", "opt", "bloom", "phi", "falcon", "starcoder2"}
_NORM_OF_HEADS = {"qwen3", "qwen3_moe"}
_BIAS_OF_QKV = {"qwen2", "qwen2_moe"}
_GATE_OF_SHARED = {"qwen2_moe"}

_KNOWN = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "tie_word_embeddings", "model_type"),
    *("num_experts", "n_routed_experts", "num_local_experts", "moe_intermediate_size"),
    *("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"),
    *("moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "attention_bias", "mlp_bias"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("index_n_heads", "index_head_dim", "use_qk_norm", "num_nextn_predict_layers"),
    "qk_head_dim",  # the sum of two above
}
_HARMLESS = {
    *("max_position_embeddings", "sliding_window", "max_window_layers", "pad_token_id"),
    *("num_experts_per_tok", "n_group", "num_expert_group", "topk_group", "index_topk"),
    *("bos_token_id", "eos_token_id", "pretraining_tp", "ep_size", "max_sequence_length"),
    *("num_return_sequences", "num_beams", "num_beam_groups", "chunk_size_feed_forward"),
}
_LOOKS_LIKE_A_SIZE = re.compile(
    r"size|dim|rank|heads|experts|layers|width|state|num_|^n_|kernel|_config$|layer_types"
)


def read_hf_config(path: Path) -> tuple[Architecture, list[str]]:
    """Return the architecture in a config.json, and what to be warned of.

    Raises:
        ValueError: it cannot be read, or a size that is needed is missing or is none.
    """
    flag = f"--hf-config {path}"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: expected a readable config.json: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{flag}: expected one JSON object, got a {type(config).__name__}")
    return hf_architecture(config, flag)


def hf_architecture(
    config: Mapping[str, Any], flag: str = "--hf-config"
) -> tuple[Architecture, list[str]]:
    """Return the architecture that a config describes, and what to be warned of.

    Args:
        config: the content of a config.json; if it is of several models, that of text counts.
        flag: begins messages.

    Raises:
        ValueError: a size that is needed is missing or is none.
    """
    warnings = []
    text = config.get("text_config")
    if isinstance(text, dict):
        others = [key for key in config if key.endswith("_config") and key != "text_config"]
        warnings.append(f"{flag}: text_config alone is counted, not {', '.join(others) or 'more'}")
        config = text
    sizes = _Sizes(config, flag)
    family = str(config.get("model_type", ""))
    hidden, layers = sizes.need("hidden_size"), sizes.need("num_hidden_layers")
    heads = sizes.need("num_attention_heads")
    experts = sizes.get("num_experts", "n_routed_experts", "num_local_experts")
    is_plain = family in _PLAIN_MLP
    expert_ffn = sizes.get("moe_intermediate_size")
    shared = sizes.get("shared_expert_intermediate_size")
    if not shared:
        shared = sizes.get("n_shared_experts") * expert_ffn
    if experts and not expert_ffn:
        expert_ffn = sizes.need("intermediate_size")
    is_moe = _hf_moe_layers(config, sizes, layers) if experts else (False,) * layers
    needs_ffn = not all(is_moe)
    latent = None
    if "kv_lora_rank" in config:
        latent = LatentAttention(
            sizes.get("q_lora_rank"),
            sizes.need("kv_lora_rank"),
            sizes.need("qk_nope_head_dim"),
            sizes.need("qk_rope_head_dim"),
            sizes.need("v_head_dim"),
            sizes.get("index_n_heads"),
            sizes.get("index_head_dim"),
        )
    if config.get("num_nextn_predict_layers"):
        warnings.append(
            f"{flag}: num_nextn_predict_layers {config['num_nextn_predict_layers']} is not counted:"
            " Megatron trains such layers with --mtp-num-layers only"
        )
    unknown = _unknown(config)
    if unknown:
        warnings.append(f"{flag}: not understood, the count may be wrong: {', '.join(unknown)}")
    if is_plain:
        warnings.append(f"{flag}: model_type {family}: biases and positions are counted roughly")
    return Architecture(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes.get("head_dim") or hidden // heads,
        ffn=sizes.need("intermediate_size") if needs_ffn else sizes.get("intermediate_size"),
        vocab=sizes.need("vocab_size"),
        is_gated=not is_plain,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        expert_ffn=expert_ffn,
        shared_ffn=shared if experts else 0,
        has_shared_gate=family in _GATE_OF_SHARED,
        moe_layers=is_moe,
        latent=latent,
        has_qk_norm=latent is not None or bool(config.get("use_qk_norm", family in _NORM_OF_HEADS)),
        has_qkv_bias=bool(config.get("attention_bias", family in _BIAS_OF_QKV)),
        has_bias=is_plain,
        norm_vectors=2 if is_plain else 1,
        is_head_dim_derived=not sizes.get("head_dim"),
    ), warnings


class _Sizes:
    """Whole numbers of a config."""

    def __init__(self, config: Mapping[str, Any], flag: str) -> None:
        self._config = config
        self._flag = flag

    def get(self, *names: str) -> int:
        """Return the first of these that is there and not null; 0 if none is."""
        for name in names:
            value = self._config.get(name)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise ValueError(f"{self._flag}: {name} {value}: expected a whole number")
                return value
        return 0

    def need(self, name: str) -> int:
        value = self.get(name)
        if not value:
            raise ValueError(f"{self._flag}: expected {name}, a positive whole number")
        return value


def _hf_moe_layers(config: Mapping[str, Any], sizes: _Sizes, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: what DeepSeek's, GLM's and Qwen's configs say."""
    first = sizes.get("first_k_dense_replace")
    every = sizes.get("moe_layer_freq") or 1
    step = sizes.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    return tuple(
        layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
        for layer in range(layers)
    )


def _unknown(config: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in config.items():
        if key in _KNOWN | _HARMLESS or not _LOOKS_LIKE_A_SIZE.search(key):
            continue
        if key == "layer_types" and isinstance(value, list):
            kinds = {str(each) for each in value} - {"full_attention", "sliding_attention"}
            found += [f"layer_types {each}" for each in sorted(kinds)]
        elif key == "quantization_config":
            continue
        elif isinstance(value, int | dict) and not isinstance(value, bool) and value:
            found.append(key)
    return sorted(found)
