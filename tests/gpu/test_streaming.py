"""Streaming on real CUDA: the same bits as stock, and less device memory."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import gpt, streaming
from tests.gpu import cuda_ranks

pytestmark = pytest.mark.gpu

STEPS = 10
# Large enough that state outweighs everything else, small enough to be quick.
MODEL = shlex.split("--num-layers 4 --hidden-size 512 --num-attention-heads 8 --deterministic-mode")
OPTIMIZERS = ("adam", "muon")
BUCKET_NUMEL = 1_000_000  # a quarter of it each: several buckets
TIERS = ("--stream-optimizer-state-host-gb", "0.03", "--stream-optimizer-state-device-gb", "0.015")
STORAGE = {
    "disk": (),
    "tiers": TIERS,
    "host": ("--stream-optimizer-state-host-gb", "1"),
    "ahead": ("--stream-optimizer-state-ahead-gb", "1"),
    "split": ("--stream-optimizer-state-main-storage", "split", *TIERS),
    "sync": ("--stream-optimizer-state-engine", "sync", "--stream-optimizer-state-io", "buffered"),
}
"""Ways to keep the state that make no difference."""


def train(world_size: int, *arguments: str, **kwargs: Any) -> list[gpt.Run]:
    runs: list[gpt.Run] = cuda_ranks.run(
        gpt.train, world_size, arguments=[*gpt.BF16, *MODEL, *arguments], **kwargs
    )
    return runs


def streamed(
    world_size: int, directory: Path, optimizer: str = "adam", storage: str = "disk", **kwargs: Any
) -> list[gpt.Run]:
    return train(
        world_size,
        *("--optimizer", optimizer),
        *streaming.flags(directory, bucket_numel=BUCKET_NUMEL),
        *STORAGE[storage],
        optimizer_tensors=streaming.streamed_tensors,
        **kwargs,
    )


@pytest.fixture(scope="module")
def stock(world_size: int) -> Callable[[str], list[gpt.Run]]:
    """Train stock with an optimizer, once."""
    return functools.cache(lambda name: train(world_size, "--optimizer", name, until=STEPS))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_streamed_training_gives_the_bits_of_stock(
    optimizer: str, world_size: int, stock: Callable[[str], list[gpt.Run]], tmp_path: Path
) -> None:
    """Weights, main params, moments, step and losses after 10 steps; less memory at its peak."""
    runs = streamed(world_size, tmp_path, optimizer, until=STEPS)

    for ours, theirs in zip(runs, stock(optimizer), strict=True):
        assert ours.final.differences(theirs.final) == []
        assert ours.losses == theirs.losses
        assert ours.max_device_nbytes < theirs.max_device_nbytes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_streamed_run_gives_the_bits_of_stock(
    optimizer: str, world_size: int, stock: Callable[[str], list[gpt.Run]], tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    streamed(world_size, tmp_path / "state", optimizer, until=STEPS // 2, save=checkpoint)
    runs = streamed(world_size, tmp_path / "state", optimizer, until=STEPS, load=checkpoint)

    for ours, theirs in zip(runs, stock(optimizer), strict=True):
        assert ours.first_iteration == STEPS // 2
        assert ours.final.differences(theirs.final) == []


@pytest.mark.parametrize("storage", [name for name in STORAGE if name != "disk"])
def test_how_the_state_is_kept_makes_no_difference(
    storage: str, world_size: int, stock: Callable[[str], list[gpt.Run]], tmp_path: Path
) -> None:
    """Tiers, formats without loss, and engines; saved and resumed with copies on real streams."""
    checkpoint = str(tmp_path / "checkpoint")
    more = {"storage": storage}
    streamed(world_size, tmp_path / "state", until=STEPS // 2, save=checkpoint, **more)
    runs = streamed(world_size, tmp_path / "state", until=STEPS, load=checkpoint, **more)

    for ours, theirs in zip(runs, stock("adam"), strict=True):
        assert ours.final.differences(theirs.final) == []


def offload_and_restore(model: Any, optimizer: Any) -> None:
    """What RL frameworks do between training and inference."""
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()


def test_offloading_and_restoring_changes_nothing(
    world_size: int, stock: Callable[[str], list[gpt.Run]], tmp_path: Path
) -> None:
    """Upstream's own code would read evicted storage and kill the CUDA context."""
    runs = streamed(world_size, tmp_path, until=STEPS, after_setup=offload_and_restore)

    for ours, theirs in zip(runs, stock("adam"), strict=True):
        assert ours.final.differences(theirs.final) == []


def peaks_of_refresh_save_and_load(model: Any, optimizer: Any, directory: str) -> dict[str, int]:
    """Return the device bytes that each takes on top of what is there, and some sizes."""
    stores = list(optimizer._stores())
    found = {
        "slots_nbytes": sum(
            store.working_set.staging.num_slots * store.layout.slot_nbytes for store in stores
        ),
        "slot_main_numel": max(store.layout.slot_numels[0] for store in stores),
        "state_nbytes": sum(store.layout.nbytes for store in stores),
    }
    for name, call in (
        ("refresh", optimizer.reload_model_params),
        ("save", lambda: optimizer.save_stores(Path(directory))),
        ("load", lambda: optimizer.load_stores(Path(directory))),
    ):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


def measure(arguments: list[str], directory: str) -> dict[str, int]:
    """Set up a streamed run and return what `peaks_of_refresh_save_and_load` finds."""
    found: dict[str, int] = {}

    def look(model: Any, optimizer: Any) -> None:
        found.update(peaks_of_refresh_save_and_load(model, optimizer, directory))

    gpt.train(arguments, until=0, after_setup=look, optimizer_tensors=streaming.streamed_tensors)
    return found


def test_refresh_save_and_load_take_nothing_but_the_slots(tmp_path: Path) -> None:
    """The formula of `staging.py`, fingerprints included, on what CUDA really allocates."""
    flags = streaming.flags(tmp_path / "state", bucket_numel=BUCKET_NUMEL)
    (found,) = cuda_ranks.run(
        measure, arguments=[*gpt.BF16, *MODEL, *flags], directory=str(tmp_path / "snapshot")
    )

    bound = 3 * found["slot_main_numel"] + (1 << 20)
    assert bound < found["slots_nbytes"] < found["state_nbytes"], "or it would show nothing"
    for name in ("refresh", "save", "load"):
        assert found[name] <= bound, found
