"""A streamed run is saved, loaded and gone on with, and nothing foreign is loaded silently."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import gpt, streaming
from tests.gpt import Run
from tests.patched.resume import SAVED_AT
from tests.patched.scenarios import Scenario, by_name, train
from tests.patched.test_streaming_failures import Stopped, fill_grads, raised
from tests.rank_pool import RankPool

DP2 = Scenario(
    "dp2",
    2,
    [*gpt.BF16, *gpt.MOE, "--moe-router-dtype", "fp32"],
    native_fp32=("layernorm", "router.weight"),
)
EP2 = Scenario("ep2", 2, [*gpt.BF16, *gpt.MOE, "--expert-model-parallel-size", "2"])
# Upstream fails to save a rank's native FP32 params on its own, with an assertion.
PLAIN = Scenario("plain", 2, gpt.BF16)
SCENARIOS = {
    "dp2": DP2,
    "ep2": EP2,
    "plain": PLAIN,
    "lion": by_name("lion"),
}

Saved = tuple[Path, list[Run]]


@pytest.fixture(scope="module")
def save(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Saved]:
    """Train to the save, streamed or not, once for each scenario: (checkpoint, runs)."""

    @functools.cache
    def save_once(name: str, is_streamed: bool) -> Saved:
        base = tmp_path_factory.mktemp(name)
        runs = ranks.run(
            train,
            SCENARIOS[name].world_size,
            scenario=SCENARIOS[name],
            directory=str(base / "state") if is_streamed else None,
            until=SAVED_AT,
            save=str(base / "checkpoint"),
        )
        return base / "checkpoint", runs

    return save_once


def test_the_state_of_another_optimizer_is_an_error(
    ranks: RankPool, save: Callable[[str, bool], Saved], tmp_path: Path
) -> None:
    """Adam does not go on from Lion's moments; the message says what to do."""
    checkpoint, _ = save("lion", True)
    adam = dataclasses.replace(by_name("lion"), config={})

    (ours, _), (theirs, _) = ranks.run(
        attempt, 2, scenario=adam, directory=str(tmp_path), load=str(checkpoint)
    )

    assert ours == theirs
    assert ours.startswith("StateStoreError: ")
    assert "holds main, exp_avg, expected main, exp_avg, exp_avg_sq" in ours
    assert "same --optimizer" in ours and "--no-load-optim" in ours


