"""A failure on one rank is the same error on all, in seconds, and the store says why it stopped."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import gpt, streaming
from tests.rank_pool import RankPool, RanksFailed

FAILING_RANK = 1
LIMIT_S = 20.0

TP2 = ("--tensor-model-parallel-size", "2")
MUON = ("--optimizer", "muon", "--muon-tp-mode", "distributed")
TOPOLOGIES = {
    "dp2": [],
    "tp2": TP2,
    "ep2": [*gpt.MOE, "--expert-model-parallel-size", "2"],
    # A bucket for each matrix: ranks wait for each other in the update of every one.
    "muon-tp2": [*MUON, *TP2, "--stream-optimizer-state-bucket-numel", "5000"],
    "muon-dp2": [*MUON, "--stream-optimizer-state-bucket-numel", "5000"],
}
FAILING_STORE = {"ep2": "optimizer1", "muon-dp2": "optimizer1"}
"""In EP 2 each rank has an expert store of its own, and it is that one that fails; of Muon's, the
store of the matrices or that of Adam beside it."""


@dataclass(slots=True)
class Attempt:
    """What one rank saw of a failing call, and of what came after."""

    error: str
    seconds: float
    states: list[str]
    refused: list[str] = field(default_factory=list)
    is_restored: bool = False


class Stopped(Exception):
    """Ends a training run after its setup, with what there was to see."""


def layer_of(which: str) -> Any:
    """Let the state file of one store of this rank go through a layer that can fail."""
    from megatron.core.optimizer.nvme_state_store.state_file import OS_LAYER, StateFile

    from tests.store.failing_file import FailingLayer

    layer = FailingLayer()
    create = StateFile.create.__func__  # type: ignore[attr-defined]

    def failing_create(
        cls: Any, /, path: Path, nbytes: int, real: Any = OS_LAYER, **options: Any
    ) -> Any:
        is_ours = path.name == "state.bin" and which in path.parent.name
        return create(cls, path, nbytes, layer if is_ours else real, **options)

    StateFile.create = classmethod(failing_create)  # type: ignore[method-assign, assignment]
    return layer


def let_reads_end(store: Any) -> None:
    """Wait for reads ahead, so that a planted fault meets what it is meant for."""
    if store.state.value == "ready":
        for slot in store.working_set.pipeline._host_slots:
            if slot.read is not None:
                slot.read.wait()


def raised(call: Callable[[], Any]) -> str:
    """Return what a call raises, with its type, or the empty string."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fill_grads(model: Sequence[Any]) -> None:
    """Give every param a gradient, without a forward pass."""
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            buffer.grad_data.copy_(torch.linspace(-1, 1, buffer.grad_data.numel()).cuda())


def weights(model: Sequence[Any]) -> list[torch.Tensor]:
    return [param.data for chunk in model for param in chunk.parameters()]


