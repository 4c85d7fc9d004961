"""What no ranks can be given: sizes that Megatron would refuse at its start are refused here.

heads                      a multiple of tp; hidden one of heads, where a head's size follows
groups of keys and values  divide heads; a multiple or a divisor of tp
inner widths               multiples of tp; those of experts, of etp
experts                    a multiple of ep
layers                     a multiple of pp, or as stages are told otherwise
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .architecture import Architecture
from .megatron_words import WholeNumbers
from .model import Model
from .ranks import Parallel, Rank, even_stages, largest_rank

_LAYOUT = "pipeline-model-parallel-layout"


@dataclass(frozen=True)
class Stages:
    """How many layers the stages of a pipeline have, in Megatron's words.

    Attributes:
        first: of the first stage; 0: as the others.
        last: of the last stage; 0: as the others.
        embedding: 1 if the embedding counts as a layer, else 0.
        loss: 1 if the loss counts as a layer, else 0.
        has_layout: there is a layout, which is not read.
        virtual_layers: of a virtual stage; 0 if it is not told.
        virtual_stages: of a rank; 0 if it is not told.
    """

    first: int = 0
    last: int = 0
    embedding: int = 0
    loss: int = 0
    has_layout: bool = False
    virtual_layers: int = 0
    virtual_stages: int = 0

    @property
    def warnings(self) -> list[str]:
        """What is not counted as Megatron does."""
        text = f"-- --{_LAYOUT} is not read: layers are counted as even as possible"
        return [text] if self.has_layout else []

    def layers_of(self, layers: int, pp: int) -> tuple[int, ...]:
        """Return the number of layers of each stage.

        Raises:
            ValueError: they cannot be split so.
        """
        if layers < pp:
            raise ValueError(f"--pp {pp}: expected at most {layers}, a layer each")
        if self.has_layout or pp == 1:
            return even_stages(layers, pp)
        told = [each for each in (self.first, self.last) if each]
        even, rest = pp - len(told), layers - sum(told)
        if told:
            if rest < 0 or (rest > 0) != (even > 0) or (even and rest % even):
                raise ValueError(
                    f"--pp {pp}: expected the {rest} layers beside --decoder-first-pipeline-num-"
                    f"layers and --decoder-last-pipeline-num-layers to fill {even} stages evenly"
                )
            middle = rest // even if even else 0
            self._refuse_virtual(middle)
            return (
                ((self.first,) if self.first else ())
                + (middle,) * even
                + ((self.last,) if self.last else ())
            )
        rest += self.embedding + self.loss
        if rest % pp:
            counted = f"{layers} layers"
            if rest > layers:
                counted += f" and {rest - layers} that embedding and loss count as"
            raise ValueError(
                f"--pp {pp}: expected a divisor of the {counted}: {_divisors(rest)}; or uneven "
                "stages, as -- --decoder-first-pipeline-num-layers N tells them"
            )
        self._refuse_virtual(rest // pp)
        found = [rest // pp] * pp
        found[0] -= self.embedding
        found[-1] -= self.loss
        return tuple(found)

    def _refuse_virtual(self, layers: int) -> None:
        for flag, number in (
            ("num-layers-per-virtual-pipeline-stage", self.virtual_layers),
            ("num-virtual-stages-per-pipeline-rank", self.virtual_stages),
        ):
            if number and layers % number:
                raise ValueError(
                    f"-- --{flag} {number}: expected a divisor of the {layers} layers of a stage: "
                    f"{_divisors(layers)}"
                )


def stages_of(flags: Mapping[str, str]) -> Stages:
    """Return what Megatron's arguments tell of the stages."""
    numbers = WholeNumbers(flags)
    return Stages(
        first=numbers.get("decoder-first-pipeline-num-layers"),
        last=numbers.get("decoder-last-pipeline-num-layers"),
        embedding=int("account-for-embedding-in-pipeline-split" in flags),
        loss=int("account-for-loss-in-pipeline-split" in flags),
        has_layout=_LAYOUT in flags,
        virtual_layers=numbers.get("num-layers-per-virtual-pipeline-stage"),
        virtual_stages=numbers.get("num-virtual-stages-per-pipeline-rank"),
    )


def refuse_impossible(a: Architecture) -> None:
    """Raise ValueError if the sizes of a model do not go with each other, however it is split."""
    if a.is_head_dim_derived and not a.latent and a.hidden % a.heads:
        raise ValueError(
            f"{a.heads} attention heads (--num-attention-heads, num_attention_heads): expected a "
            f"divisor of the width {a.hidden}, or the size of a head (--kv-channels, head_dim)"
        )
    if not a.key_value_heads or a.heads % a.key_value_heads:
        raise ValueError(
            f"{a.key_value_heads} groups of keys and values (--num-query-groups, "
            f"num_key_value_heads): expected a divisor of the {a.heads} attention heads: "
            f"{_divisors(a.heads)}"
        )


def refuse_split(a: Architecture, p: Parallel) -> None:
    """Raise ValueError if Megatron would not split a model so."""
    groups = a.key_value_heads
    if p.ep > 1 and not a.experts:
        raise ValueError(f"--ep {p.ep}: expected 1, the model has no experts")
    for flag, size, whole, what in (
        ("tp", p.tp, a.heads, "attention heads"),
        ("tp", p.tp, a.ffn if not all(a.moe_layers) else 0, "inner width of an MLP"),
        ("tp", p.tp, a.shared_ffn, "inner width of the shared experts"),
        ("ep", p.ep, a.experts, "experts"),
        ("etp", p.etp, a.expert_ffn if any(a.moe_layers) else 0, "inner width of an expert"),
    ):
        if whole % size:
            raise ValueError(
                f"--{flag} {size}: expected a divisor of {whole}, {what}: {_divisors(whole)}"
            )
    if not a.latent and groups % p.tp and p.tp % groups:
        raise ValueError(
            f"--tp {p.tp}: expected a divisor or a multiple of the {groups} groups of keys and "
            f"values; divisors are {_divisors(groups)}"
        )


def rank_of(
    model: Model,
    architecture: Architecture | None,
    stages: Stages,
    parallel: Parallel,
    optimizer: str,
) -> Rank:
    """Return what the rank with the most state has.

    Raises:
        ValueError: Megatron would not split the model so.
    """
    if architecture is None:
        if parallel.ep > 1 and not model.has_experts:
            raise ValueError(f"--ep {parallel.ep}: expected --expert-params N with it")
        return largest_rank(model, parallel, optimizer)
    refuse_split(architecture, parallel)
    layers = stages.layers_of(architecture.layers, parallel.pp)
    return largest_rank(model, parallel, optimizer, layers)


def _divisors(number: int) -> str:
    """Return the divisors of a number, the first eight of them."""
    found = [each for each in range(1, number + 1) if number % each == 0][:9]
    return ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
