"""What a model is made of, from a config.json of Hugging Face's kind or from Megatron's arguments.

Only what decides how many params there are: nothing is loaded, no file of a model is needed, and
neither library is imported. What is in a config, looks like a size and is not known here is warned
of, since the count may then be wrong.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MEGATRON_FLAGS_WITHOUT_VALUE = frozenset(
    {
        *("swiglu", "untie-embeddings-and-output-weights", "group-query-attention"),
        *("multi-latent-attention", "qk-layernorm", "disable-bias-linear", "add-qkv-bias"),
        *("moe-shared-expert-gate", "bf16", "accumulate-allreduce-grads-in-fp32"),
        *("grad-reduce-in-bf16", "use-distributed-optimizer", "stream-optimizer-state-to-disk"),
    }
)
"""Flags of Megatron's that stand alone; any other takes what follows up to the next flag."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention: queries, keys and values go through low ranks.

    Attributes:
        query_rank: of the queries; 0 if they have none.
        key_value_rank: of keys and values together.
        plain_dim: of a head's query and key, without rotary positions.
        rotary_dim: of a head's query, and of the one key of all heads, with rotary positions.
        value_dim: of a head's value.
        index_heads: heads of the indexer of sparse attention; 0 if there is none.
        index_dim: of one of them.
    """

    query_rank: int
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    index_heads: int = 0
    index_dim: int = 0


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder.

    Attributes:
        hidden: width of the residual stream.
        layers: number of them.
        heads: query heads.
        key_value_heads: heads of keys and values.
        head_dim: of each.
        ffn: inner width of a dense MLP.
        vocab: tokens in the embedding.
        positions: learned positions; 0 if there are none.
        is_gated: an MLP has three matrices, not two.
        is_tied: the output layer is the embedding.
        experts: of a layer that has any.
        expert_ffn: inner width of one.
        shared_ffn: inner width of all shared experts together.
        has_shared_gate: the shared experts have a gate.
        moe_layers: for each layer, whether it has experts.
        latent: multi-latent attention, if it is that.
        has_qk_norm: queries and keys are normalized, head by head.
        has_qkv_bias: on the projections to queries, keys and values.
        has_bias: on every other matrix of attention and MLPs, too.
        norm_vectors: params of a norm: 1 for RMSNorm, 2 for LayerNorm.
    """

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int = 0
    is_gated: bool = True
    is_tied: bool = False
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    has_shared_gate: bool = False
    moe_layers: tuple[bool, ...] = ()
    latent: LatentAttention | None = None
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_bias: bool = False
    norm_vectors: int = 1


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
        has_qk_norm=bool(config.get("use_qk_norm", family in _NORM_OF_HEADS)),
        has_qkv_bias=bool(config.get("attention_bias", family in _BIAS_OF_QKV)),
        has_bias=is_plain,
        norm_vectors=2 if is_plain else 1,
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


# ------------------------------------------------------------------------------ Megatron's arguments


def megatron_flags(words: Sequence[str]) -> dict[str, str]:
    """Return Megatron's arguments by name, leniently: what is unknown is there, too.

    Raises:
        ValueError: the first word is no flag.
    """
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            name = name.replace("_", "-")
            found[name] = value if is_joined else ""
        elif not name:
            raise ValueError(f"-- {word}: expected Megatron's arguments, such as --num-layers 32")
        elif name not in MEGATRON_FLAGS_WITHOUT_VALUE:
            found[name] = f"{found[name]} {word}".strip()
    return found


