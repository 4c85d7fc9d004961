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
FP8 = ("--optimizer", "adam", "--fp8-format", "e4m3", "--fp8-param-gather", "--fp8-recipe")
ROWS |= {
    "fp8-tensorwise": (*FP8, "tensorwise"),
    "fp8-blockwise": (*FP8, "blockwise"),
    "fp8-delayed": (*FP8, "delayed", "--no-stream-ckpt-dequant"),
    "fp8-overlapped": (*FP8, "blockwise", "--overlap-grad-reduce", "--overlap-param-gather"),
}
BUCKET_NUMEL = 1_000_000  # several buckets, and params of 8 bits that are cut


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
    classes = {type(param).__name__ for chunk in model for param in chunk.parameters()}
    if get_args().fp8_param_gather:
        assert classes & {"Float8Tensor", "Float8BlockwiseQTensor"}, classes
    inner = [each.optimizer for _, each in gpt.inner_optimizers(optimizer)]
    masters = [getattr(each, "master", each) for each in inner]  # streamed: behind its step
    assert bases_of_transformer_engine(iter(masters)) == {"FusedAdam"}, masters


def train(world_size: int, name: str, *arguments: str, **kwargs: Any) -> list[gpt.Run]:
    runs: list[gpt.Run] = cuda_ranks.run(
        gpt.train,
        world_size,
        arguments=[*gpt.BF16, *MODEL, *ROWS[name], *arguments],
        after_setup=require_transformer_engine,
        # Delayed scaling keeps its history in a pickle, which is refused otherwise.
        environment={"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"},
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


class Found(Exception):
    """Ends a run with the errors that it was to provoke."""


def change_quantised_weights(model: Sequence[Any], optimizer: Any) -> None:
    """Change a scale of the first quantised param, then a byte, each before a step."""
    found = []
    (store,) = optimizer._stores()
    entry = next(each for each in store.entries if each.quantised is not None)
    for changed in (entry.quantised.scales(), entry.model_shard()):
        for buffer in model[0].buffers:
            buffer.grad_data.fill_(1e-3)
        optimizer.step()
        saved = changed.clone()
        changed[0] += 1
        for buffer in model[0].buffers:
            buffer.grad_data.fill_(1e-3)
        try:
            optimizer.step()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
        changed.copy_(saved)
        store._state = type(store._state).READY
    raise Found(*found)


def errors_of_changed_weights(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return what `change_quantised_weights` provokes."""
    try:
        gpt.train(arguments, until=0, after_setup=change_quantised_weights)
    except Found as found:
        return found.args
    return ()


@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-blockwise"])
def test_quantised_weights_that_were_replaced_are_found(name: str, tmp_path: Path) -> None:
    """Whether it is their bytes or their scales."""
    arguments = [*gpt.BF16, *MODEL, *ROWS[name], *streaming.flags(tmp_path, BUCKET_NUMEL)]

    (errors,) = cuda_ranks.run(errors_of_changed_weights, 1, arguments=arguments)

    assert len(errors) == 2
    assert all("the model params are not those the store published" in each for each in errors)