def attempt(
    scenario: Scenario, directory: str | None, load: str, extra: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Load a checkpoint; return the error, and what is wrong with a fresh optimizer state."""
    found: list[str] = []

    def look(model: Sequence[Any], optimizer: Any) -> None:
        store = optimizer._nvme_state_store
        for index, entry in enumerate(store.entries):
            state = store.read_entry(index)
            if not torch.equal(state["main"], entry.model_shard().float().cpu()):
                found.append(f"main of {entry.record.name}")
            if state["exp_avg"].any() or state["exp_avg_sq"].any():
                found.append(f"moments of {entry.record.name}")
        if store.steps:
            found.append(f"{store.steps} steps")
        raise Stopped

    changed = dataclasses.replace(scenario, arguments=[*scenario.arguments, *extra])
    error = raised(
        lambda: (
            train(changed, directory, until=SAVED_AT, load=load, after_setup=look)
            if directory
            else train(changed, None, until=SAVED_AT, load=load)
        )
    )
    return error, found


@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune"])
def test_a_fresh_start_has_zero_moments_and_the_loaded_weights(
    flag: str, ranks: RankPool, save: Callable[[str, bool], Saved], tmp_path: Path
) -> None:
    """Main params are the weights of the checkpoint, not those of the initialization."""
    checkpoint, _ = save("dp2", True)

    for error, wrong in ranks.run(
        attempt, 2, scenario=DP2, directory=str(tmp_path), load=str(checkpoint), extra=[flag]
    ):
        assert error == "Stopped: "
        assert wrong == []


def damage(state: Path) -> None:
    (path,) = (state / "rank00001").rglob("state-*.bin")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove_rank(state: Path) -> None:
    shutil.rmtree(state / "rank00001")


def remove_all(state: Path) -> None:
    shutil.rmtree(state)


def exchange_ranks(state: Path) -> None:
    (state / "rank00000").rename(state / "rank")
    (state / "rank00001").rename(state / "rank00000")
    (state / "rank").rename(state / "rank00001")


@pytest.mark.parametrize(
    ("change", "extra", "tells"),
    [
        (damage, (), "the checkpoint is damaged"),
        (remove_rank, (), "no snapshot of ranks [1]"),
        (remove_all, (), "holds no streamed optimizer state"),
        (exchange_ranks, (), "holds other shards than this rank has"),
        (None, ("--stream-optimizer-state-bucket-numel", "9999"), "was saved with other buckets"),
    ],
)
def test_unusable_state_is_the_same_error_on_all_ranks(
    change: Callable[[Path], None] | None,
    extra: Sequence[str],
    tells: str,
    ranks: RankPool,
    save: Callable[[str, bool], Saved],
    tmp_path: Path,
) -> None:
    """Damaged, incomplete, absent or of other shards."""
    checkpoint, _ = save("dp2", True)
    copied = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, copied)
    if change is not None:
        (state,) = copied.glob("iter_*/nvme_optimizer_state")
        change(state)

    (ours, _), (theirs, _) = ranks.run(
        attempt_with,
        2,
        scenario=DP2,
        directory=str(tmp_path / "state"),
        load=str(copied),
        extra=extra,
    )

    assert ours == theirs
    assert tells in ours
    kind = "ValueError" if change is remove_all else "StateStoreError"
    assert ours.startswith(f"{kind}: ")


def test_another_data_parallel_size_is_an_error(
    ranks: RankPool, save: Callable[[str, bool], Saved], tmp_path: Path
) -> None:
    """Resharding is not there yet, and does not happen by accident."""
    checkpoint, _ = save("dp2", True)

    ((error, _),) = ranks.run(
        attempt, 1, scenario=DP2, directory=str(tmp_path), load=str(checkpoint)
    )

    assert error.startswith("StateStoreError: ")
    assert "holds other shards than this rank has" in error
    assert "load it with the same parallel topology" in error


def mix_saves(base: str) -> tuple[list[str], list[str], bool]:
    """Load a mixture of two saves of one step; return errors, files left, and an old save's use."""
    errors: list[str] = []
    files: list[str] = []
    loads: list[bool] = []

    def act(model: Sequence[Any], optimizer: Any) -> None:
        first, second = Path(base, "first"), Path(base, "second")
        optimizer.save_stores(first)
        optimizer.save_stores(second)
        optimizer.save_stores(second)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            files.extend(sorted(path.name for path in second.rglob("*") if path.is_file()))
            shutil.rmtree(second / "rank00001")
            shutil.copytree(first / "rank00001", second / "rank00001")
        torch.distributed.barrier()
        errors.append(raised(lambda: optimizer.load_stores(second)))
        errors.append(raised(lambda: optimizer.save_stores(second)))
        loads.append(raised(lambda: optimizer.load_stores(first)) == "")
        raise Stopped

    arguments = ["--tensor-model-parallel-size", "2", *streaming.flags(Path(base, "state"))]
    assert raised(lambda: gpt.train([*gpt.BF16, *arguments], 0, after_setup=act)) == "Stopped: "
    return errors, files, loads[0]


def test_ranks_of_different_saves_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Even where steps and weights are the same, and no rank has a peer in its own group."""
    (ours, files, is_restored), (theirs, _, _) = ranks.run(mix_saves, 2, base=str(tmp_path))

    assert ours == theirs
    assert "of different saves" in ours[0] and "is failed" in ours[1]
    assert is_restored
    assert len(files) == 2 * len(("manifest", "state")), "a second save replaces the first"


def attempt_with(
    scenario: Scenario, directory: str, load: str, extra: Sequence[str]
) -> tuple[str, list[str]]:
    """`attempt`, where ``extra`` overrides a flag of the store."""
    flags = streaming.flags
    streaming.flags = lambda *args: [*flags(*args), *extra]
    return attempt(scenario, directory, load)


def load_markers(directory: str) -> list[str]:
    """Load markers of a fresh state and of one that has seen three steps; return the errors."""
    errors: list[str] = []

    def act(model: Sequence[Any], optimizer: Any) -> None:
        marker = optimizer.state_dict()
        errors.append(raised(lambda: optimizer.load_state_dict(marker)))
        marker["nvme_state_store"]["steps"] = 3
        errors.append(raised(lambda: optimizer.load_state_dict(marker)))
        raise Stopped

    arguments = [*gpt.BF16, *streaming.flags(directory)]
    assert raised(lambda: gpt.train(arguments, 0, after_setup=act)) == "Stopped: "
    return errors


def test_a_framework_that_did_not_load_the_state_is_told(ranks: RankPool, tmp_path: Path) -> None:
    """A marker that was loaded without its state would let the optimizer start afresh."""
    ((fresh, missing),) = ranks.run(load_markers, directory=str(tmp_path))

    assert fresh == ""
    assert missing.startswith("ValueError: ")
    assert "has seen 3 steps, the state here 0: it was not loaded" in missing


def test_stock_checkpoint_in_a_streamed_run_is_an_error(
    ranks: RankPool, save: Callable[[str, bool], Saved], tmp_path: Path
) -> None:
    """On all ranks, and the message says what to do."""
    checkpoint, _ = save("plain", False)

    (ours, _), (theirs, _) = ranks.run(
        attempt, 2, scenario=PLAIN, directory=str(tmp_path), load=str(checkpoint)
    )

    assert ours == theirs
    assert ours.startswith("ValueError: ") and "--no-load-optim" in ours


@pytest.mark.parametrize("extra", [[], ["--dist-ckpt-strictness", "log_all"]])
def test_streamed_checkpoint_in_a_stock_run_is_an_error(
    ranks: RankPool, save: Callable[[str, bool], Saved], extra: list[str]
) -> None:
    """On all ranks, before upstream misses its own tensors or is told to do without them."""
    checkpoint, _ = save("ep2", True)

    found = ranks.run(attempt, 2, scenario=EP2, directory=None, load=str(checkpoint), extra=extra)

    for error, _ in found:
        assert error == found[0][0]
        assert error.startswith("ValueError: ") and "the optimizer state was streamed" in error


def drive(directory: str, base: str) -> dict[str, Any]:
    """Drive one store as a framework does that knows only its four methods."""
    found: dict[str, Any] = {}

    def act(model: Sequence[Any], optimizer: Any) -> None:
        store = optimizer._nvme_state_store
        weights = [buffer.param_data for chunk in model for buffer in chunk.buffers]

        def prepare() -> None:
            fill_grads(model)
            optimizer.prepare_grads()

        def mains() -> list[torch.Tensor]:
            return [store.read_entry(index)["main"] for index in range(len(store.entries))]

        def moments() -> list[torch.Tensor]:
            entries = range(len(store.entries))
            return [store.read_entry(index)["exp_avg"] for index in entries]

        def shards() -> list[torch.Tensor]:
            return [entry.model_shard().clone().cpu() for entry in store.entries]

        def is_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
            return all(map(torch.equal, ours, theirs))

        def rounds() -> bool:
            return is_same([main.bfloat16() for main in mains()], shards())

        prepare()
        found["step returns"] = store.step()
        found["published"] = rounds()
        first, first_mains, first_moments = [w.clone() for w in weights], mains(), moments()
        found["absent"] = store.load_from(Path(base, "nothing"))
        store.save_to(base)
        prepare()
        store.step()
        second_mains = mains()
        found["moved"] = not is_same(first_mains, second_mains)
        found["other weights"] = raised(lambda: store.load_from(base))
        for weight, value in zip(weights, first, strict=True):
            weight.copy_(value)
        found["load returns"] = store.load_from(base)
        found["restored"] = is_same(mains(), first_mains) and is_same(moments(), first_moments)
        found["steps"] = store.steps
        prepare()
        store.step()
        found["again"] = is_same(mains(), second_mains)

        for weight in weights:
            weight.mul_(1.5)
        prepare()
        found["replaced"] = raised(store.step)
        found["name"] = store.entries[0].record.name
        for weight, value in zip(weights, first, strict=True):
            weight.copy_(value)
        store.load_from(base)
        for weight in weights:
            weight.mul_(1.5)
        store.refresh_main_from_model_params()
        found["refreshed"] = is_same(mains(), [shard.float() for shard in shards()])
        found["kept"] = is_same(moments(), first_moments) and store.steps == 1

        pieces = []

        def copy_fn(entry: int, start: int, out: torch.Tensor) -> None:
            precise = store.entries[entry].model_shard()[start : start + out.numel()].float()
            out.copy_(precise * (1 + 2**-12))
            pieces.append((entry, start, out.numel()))

        store.refresh_main_from_model_params(copy_fn)
        found["precise"] = is_same(mains(), [s.float() * (1 + 2**-12) for s in shards()])
        found["pieces"] = sum(numel for _, _, numel in pieces) == sum(
            entry.record.numel for entry in store.entries
        )
        prepare()
        found["goes on"] = raised(store.step)

        # The same through upstream's own method, with an FP32 state dict.
        state_dict = {
            name: tensor.float() * (1 + 2**-12) if tensor.is_floating_point() else tensor
            for name, tensor in model[0].state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }
        found["by state dict"] = raised(
            lambda: optimizer.reload_model_params({"model": state_dict})
        )
        found["fp32 mains"] = is_same(mains(), [s.float() * (1 + 2**-12) for s in shards()])
        optimizer.reload_model_params()
        found["bf16 mains"] = is_same(mains(), [s.float() for s in shards()])
        raise Stopped

    try:
        gpt.train([*gpt.BF16, *streaming.flags(directory)], 0, after_setup=act)
    except Stopped:
        return found
    raise AssertionError("setup did not reach the callback")


@pytest.fixture(scope="module")
def driven(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a foreign caller saw."""
    base = tmp_path_factory.mktemp("driven")
    (found,) = ranks.run(drive, directory=str(base / "state"), base=str(base / "saved"))
    assert isinstance(found, dict)
    return found


def test_four_methods_serve_a_foreign_caller(driven: dict[str, Any]) -> None:
    """step, save_to, load_from: no adapter of ours is needed."""
    assert driven["step returns"] is True and driven["load returns"] is True
    assert driven["absent"] is False
    for name in ("published", "moved", "restored", "again"):
        assert driven[name], name
    assert driven["steps"] == 1


def test_state_of_other_weights_is_refused(driven: dict[str, Any]) -> None:
    """A model of another iteration does not fit the main params."""
    assert "weights and optimizer state are of different checkpoints" in driven["other weights"]


def test_replaced_weights_are_refused_by_name(driven: dict[str, Any]) -> None:
    """A load path that forgot to refresh is found at the next step."""
    assert driven["replaced"].startswith("StateStoreError: ")
    assert "bucket 0 (" in driven["replaced"] and driven["name"] in driven["replaced"]
    assert "reload_model_params()" in driven["replaced"]


def test_refresh_replaces_main_params_and_nothing_else(driven: dict[str, Any]) -> None:
    """From the 16-bit shards, or more precise values, piece by piece; then training goes on."""
    for name in ("refreshed", "kept", "precise", "pieces"):
        assert driven[name], name
    assert driven["goes on"] == ""


def test_reload_model_params_takes_the_state_dict_if_there_is_one(driven: dict[str, Any]) -> None:
    """FP32 values of a state dict are kept, which the model's own params would have lost."""
    assert driven["by state dict"] == ""
    assert driven["fp32 mains"]
    assert driven["bf16 mains"]


def reload_precisely(directory: str) -> bool:
    """Reload from FP32 values on a rank that owns a part of the params; were they kept?"""
    kept: list[bool] = []

    def act(model: Sequence[Any], optimizer: Any) -> None:
        precise = 1 + 2**-12
        state_dict = {
            name: tensor.float() * precise if tensor.is_floating_point() else tensor
            for name, tensor in model[0].state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }
        optimizer.reload_model_params({"model": state_dict})
        store = optimizer._nvme_state_store
        kept.extend(
            torch.equal(
                store.read_entry(index)["main"], entry.model_shard().float().cpu() * precise
            )
            for index, entry in enumerate(store.entries)
        )
        raise Stopped

    try:
        gpt.train([*gpt.BF16, *streaming.flags(directory)], 0, after_setup=act)
    except Stopped:
        return bool(kept) and all(kept)
    raise AssertionError("setup did not reach the callback")


def test_each_rank_reloads_its_own_part_of_a_state_dict(ranks: RankPool, tmp_path: Path) -> None:
    """A shard begins somewhere in its param, and a piece somewhere in its shard."""
    assert ranks.run(reload_precisely, 2, directory=str(tmp_path)) == [True, True]
