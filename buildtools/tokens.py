"""What names main params or optimizer state in upstream's code: the alphabet of the census."""

from __future__ import annotations

import ast
import re

ATTRIBUTES = frozenset(
    {
        "main_param",
        "main_param_sharded",
        "main_params",
        "model_fp32_groups",
        "model_float16_groups",
        "shard_float16_groups",
        "shard_fp32_groups",
        "shard_fp32_from_float16_groups",
        "float16_groups",
        "fp32_from_float16_groups",
        "fp32_from_fp32_groups",
        "param_groups",
        "exp_avg",
        "exp_avg_sq",
        "momentum_buffer",
        "optimizer_state_keys",
    }
)
"""Attributes, variables and keys of dicts that lead to such tensors."""

KEYS = ATTRIBUTES | {"params", "fp32_from_fp16_params", "fp32_from_fp16", "master_param"}
CALLS = frozenset(
    {
        "get_parameters",
        "_get_main_param_and_optimizer_states",
        "_set_main_param_and_optimizer_states",
        "_copy_main_params_to_model_params",
        "_copy_main_params_to_param_buffer",
        "_copy_model_params_to_main_params",
        "get_unscaled_state",
        "set_scaled_state",
        "load_parameter_state",
        "save_parameter_state",
    }
)
"""Methods that hand such tensors out, fill them, or do so for the caller."""
CLASSES = frozenset(
    {
        "ChainedOptimizer",
        "DistributedOptimizer",
        "Float16OptimizerWithFloat16Params",
        "LayerWiseDistributedOptimizer",
        "MegatronOptimizer",
        "MixedPrecisionOptimizer",
        "OptimizerConfig",
    }
)
"""Classes that are not to be made, or changed from outside, where nobody knows of it."""
_MADE = CLASSES - {"OptimizerConfig"}

WORDS = re.compile(
    "|".join(
        [
            rf"\b(?:{'|'.join(sorted(ATTRIBUTES | CALLS))})\b",
            r"\.state\b|['\"]state['\"]",
            rf"\b(?:{'|'.join(sorted(CLASSES))})\b",
            rf"['\"](?:{'|'.join(sorted(KEYS))})['\"]",
        ]
    ).encode()
)
"""What a file without readers does not hold: it need not be parsed."""


def token(node: ast.AST, is_optimizer: bool) -> str | None:
    """Return what a node names of main params or optimizer state, or None.

    Args:
        node: any node.
        is_optimizer: whether ``self`` is an optimizer, by the directory of the file.
    """
    if isinstance(node, ast.Attribute):
        if node.attr in ATTRIBUTES:
            return node.attr
        if node.attr == "state" and _is_optimizer(node.value, is_optimizer):
            return "optimizer.state"
        if node.attr in CALLS:
            return f"{node.attr}()"
        if isinstance(node.ctx, ast.Store) and _class_name(node.value):
            return f"{_class_name(node.value)}.{node.attr} ="
    if isinstance(node, ast.Name | ast.keyword):
        name = node.id if isinstance(node, ast.Name) else node.arg
        return name if name in ATTRIBUTES else None
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in KEYS:
        return f"'{node.value}'"
    return _call_token(node, is_optimizer) if isinstance(node, ast.Call) else None


def _call_token(node: ast.Call, is_optimizer: bool) -> str | None:
    made = _class_name(node.func)
    if made in _MADE:
        return f"{made}()"
    name = ast.unparse(node.func)
    if name == "setattr" and node.args and _class_name(node.args[0]):
        return f"setattr({_class_name(node.args[0])})"
    if name == "getattr" and len(node.args) > 1 and ast.unparse(node.args[1]) == "'state'":
        return "optimizer.state" if _is_optimizer(node.args[0], is_optimizer) else None
    return None


def _class_name(node: ast.AST) -> str | None:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name if name in CLASSES else None


def _is_optimizer(node: ast.AST, is_optimizer: bool) -> bool:
    """Guess from its name whether an object is an optimizer: one too many is looked at once."""
    name = ast.unparse(node).lower()
    return "opt" in name or (is_optimizer and name == "self")
