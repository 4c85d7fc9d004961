"""Layers and FusedAdam of Transformer Engine: streaming gives the bits of stock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import gpt, streaming
from tests.gpu import cuda_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not cuda_ranks.HAS_TRANSFORMER_ENGINE, reason="Transformer Engine is not installed"
    ),
]

STEPS = 10
# `unfused` is the one attention that is deterministic with every cuDNN.
MODEL = (
    *("--hidden-size", "512", "--num-attention-heads", "8", "--deterministic-mode"),
    *("--transformer-impl", "transformer_engine", "--attention-backend", "unfused"),
)
ROWS = {
    "adam": ("--optimizer", "adam"),
    "muon": ("--optimizer", "muon"),
    "adam-grouped-experts": ("--optimizer", "adam", *gpt.MOE, "--moe-grouped-gemm"),
}
BUCKET_NUMEL = 1_000_000  # several buckets


def bases_of_transformer_engine(objects: Iterator[Any]) -> set[str]:
    """Return the names of Transformer Engine's classes that any of the objects is of."""
    bases = {base for each in objects for base in type(each).__mro__}
    return {base.__name__ for base in bases if base.__module__.startswith("transformer_engine.")}


def require_transformer_engine(model: Sequence[Any], optimizer: Any) -> None:
    """Fail if Megatron fell back to layers or an Adam of another origin."""
    from megatron.training import get_args

    layers = bases_of_transformer_engine(module for chunk in model for module in chunk.modules())
    assert {"LayerNormLinear", "DotProductAttention"} <= layers, layers
    assert ("GroupedLinear" in layers) == get_args().moe_grouped_gemm, layers
    inner = [each.optimizer for _, each in gpt.inner_optimizers(optimizer)]
    masters = [getattr(each, "master", each) for each in inner]  # streamed: behind its step
    assert bases_of_transformer_engine(iter(masters)) == {"FusedAdam"}, masters


def train(world_size: int, name: str, *arguments: str, **kwargs: Any) -> list[gpt.Run]:
    runs: list[gpt.Run] = cuda_ranks.run(
        gpt.train,
        world_size,
        arguments=[*gpt.BF16, *MODEL, *ROWS[name], *arguments],
        after_setup=require_transformer_engine,
        **kwargs,
    )
    return runs


def streamed(world_size: int, name: str, directory: Path, **kwargs: Any) -> list[gpt.Run]:
    return train(
        world_size,
        name,
        *streaming.flags(directory, bucket_numel=BUCKET_NUMEL),
        optimizer_tensors=streaming.streamed_tensors,
        **kwargs,
    )


@pytest.fixture(scope="module")
def stock(world_size: int) -> Callable[[str], list[gpt.Run]]:
    """Train stock, once for each name."""
    return functools.cache(lambda name: train(world_size, name, until=STEPS))


@pytest.mark.parametrize("name", ROWS)
def test_streamed_training_gives_the_bits_of_stock(
    name: str, world_size: int, stock: Callable[[str], list[gpt.Run]], tmp_path: Path
) -> None:
    """Weights, main params, moments, step, losses and norms after 10 steps."""
    runs = streamed(world_size, name, tmp_path, until=STEPS)

    for ours, theirs in zip(runs, stock(name), strict=True):
        assert ours.final.differences(theirs.final) == []
        assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
        assert theirs.initial.differences(theirs.final) != []


@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_streamed_run_gives_the_bits_of_stock(
    name: str, world_size: int, stock: Callable[[str], list[gpt.Run]], tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    streamed(world_size, name, tmp_path / "state", until=STEPS // 2, save=checkpoint)
    runs = streamed(world_size, name, tmp_path / "state", until=STEPS, load=checkpoint)

    for ours, theirs in zip(runs, stock(name), strict=True):
        assert ours.first_iteration == STEPS // 2
        assert ours.final.differences(theirs.final) == []
