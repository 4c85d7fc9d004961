"""The architecture in Megatron's arguments, read without Megatron."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from .architecture import Architecture, LatentAttention
from .megatron_words import WholeNumbers, in_effect

_NOT_COUNTED = (
    *("mtp-num-layers", "hybrid-layer-pattern", "hybrid-override-pattern", "is-hybrid-model"),
    *("mtp-hybrid-override-pattern", "heterogeneous-layers-config-path", "moe-latent-size"),
    *("heterogeneous-layers-config-encoded-json", "experimental-attention-variant", "yaml-cfg"),
    *(
        "attention-output-gate",
        "linear-attention-freq",
        "use-checkpoint-args",
        "vision-pretraining",
    ),
    "no-position-embedding",
)
"""Arguments that change the params in a way that is not counted here."""


def megatron_architecture(flags: Mapping[str, str]) -> tuple[Architecture, list[str]]:
    """Return the architecture that Megatron's arguments describe, and what to be warned of.

    Defaults are those of Megatron 0.19.2: inner width 4 h (with SwiGLU 8/3 h, down to a multiple of
    64), LayerNorm, biases, tied embeddings, learned positions.

    Raises:
        ValueError: a size that is needed is missing or is none.
    """
    sizes = WholeNumbers(flags)
    layers, hidden = sizes.need("num-layers"), sizes.need("hidden-size")
    heads = sizes.need("num-attention-heads")
    is_gated = "swiglu" in flags
    ffn = sizes.get("ffn-hidden-size") or (hidden * 8 // 3 // 64 * 64 if is_gated else 4 * hidden)
    has_groups = "group-query-attention" in flags
    experts = sizes.get("num-experts")
    is_moe = _megatron_moe_layers(flags.get("moe-layer-freq", "1"), layers)
    warnings = []
    vocab = sizes.get("padded-vocab-size") or sizes.get("vocab-size")
    if not vocab:
        warnings.append("-- --vocab-size is missing: the embedding is not counted")
    warnings += [
        f"-- {text}: not understood, the count may be wrong"
        for text in in_effect(flags, _NOT_COUNTED)
    ]
    warnings += [f"-- {text}" for text in _without_effect(flags)]
    latent = None
    if "multi-latent-attention" in flags:
        latent = LatentAttention(
            sizes.get("q-lora-rank"),
            sizes.get("kv-lora-rank", 32),
            sizes.get("qk-head-dim", 128),
            sizes.get("qk-pos-emb-head-dim", 64),
            sizes.get("v-head-dim", 128),
        )
    positions = flags.get("position-embedding-type", "learned_absolute")
    if "use-rotary-position-embeddings" in flags:
        positions = "rope"
    has_bias = "disable-bias-linear" not in flags
    return Architecture(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=sizes.get("num-query-groups", 1) if has_groups else heads,
        head_dim=sizes.get("kv-channels") or hidden // heads,
        ffn=ffn,
        vocab=vocab,
        positions=sizes.get("max-position-embeddings") if positions == "learned_absolute" else 0,
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
        is_head_dim_derived=not sizes.get("kv-channels"),
    ), warnings


def _without_effect(flags: Mapping[str, str]) -> Iterator[str]:
    """Yield what Megatron ignores, which is rarely meant."""
    is_latent = "multi-latent-attention" in flags
    for name, needed in (
        ("num-query-groups", "" if is_latent else "group-query-attention"),
        ("moe-shared-expert-intermediate-size", "num-experts"),
        ("kv-lora-rank", "multi-latent-attention"),
    ):
        if needed and name in flags and needed not in flags:
            yield f"--{name} {flags[name]}: without --{needed} it changes nothing"


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
