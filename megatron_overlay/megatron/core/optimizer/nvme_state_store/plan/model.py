"""How many params a model has, and of which kind.

Those of a layer with width h:

    attention     h (q + 2 k) d + q d h               q heads, k heads of keys and values, size d
    latent        h r + r q (n + p)                   queries through rank r; without: h q (n + p)
                  + h (s + p) + s q (n + v) + q v h   keys and values through rank s
                  + r i j + h j + h i + 2 j           indexer, if any: i heads of size j
    MLP           3 h f                               inner width f; 2 h f if it is not gated
    experts       h E + 3 h e E + 3 h S               router; E of width e; shared: S together
    norms         2 h, and those of heads or of low ranks

and once: the embedding V h, the output layer V h if it is not tied, and the last norm h. Biases
where a model has them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from .architecture import Architecture, LatentAttention


class Kind(enum.Enum):
    """Over which ranks a param is split.

    DENSE is what tensor parallelism splits; REPLICATED what it does not: norms, routers,
    projections to low ranks. EXPERT has groups of its own.
    """

    DENSE = "dense"
    REPLICATED = "replicated"
    EXPERT = "expert"


@dataclass(frozen=True)
class Tensor:
    """Params of one shape.

    Attributes:
        numel: elements of one.
        kind: how they are split.
        layer: where it is: -1 with the embedding, the number of layers with the output; None if
            stages have equal parts of it.
        count: how many there are of it in that layer.
        is_matrix: an optimizer of matrices takes it.
    """

    numel: int
    kind: Kind
    layer: int | None
    count: int = 1
    is_matrix: bool = False


@dataclass(frozen=True)
class Model:
    """All params, and the number of layers (0: not known)."""

    tensors: tuple[Tensor, ...]
    layers: int = 0
    is_tied: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether any param is an expert's."""
        return bool(self.numel(Kind.EXPERT))

    def numel(self, *kinds: Kind) -> int:
        """Return the params of these kinds, or of all."""
        chosen = kinds or tuple(Kind)
        return sum(each.numel * each.count for each in self.tensors if each.kind in chosen)


def model_of_numbers(params: int, expert_params: int = 0) -> Model:
    """Return a model of which only the number of params is known.

    Raises:
        ValueError: there are none, or more experts' params than params.
    """
    if not params:
        raise ValueError("--params 0: expected a positive number, such as 8e9, 8b or 744B")
    if expert_params > params:
        raise ValueError(
            f"--expert-params {expert_params}: expected a part of --params {params}, which counts "
            "all of them"
        )
    dense = Tensor(params - expert_params, Kind.DENSE, None)
    return Model((dense, Tensor(expert_params, Kind.EXPERT, None)))


def model_of(architecture: Architecture) -> Model:
    """Count the params of an architecture: see the module's docstring."""
    a = architecture
    tensors = [Tensor(a.vocab * a.hidden, Kind.DENSE, -1)]
    tensors += [Tensor(a.positions * a.hidden, Kind.REPLICATED, -1)]
    for layer, has_experts in enumerate(a.moe_layers):
        tensors += _latent(a, a.latent, layer) if a.latent else _attention(a, layer)
        tensors += _experts(a, layer) if has_experts else _mlp(a, layer, a.ffn)
        tensors.append(Tensor(2 * a.hidden * a.norm_vectors, Kind.REPLICATED, layer))
    tensors.append(Tensor(a.hidden * a.norm_vectors, Kind.REPLICATED, a.layers))
    if not a.is_tied:
        tensors.append(Tensor(a.vocab * a.hidden, Kind.DENSE, a.layers))
    return Model(tuple(each for each in tensors if each.numel), a.layers, a.is_tied)


def _matrix(numel: int, kind: Kind, layer: int, count: int = 1) -> Tensor:
    return Tensor(numel, kind, layer, count, is_matrix=True)


def _attention(a: Architecture, layer: int) -> Iterator[Tensor]:
    inputs = (a.heads + 2 * a.key_value_heads) * a.head_dim
    yield _matrix(a.hidden * inputs, Kind.DENSE, layer)
    yield _matrix(a.heads * a.head_dim * a.hidden, Kind.DENSE, layer)
    yield Tensor(inputs * a.has_qkv_bias, Kind.DENSE, layer)
    yield Tensor(a.hidden * a.has_bias, Kind.REPLICATED, layer)
    yield Tensor(2 * a.head_dim * a.has_qk_norm, Kind.REPLICATED, layer)


def _latent(a: Architecture, latent: LatentAttention, layer: int) -> Iterator[Tensor]:
    key = latent.plain_dim + latent.rotary_dim
    if latent.query_rank:
        yield _matrix(a.hidden * latent.query_rank, Kind.REPLICATED, layer)
        yield Tensor(latent.query_rank * a.has_qk_norm, Kind.REPLICATED, layer)
    from_queries = latent.query_rank or a.hidden
    yield _matrix(from_queries * a.heads * key, Kind.DENSE, layer)
    down = latent.key_value_rank + latent.rotary_dim
    yield _matrix(a.hidden * down, Kind.REPLICATED, layer)
    yield Tensor(latent.key_value_rank * a.has_qk_norm, Kind.REPLICATED, layer)
    up = a.heads * (latent.plain_dim + latent.value_dim)
    yield _matrix(latent.key_value_rank * up, Kind.DENSE, layer)
    yield _matrix(a.heads * latent.value_dim * a.hidden, Kind.DENSE, layer)
    if latent.index_heads:
        index = latent.index_heads * latent.index_dim
        yield _matrix(from_queries * index, Kind.REPLICATED, layer)
        yield _matrix(a.hidden * latent.index_dim, Kind.REPLICATED, layer)
        yield _matrix(a.hidden * latent.index_heads, Kind.REPLICATED, layer)
        yield Tensor(2 * latent.index_dim, Kind.REPLICATED, layer)


def _mlp(a: Architecture, layer: int, inner: int) -> Iterator[Tensor]:
    ways_in = 2 if a.is_gated else 1
    yield _matrix(ways_in * a.hidden * inner, Kind.DENSE, layer)
    yield _matrix(inner * a.hidden, Kind.DENSE, layer)
    yield Tensor(ways_in * inner * a.has_bias, Kind.DENSE, layer)
    yield Tensor(a.hidden * a.has_bias, Kind.REPLICATED, layer)


def _experts(a: Architecture, layer: int) -> Iterator[Tensor]:
    yield _matrix(a.hidden * a.experts, Kind.REPLICATED, layer)
    ways_in = 2 if a.is_gated else 1
    yield _matrix(ways_in * a.hidden * a.expert_ffn, Kind.EXPERT, layer, a.experts)
    yield _matrix(a.expert_ffn * a.hidden, Kind.EXPERT, layer, a.experts)
    yield Tensor(a.experts * a.has_bias, Kind.REPLICATED, layer)
    biases = (ways_in * a.expert_ffn + a.hidden) * a.has_bias
    yield Tensor(biases, Kind.EXPERT, layer, a.experts)
    if a.shared_ffn:
        yield from _mlp(a, layer, a.shared_ffn)
        yield Tensor(a.hidden * a.has_shared_gate, Kind.REPLICATED, layer)