def fail_everywhere(which: str, arguments: Sequence[str], directory: str, base: str) -> Any:
    """Fail in one call after the other, restoring the store in between."""
    is_failing = int(os.environ["RANK"]) == FAILING_RANK
    layer = layer_of(which) if is_failing else None
    found: dict[str, Attempt] = {}

    def act(model: Sequence[Any], optimizer: Any) -> None:
        from megatron.core.optimizer.nvme_state_store import checkpoint

        def step() -> None:
            fill_grads(model)
            optimizer.step()
            optimizer.drain_stores()

        def save(where: str = "good") -> None:
            optimizer.save_stores(Path(base, where))

        def load(where: str = "good") -> None:
            optimizer.load_stores(Path(base, where))

        def attempt(
            name: str, call: Callable[[], Any], arrange: Callable[[], Any] = lambda: None
        ) -> None:
            for store in optimizer._stores():
                let_reads_end(store)
            if is_failing:
                arrange()
            start = time.monotonic()
            error = raised(call)
            seconds = time.monotonic() - start
            seen = Attempt(error, seconds, [store.state.value for store in optimizer._stores()])
            if "failed" in seen.states:
                calls = (step, save, optimizer.reload_model_params, step)
                seen.refused = [raised(call) for call in calls]
            for weight, good in zip(weights(model), saved, strict=True):
                weight.copy_(good)
            load()
            seen.is_restored = raised(step) == ""
            for weight, good in zip(weights(model), saved, strict=True):
                weight.copy_(good)
            load()
            found[name] = seen

        def fails_once(name: str) -> Callable[[], None]:
            """Let a function of the checkpoint module fail at its next call."""
            real = getattr(checkpoint, name)

            def failing(*args: Any) -> Any:
                setattr(checkpoint, name, real)
                raise OSError(errno.EIO, "planted")

            return lambda: setattr(checkpoint, name, failing)

        def store_that_fails() -> Any:
            return list(optimizer._stores())[int(which[-1])]

        def drop_grad() -> None:
            store_that_fails().entries[-1].main.grad = None

        def step_without_grad() -> None:
            fill_grads(model)
            prepare = optimizer.prepare_grads

            def prepared() -> bool:
                result: bool = prepare()
                if is_failing:
                    drop_grad()
                return result

            optimizer.prepare_grads = prepared
            try:
                optimizer.step()
            finally:
                optimizer.prepare_grads = prepare

        step()
        saved = [weight.clone() for weight in weights(model)]
        save()

        def fails(call: str, nth: int = 1) -> Callable[[], None]:
            return lambda: layer.fail(call, errno.EIO, nth) if layer else None

        def change_weight() -> None:
            store_that_fails().entries[0].model_shard().add_(1)

        def step_then_save() -> None:
            """Do not wait in between: the save finds what has failed behind the step."""
            fill_grads(model)
            optimizer.step()
            save("other")

        def fail_last_write() -> None:
            if layer:
                layer.fail("pwrite", errno.EIO, len(store_that_fails().layout.buckets))

        attempt("step-read", step, fails("preadv", 2))
        attempt("step-write", step, fails("pwrite", 2))
        attempt("step-short-file", step, lambda: layer.omit("preadv", 0) if layer else None)
        attempt("step-update", step_without_grad)
        attempt("step-weights", step, change_weight)
        attempt("step-failed-alone", step, lambda: store_that_fails().fail("planted"))
        attempt("refresh-write", optimizer.reload_model_params, fails("pwrite"))
        attempt("refresh-sync", optimizer.reload_model_params, fails("fdatasync"))
        attempt("save-late-write", step_then_save, fail_last_write)
        attempt("save-weights", save, change_weight)
        attempt("save-read", save, fails("preadv"))
        attempt("save-commit", lambda: save("other"), fails_once("commit_snapshot"))
        attempt("load-write", load, fails("pwrite"))
        attempt("load-open", load, fails_once("load_snapshot"))
        attempt("load-search", load, fails_once("is_snapshot"))
        attempt("load-weights", load, change_weight)
        raise Stopped(found)

    try:
        gpt.train([*gpt.BF16, *streaming.flags(directory), *arguments], 0, after_setup=act)
    except Stopped as stopped:
        return stopped.args[0]
    raise AssertionError("setup did not reach the callback")


FATAL = {
    "step-read": "read failed at offset",
    "step-write": "write failed at offset",
    "step-short-file": "did something truncate it?",
    "step-update": "has no gradient",
    "step-weights": "the model params are not those the store published",
    "step-failed-alone": "is failed, expected ready: planted",
    "save-late-write": "write failed at offset",
    "refresh-write": "write failed at offset",
    "refresh-sync": "sync failed",
    "load-write": "write failed at offset",
    "load-open": "planted",
    "load-search": "planted",
    "load-weights": "weights and optimizer state are of different checkpoints",
}
HARMLESS = {
    "save-weights": "the model params are not those the store published",
    "save-read": "read failed at offset",
    "save-commit": "planted",
}


@pytest.fixture(scope="module")
def attempts(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Attempt]]]:
    """Fail in every way in a topology, once; returns the attempts of each rank."""

    @functools.cache
    def make_once(topology: str) -> list[dict[str, Attempt]]:
        directory = tmp_path_factory.mktemp(topology)
        return ranks.run(
            fail_everywhere,
            2,
            which=FAILING_STORE.get(topology, "optimizer0"),
            arguments=TOPOLOGIES[topology],
            directory=str(directory / "state"),
            base=str(directory / "saved"),
        )

    return make_once


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", [*FATAL, *HARMLESS])
def test_all_ranks_raise_the_same_error_in_seconds(
    name: str, topology: str, attempts: Callable[[str], list[dict[str, Attempt]]]
) -> None:
    """The error names the failing rank and its reason, on every rank."""
    seen = [rank[name] for rank in attempts(topology)]

    assert seen[0].error == seen[1].error
    assert seen[0].error.startswith("StateStoreError: ")
    assert f"rank {FAILING_RANK}: " in seen[0].error
    assert seen[0].error.count({**FATAL, **HARMLESS}[name]) == 1
    assert {**FATAL, **HARMLESS}[name] in seen[0].error
    assert max(each.seconds for each in seen) < LIMIT_S


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", FATAL)
def test_a_failed_store_refuses_all_but_a_load(
    name: str, topology: str, attempts: Callable[[str], list[dict[str, Attempt]]]
) -> None:
    """On every rank, with the reason; loading restores it."""
    for rank in attempts(topology):
        seen = rank[name]
        assert set(seen.states) == {"failed"}
        assert seen.refused[0] == seen.refused[3], "a refusal does not become the reason"
        for refused in seen.refused:
            assert "is failed, expected ready" in refused
            assert FATAL[name] in refused
        assert seen.is_restored


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_failure_that_changed_nothing_leaves_the_store_ready(
    name: str, topology: str, attempts: Callable[[str], list[dict[str, Attempt]]]
) -> None:
    """A save that failed can be repeated."""
    for rank in attempts(topology):
        assert (set(rank[name].states), rank[name].is_restored) == ({"ready"}, True)


