"""The sizes of a decoder: all that decides how many params it has."""

from __future__ import annotations

from dataclasses import dataclass


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
        has_qk_norm: queries and keys are normalized, head by head or in their low ranks.
        has_qkv_bias: on the projections to queries, keys and values.
        has_bias: on every other matrix of attention and MLPs, too.
        norm_vectors: params of a norm: 1 for RMSNorm, 2 for LayerNorm.
        is_head_dim_derived: a head's size was not told: it is the width over the heads.
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
    is_head_dim_derived: bool = False