def megatron_architecture(flags: Mapping[str, str]) -> tuple[Architecture, list[str]]:
    """Return the architecture that Megatron's arguments describe, and what to be warned of.

    Defaults are those of Megatron 0.19.2: inner width 4 h (with SwiGLU 8/3 h, down to a multiple of
    64), LayerNorm, biases, tied embeddings, learned positions.

    Raises:
        ValueError: a size that is needed is missing or is none.
    """
    sizes = _Flags(flags)
    hidden, layers = sizes.need("num-layers", "hidden-size")[::-1]
    (heads,) = sizes.need("num-attention-heads")
    is_gated = "swiglu" in flags
    ffn = sizes.get("ffn-hidden-size") or (hidden * 8 // 3 // 64 * 64 if is_gated else 4 * hidden)
    has_groups = "group-query-attention" in flags
    experts = sizes.get("num-experts")
    is_moe = _megatron_moe_layers(flags.get("moe-layer-freq", "1"), layers)
    warnings = []
    vocab = sizes.get("padded-vocab-size") or sizes.get("vocab-size")
    if not vocab:
        warnings.append("-- --vocab-size is missing: the embedding is not counted")
    for name in ("mtp-num-layers", "hybrid-layer-pattern", "hybrid-override-pattern"):
        if flags.get(name, "0") != "0":
            warnings.append(f"-- --{name} {flags[name]}: not understood, the count may be wrong")
    latent = None
    if "multi-latent-attention" in flags:
        latent = LatentAttention(
            sizes.get("q-lora-rank"),
            sizes.get("kv-lora-rank", 32),
            sizes.get("qk-head-dim", 128),
            sizes.get("qk-pos-emb-head-dim", 64),
            sizes.get("v-head-dim", 128),
        )
    is_learned = flags.get("position-embedding-type", "learned_absolute") == "learned_absolute"
    has_bias = "disable-bias-linear" not in flags
    return Architecture(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=sizes.get("num-query-groups", 1) if has_groups else heads,
        head_dim=sizes.get("kv-channels") or hidden // heads,
        ffn=ffn,
        vocab=vocab,
        positions=sizes.get("max-position-embeddings") if is_learned else 0,
        is_gated=is_gated,
        is_tied="untie-embeddings-and-output-weights" not in flags,
        experts=experts,
        expert_ffn=sizes.get("moe-ffn-hidden-size") or ffn,
        shared_ffn=sizes.get("moe-shared-expert-intermediate-size"),
        has_shared_gate="moe-shared-expert-gate" in flags,
        moe_layers=is_moe if experts else (False,) * layers,
        latent=latent,
        has_qk_norm="qk-layernorm" in flags,
        has_qkv_bias=has_bias or "add-qkv-bias" in flags,
        has_bias=has_bias,
        norm_vectors=1 if flags.get("normalization", "LayerNorm") == "RMSNorm" else 2,
    ), warnings


class _Flags:
    """Whole numbers among Megatron's arguments."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        self._flags = flags

    def get(self, name: str, default: int = 0) -> int:
        text = self._flags.get(name)
        if text is None or text == "None":
            return default
        if not text.isdecimal():
            raise ValueError(f"-- --{name} {text}: expected a whole number")
        return int(text)

    def need(self, *names: str) -> list[int]:
        values = [self.get(name) for name in names]
        for name, value in zip(names, values, strict=True):
            if not value:
                raise ValueError(f"-- --{name}: expected it among Megatron's arguments, positive")
        return values


def _megatron_moe_layers(text: str, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every n-th, or as a list says, such as ``[0]*3+[1]*58``."""
    expected = f"-- --moe-layer-freq {text}: expected a number, or a list for {layers} layers"
    try:
        value = _evaluate(ast.parse(text.strip("'\" "), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(expected) from error
    if isinstance(value, int) and value > 0:
        return tuple(layer % value == 0 for layer in range(layers))
    if not isinstance(value, list) or len(value) != layers:
        raise ValueError(expected)
    return tuple(bool(each) for each in value)


def _evaluate(node: ast.expr) -> Any:
    """Evaluate whole numbers and lists of them under + and *; never any other code."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise TypeError(ast.dump(node))


def without_experts(architecture: Architecture) -> Architecture:
    """Return the same with a dense MLP in every layer."""
    return replace(architecture, experts=0, moe_layers=(False,) * architecture.layers)