def no_pinned_memory(*args: Any) -> None:
    """Stands for slots that the driver refuses to pin."""
    raise MemoryError("planted")


def start_without_pinned_memory(arguments: Sequence[str]) -> str:
    """Set up a run whose rank 1 cannot pin its host slots; return the error."""
    from megatron.core.optimizer.nvme_state_store import working_set

    if int(os.environ["RANK"]) == FAILING_RANK:
        vars(working_set)["PinnedBytes"] = no_pinned_memory
    return start(arguments)


def test_no_pinned_memory_on_one_rank_ends_all_at_construction(
    ranks: RankPool, tmp_path: Path
) -> None:
    """It is not only disks that fail on one rank alone."""
    ours, theirs = ranks.run(start_without_pinned_memory, 2, arguments=streaming.flags(tmp_path))

    assert ours == theirs
    assert ours.startswith("StateStoreError: ") and "rank 1: MemoryError: planted" in ours


def start(arguments: Sequence[str], fault: int = 0, which: str = "optimizer0") -> str:
    """Set up a run whose rank 1 cannot reserve its file; return the error."""
    if fault and int(os.environ["RANK"]) == FAILING_RANK:
        layer_of(which).fail("posix_fallocate", fault)
    began = time.monotonic()
    error = raised(lambda: gpt.train([*gpt.BF16, *arguments], 0))
    assert time.monotonic() - began < LIMIT_S
    return error


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_space_on_one_rank_ends_all_at_construction(
    topology: str, ranks: RankPool, tmp_path: Path
) -> None:
    """With the same error, and nothing is left on disk."""
    ours, theirs = ranks.run(
        start,
        2,
        arguments=[*TOPOLOGIES[topology], *streaming.flags(tmp_path)],
        fault=errno.ENOSPC,
        which=FAILING_STORE.get(topology, "optimizer0"),
    )

    assert ours == theirs
    assert ours.startswith("StateStoreError: ")
    assert f"rank {FAILING_RANK}: " in ours and "No space left on device" in ours


@pytest.mark.parametrize(
    ("options", "tells"), [("size=1m", "No space left on device"), ("ro", "Read-only file system")]
)
def test_a_filesystem_without_room_is_an_error_at_construction(
    options: str, tells: str, ranks: RankPool, tmp_path: Path
) -> None:
    """A real small filesystem, and a real read-only one."""
    from tests.store.failing_file import small_tmpfs

    with small_tmpfs(tmp_path / "small", options) as small:
        ours, theirs = ranks.run(start, 2, arguments=streaming.flags(small / "state"))

        assert ours == theirs
        assert ours.startswith("StateStoreError: ") and tells in ours
        assert [path for path in small.rglob("*") if path.name == "state.bin"] == []


def train_alone(directory: str) -> list[Any]:
    """Train as the only rank of a run of its own, side by side with the other rank's run."""
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"]) + rank
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ["MASTER_PORT"] = str(port)
    run = gpt.train(
        [*gpt.BF16, *streaming.flags(directory)], 3, optimizer_tensors=streaming.streamed_tensors
    )
    return [run.final.tensors, len(list(Path(directory).glob("rank*.lock")))]


def step_without_a_number(directory: str) -> tuple[str, int | None]:
    """Make a step whose page cache nobody can tell; return the state after it."""
    found: list[Any] = []

    def act(model: Sequence[Any], optimizer: Any) -> None:
        from megatron.core.optimizer.nvme_state_store.errors import StateFileError

        store = optimizer._nvme_state_store

        def fail() -> int:
            raise StateFileError(Path("x"), "resident_bytes")

        store.working_set.homes.cached_nbytes = fail
        fill_grads(model)
        optimizer.step()
        found.extend((store.state.value, store.last_step.bytes_cached))
        raise Stopped

    with contextlib.suppress(Stopped):
        gpt.train([*gpt.BF16, *streaming.flags(directory)], 0, after_setup=act)
    return found[0], found[1]


