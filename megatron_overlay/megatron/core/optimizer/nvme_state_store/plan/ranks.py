"""What the rank with the most state has of a model: its params, and their state by store.

With world size W = dp tp cp pp, as in Megatron:

    kind                  params on a rank of a stage    whose state is sharded over
    dense                 / tp                           dp cp
    replicated            all                            dp cp
    experts               / (etp ep)                     W / (etp ep pp)

Layers go to pipeline stages as `splits` tells; a tied output layer is on the last stage once more.
SGD's state is whole on every rank, since Megatron refuses to shard it. Muon's ranks take whole
matrices in turn, which is roughly what Megatron's do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .model import Kind, Model, Tensor

OPTIMIZERS = ("adam", "muon", "lion", "sgd")
NOT_PLANNED = {
    "soap": "its factors take 8 (m x m + n x n) bytes more for an m x n matrix, and neither the "
    "memory of its decompositions nor its rate was measured; see Sizing in docs/running.md",
    "adaptive_muon": "its second moment has another shape than the matrix, and with the "
    "emerging-optimizers that Megatron 0.19.2 can be installed with it fails at the first step",
    "dist_muon": "Megatron deprecates that name; --optimizer muon is what it becomes",
}
"""Optimizers of Megatron's that are not planned, and why."""
_ADAM = ("exp_avg", "exp_avg_sq")
_STATE_KEYS = {
    "adam": _ADAM,
    "muon": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
}


def refuse_optimizer(name: str) -> None:
    """Raise ValueError if no plan can be made for an optimizer."""
    if name in OPTIMIZERS:
        return
    expected = f"expected one of {', '.join(OPTIMIZERS)}"
    if name in NOT_PLANNED:
        raise ValueError(f"--optimizer {name}: not planned, {NOT_PLANNED[name]}; {expected}")
    raise ValueError(f"--optimizer {name}: {expected}")


@dataclass(frozen=True)
class Parallel:
    """How the model is split over GPUs, in Megatron's words.

    Attributes:
        dp: data parallel size, without context parallelism.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        cp: context parallel size.
        ep: expert parallel size.
        etp: tensor parallel size of experts.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: expected a positive number")
        if self.dp * self.tp * self.cp % (self.etp * self.ep):
            raise ValueError(
                f"--ep {self.ep}: expected ep x etp = {self.ep} x {self.etp} to divide "
                f"dp x tp x cp = {self.dp * self.tp * self.cp}; without --etp that is --tp"
            )

    @property
    def world(self) -> int:
        """GPUs."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def expert_dp(self) -> int:
        """Ranks that have the same experts."""
        return self.dp * self.tp * self.cp // (self.etp * self.ep)


@dataclass(frozen=True)
class Share:
    """What one store of a rank streams.

    Attributes:
        name: which params.
        state_keys: the tensors that the optimizer keeps of each param.
        numel: elements of the main params.
        matrices: the elements of each, if they are kept whole; else empty.
    """

    name: str
    state_keys: tuple[str, ...]
    numel: int
    matrices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rank:
    """What one rank has.

    Attributes:
        params: elements of model params, with as many gradients.
        shares: of the optimizer's state, one for each store.
        largest_matrix: elements of the largest one that an optimizer of matrices takes.
    """

    params: int
    shares: tuple[Share, ...]
    largest_matrix: int = 0

    @property
    def main_params(self) -> int:
        """Elements whose state this rank has."""
        return sum(share.numel for share in self.shares)


def even_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage; the first ones take what is left over."""
    each, more = divmod(layers, pp)
    return tuple(each + (stage < more) for stage in range(pp))


def largest_rank(
    model: Model, parallel: Parallel, optimizer: str, stages: Sequence[int] | None = None
) -> Rank:
    """Return what the rank with the most state has.

    Args:
        model: its params.
        parallel: how it is split.
        optimizer: one of `OPTIMIZERS`.
        stages: layers of each pipeline stage; even ones are taken if it is left out.
    """
    layers = stages or even_stages(model.layers, parallel.pp)
    numbers = range(parallel.pp if model.layers else 1)
    ranks = [_rank(_of_stage(model, layers, stage), parallel, optimizer) for stage in numbers]
    return max(ranks, key=lambda rank: (rank.main_params, rank.params))


def _of_stage(model: Model, stages: Sequence[int], stage: int) -> list[Tensor]:
    """Return the tensors of a stage."""
    found = []
    first = sum(stages[:stage])
    last = first + stages[stage]
    for tensor in model.tensors:
        if tensor.layer is None:
            part = -(-tensor.numel // len(stages))
            found.append(Tensor(part, tensor.kind, None, tensor.count, tensor.is_matrix))
            continue
        is_here = first <= tensor.layer < last
        is_here |= tensor.layer < 0 and stage == 0
        is_here |= tensor.layer >= model.layers and stage == len(stages) - 1
        is_embedding = tensor.layer == -1 and tensor.kind is Kind.DENSE
        if is_here or (is_embedding and model.is_tied and stage == len(stages) - 1):
            found.append(tensor)
    return found


def _rank(tensors: Sequence[Tensor], parallel: Parallel, optimizer: str) -> Rank:
    local = [_of_rank(tensor, parallel) for tensor in tensors]
    shares: list[Share] = []
    for name, is_expert in (("dense", False), ("expert", True)):
        # Without expert parallelism Megatron has one optimizer, and so one store, for all.
        chosen = [
            each
            for each in local
            if (each.kind is Kind.EXPERT and parallel.ep > 1) == is_expert and each.count
        ]
        copies = parallel.expert_dp if is_expert else parallel.dp * parallel.cp
        shares += _shares(name, chosen, copies, optimizer)
    return Rank(
        sum(each.numel * each.count for each in local),
        tuple(share for share in shares if share.numel),
        max((each.numel for each in local if each.is_matrix), default=0)
        if optimizer == "muon"
        else 0,
    )


def _of_rank(tensor: Tensor, parallel: Parallel) -> Tensor:
    """Return what one rank of its stage has of a tensor."""
    numel, count = tensor.numel, tensor.count
    if tensor.kind is Kind.DENSE:
        numel = -(-numel // parallel.tp)
    elif tensor.kind is Kind.EXPERT:
        numel = -(-numel // parallel.etp)
        if tensor.layer is None:
            numel = -(-numel // parallel.ep)
        else:
            count = -(-count // parallel.ep)
    return Tensor(numel, tensor.kind, tensor.layer, count, tensor.is_matrix)


def _shares(name: str, tensors: Sequence[Tensor], copies: int, optimizer: str) -> Iterator[Share]:
    """Yield the shares of one of the ranks that have copies of the same params."""
    total = sum(each.numel * each.count for each in tensors)
    if optimizer == "sgd":  # Megatron refuses it under the distributed optimizer
        yield Share(name, _STATE_KEYS[optimizer], total)
    elif optimizer != "muon" or not any(each.layer is not None for each in tensors):
        yield Share(name, _STATE_KEYS[optimizer], -(-total // copies))
    else:
        # Whole matrices go to ranks in turn, by size; vectors and the embedding have Adam.
        matrices: list[int] = []
        others: list[int] = []
        for each in tensors:
            (matrices if each.is_matrix else others).extend([each.numel] * each.count)
        mine = tuple(sorted(matrices, reverse=True)[::copies])
        yield Share(f"{name} matrices", _STATE_KEYS["muon"], sum(mine), mine)
        yield Share(f"{name} others", _ADAM, sum(sorted(others, reverse=True)[::copies]))
