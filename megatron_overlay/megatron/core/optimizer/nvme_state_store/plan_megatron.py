"""The architecture in Megatron's arguments, read leniently and without Megatron."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from .plan_architecture import Architecture, LatentAttention

FLAGS_WITHOUT_VALUE = frozenset(
    {
        *("swiglu", "untie-embeddings-and-output-weights", "group-query-attention"),
        *("multi-latent-attention", "qk-layernorm", "disable-bias-linear", "add-qkv-bias"),
        *("moe-shared-expert-gate", "bf16", "accumulate-allreduce-grads-in-fp32"),
        *("grad-reduce-in-bf16", "use-distributed-optimizer", "stream-optimizer-state-to-disk"),
    }
)
"""Flags of Megatron's that stand alone; any other takes what follows up to the next flag."""


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
        elif name not in FLAGS_WITHOUT_VALUE:
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