def test_a_number_for_the_log_fails_no_step(ranks: RankPool, tmp_path: Path) -> None:
    """The step was complete."""
    assert ranks.run(step_without_a_number, directory=str(tmp_path)) == [("ready", None)]


def interrupt_a_step(directory: str, base: str) -> list[str]:
    """Interrupt a step as Ctrl-C does, and return the states after it and after a load."""
    states: list[str] = []

    def act(model: Sequence[Any], optimizer: Any) -> None:
        store = optimizer._nvme_state_store
        optimizer.save_stores(Path(base))
        publish = store._work.shards.publish

        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        store._work.shards.publish = interrupt
        fill_grads(model)
        with contextlib.suppress(KeyboardInterrupt):
            optimizer.step()
        states.append(store.state.value)
        store._work.shards.publish = publish
        optimizer.load_stores(Path(base))
        states.append(store.state.value)
        raise Stopped

    with contextlib.suppress(Stopped):
        gpt.train([*gpt.BF16, *streaming.flags(directory)], 0, after_setup=act)
    return states


def test_an_interrupted_step_is_restored_by_one_load(ranks: RankPool, tmp_path: Path) -> None:
    states = ranks.run(
        interrupt_a_step, directory=str(tmp_path / "state"), base=str(tmp_path / "saved")
    )

    assert states == [["stepping", "ready"]]


def build_again_and_again(directory: str) -> list[int]:
    """Set up three times, forgetting one optimizer and closing another; return pinned bytes."""
    import gc

    from megatron.core.optimizer import get_megatron_optimizer

    from tests.emulated_cuda import pinned_memory_allocated

    pinned: list[int] = []

    def act(model: Sequence[Any], optimizer: Any) -> None:
        pinned.append(pinned_memory_allocated())
        optimizer.close_stores()
        pinned.append(pinned_memory_allocated())
        for _ in range(2):
            another = get_megatron_optimizer(optimizer.config, list(model))
            pinned.append(pinned_memory_allocated())
            del another
            gc.collect()
        raise Stopped

    with contextlib.suppress(Stopped):
        gpt.train(
            [*gpt.BF16, *gpt.MOE, *streaming.flags(directory)],
            0,
            after_setup=act,
        )
    return pinned


def test_an_optimizer_may_be_built_again(ranks: RankPool, tmp_path: Path) -> None:
    """Whether the one before was closed or merely forgotten."""
    (pinned,) = ranks.run(build_again_and_again, directory=str(tmp_path))

    assert pinned[0] > 0 and pinned[1] == 0
    assert pinned[2] == pinned[0]


def test_two_live_runs_share_a_base_directory(ranks: RankPool, tmp_path: Path) -> None:
    """Both train as if they were alone."""
    (ours, _), (theirs, locks) = ranks.run(train_alone, 2, directory=str(tmp_path))

    assert ours == theirs
    assert locks >= 1


def be_killed(model: Sequence[Any], optimizer: Any) -> None:
    """Die without a chance to clean up."""
    os.kill(os.getpid(), signal.SIGKILL)


def look_at(directory: str) -> list[str]:
    """Set up a run and return the names in its base directory."""
    names: list[str] = []

    def look(model: Sequence[Any], optimizer: Any) -> None:
        names.extend(path.name for path in Path(directory).glob("rank*") if path.is_dir())
        optimizer._nvme_state_store.close()
        optimizer._nvme_state_store.close()
        names.extend(path.name for path in Path(directory).glob("rank*"))
        assert "is closed, expected ready" in raised(optimizer._nvme_state_store.step)
        raise Stopped

    with contextlib.suppress(Stopped):
        gpt.train([*gpt.BF16, *streaming.flags(directory)], 0, after_setup=look)
    return names


def test_a_killed_run_is_reclaimed_by_the_next_and_closing_removes_the_files(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Kill -9 leaves the files, the next start removes them; after `close` there are none."""
    with pytest.raises(RanksFailed, match="SIGKILL"):
        ranks.run(
            gpt.train,
            arguments=[*gpt.BF16, *streaming.flags(tmp_path)],
            until=1,
            after_setup=be_killed,
        )
    (left,) = [path.name for path in tmp_path.glob("rank*") if path.is_dir()]

    (names,) = ranks.run(look_at, directory=str(tmp_path))

    assert len(names) == 1 and names != [left]
