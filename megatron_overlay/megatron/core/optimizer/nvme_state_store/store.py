"""The state store of one optimizer on one rank: its lifetime and state, and what callers may do."""

from __future__ import annotations

import contextlib
import enum
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist

from . import checkpoint
from .agreement import agree, gather
from .bucket_optimizer import update_params
from .bucket_work import BucketWork
from .budgets import Budgets
from .config import GB, StoreConfig
from .errors import StateFileError, StateStoreError
from .io_request import IoCounters
from .layout import MAIN, Bucket, Layout
from .model_shards import CopyFn, Entry
from .optimizer_state import InitStateFn, StateKeys
from .pipeline import run_step
from .placement import Placement
from .progress import Progress
from .report import StepReport
from .resident import Resident, resident_state, set_resident_state
from .staging import ResidentBucket
from .working_set import WorkingSet, max_host_slot_nbytes

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """What a store may do next.

    EMPTY -> READY: `initialize_main_from_model_params`
    READY -> STEPPING -> READY: `step`
    READY, FAILED, STEPPING (a step was interrupted) -> READY: `load_from`
    READY, STEPPING, any -> FAILED: an error in between; only `load_from` restores from here
    any -> CLOSED: `close`
    """

    EMPTY = "empty"
    READY = "ready"
    STEPPING = "stepping"
    FAILED = "failed"
    CLOSED = "closed"


class OptimizerStateStore:
    """FP32 main params and optimizer state of one optimizer: on disk, and by budget in memory.

    The four methods that frameworks drive are `step`, `refresh_main_from_model_params`, `save_to`
    and `load_from`. Each is collective over ``group``: if it fails on one rank it raises the same
    `StateStoreError` on all. Without a group (stores of whole params) it raises on that rank
    alone, and who drives the store agrees with the other ranks: `StreamedChainedOptimizer` does,
    in its `step`, `reload_model_params`, `save_stores` and `load_stores`, which serve all stores of
    a rank. Called from one thread. `step` returns when every model param is published; what it
    writes to disk goes on behind it, and what fails there is raised by the next call.

    Attributes:
        steps: optimizer steps made, also in runs before.
        generation: the save that was saved or loaded last.
        last_step: what the last step did.

    Args:
        config: validated settings.
        optimizer: the master optimizer, whose param groups hold the handles of the entries and
            the resident params, and whose class does the updates.
        entries: what is streamed, in the order of the layout.
        resident: what stays on the device.
        group: the ranks that must agree (those that gather params from each other), or None.
        device: where the model is.
        name: names this store among those of its rank; the same in every run of one topology.
        init_state_fn: upstream's, if it has one for this class.
        peers: None if the entries are flat shards. Whole params may need more than an elementwise
            update: then these are, for each param group, the groups of ranks that its updates
            communicate with; all of them walk the same entries of it.

    Raises:
        ValueError: the class keeps state that does not stream.
    """

    def __init__(
        self,
        config: StoreConfig,
        optimizer: torch.optim.Optimizer,
        entries: Sequence[Entry],
        resident: Sequence[Resident],
        group: dist.ProcessGroup | None,
        device: torch.device,
        name: str,
        init_state_fn: InitStateFn | None = None,
        peers: Sequence[Sequence[dist.ProcessGroup]] | None = None,
    ) -> None:
        self.name = name
        self.steps = 0
        self.generation = ""
        self.entries = tuple(entries)
        self.resident = tuple(resident)
        self.last_step = StepReport()
        self._work = BucketWork(config, optimizer, entries, device, init_state_fn, peers)
        self._config = config
        self._optimizer = optimizer
        self._group = group
        self._device = device
        self._state = State.EMPTY
        self._failure = ""
        self._working_set: WorkingSet | None = None

    def use_part(self, part: Fraction) -> None:
        """Take only a part of the slots and the read-ahead that are configured, before all else.

        Args:
            part: of a rank's; ranks that walk the same entries of whole params give the same.
        """
        self._require(State.EMPTY)
        self._config = self._config.part(part)
        self._work.lay_out(self._config)

    @property
    def keys(self) -> StateKeys:
        """What state the optimizer's class keeps."""
        return self._work.keys

    @property
    def layout(self) -> Layout:
        """Its buckets."""
        return self._work.layout

    @property
    def counters(self) -> IoCounters:
        """Bytes read from and written to disk since construction, and the seconds that took."""
        return IoCounters() if self._working_set is None else self._working_set.homes.counters

    @property
    def working_set(self) -> WorkingSet:
        """What moves the state; only an EMPTY store has none."""
        assert self._working_set is not None, "it is not initialized"
        return self._working_set

    @property
    def placement(self) -> Placement:
        """Where the buckets live."""
        return self.working_set.homes.placement

    @property
    def state(self) -> State:
        """What the store may do next."""
        return self._state

    # ------------------------------------------------------------------------- the life of a store

    def initialize_main_from_model_params(self, budgets: Budgets | None = None) -> int:
        """Reserve disk and memory, and fill the main params from the 16-bit shards.

        All else is zero.

        Args:
            budgets: memory for buckets that do not go to disk; None: the configured bytes, ``auto``
                meaning none.

        Returns:
            Bytes of the main params at home.

        Raises:
            StateStoreError: on all ranks of the group, if any could not reserve or write.
        """
        self._require(State.EMPTY)
        start = time.monotonic()
        if budgets is None:
            budgets = Budgets(self._config.device_bytes or 0, self._config.host_bytes or 0)
        with self._collective("initialization of the main params"):
            name = self.name.replace("/", "-")
            self._working_set = WorkingSet(self._config, self.layout, budgets, name, self._device)
            written = self._write_mains(None)
        self._work.shards.release_initial_values()
        self._state = State.READY
        self.working_set.log()
        logger.info(
            "NVMe optimizer main-param initialization: %.3f GB in %.2fs",
            written / GB,
            time.monotonic() - start,
        )
        self.working_set.pipeline.read_ahead()
        return written

    @property
    def max_slot_nbytes(self) -> int:
        """Bytes of pinned memory that the host slots take at most, whatever the budgets are."""
        return max_host_slot_nbytes(self._config, self.layout)

    def fail(self, reason: str) -> None:
        """Accept nothing but `load_from` any more: this rank's state fits no other rank's.

        The first reason stays, so that refusals of later calls do not hide it.
        """
        if self._state not in (State.FAILED, State.CLOSED):
            self._state = State.FAILED
            self._failure = reason

    def close(self) -> None:
        """Remove the files. A second call does nothing."""
        if self._state is State.CLOSED:
            return
        self._state = State.CLOSED
        if self._working_set is not None:
            self._working_set.close()

    def drain(self) -> None:
        """Wait until everything that the last step began is at home.

        Raises:
            StateStoreError: on all ranks of the group, if a write had failed. The store is FAILED.
        """
        with self._collective("end of the last step's writes"):
            self._require(State.READY)
            self._bring_home()

    def _bring_home(self) -> None:
        """Wait until every bucket is at home; if one cannot be, its bytes are lost: FAILED."""
        try:
            self.working_set.drain()
        except StateStoreError as error:
            self.fail(str(error))
            raise

    def release_slots(self, *, host: bool = False) -> None:
        """Give the memory of the device slots back until the next use; for colocated training.

        Args:
            host: also that of the host slots, which takes a while to pin again.

        Raises:
            StateStoreError: on all ranks of the group, if a write had failed. The store is FAILED.
        """
        self.drain()
        self.working_set.release_slots(host=host)

    # --------------------------------------------------------------------- what frameworks may call

    def step(self) -> bool:
        """Update every entry from its gradient and publish it to the model shards.

        Resident params step first. A caller that skips a step does not call this: nothing is read
        or written, and no counter moves (invariant 3).

        Returns:
            True.

        Raises:
            StateStoreError: on all ranks of the group. The store is FAILED.
        """
        start = time.monotonic()
        with self._collective("step"):
            try:
                self._require(State.READY)
                self._state = State.STEPPING
                pipeline = self.working_set.pipeline
                pipeline.begin_step()
                self._work.shards.check(self.layout.buckets)
                self._update_residents()
            except Exception as error:
                raise self._work.hold_meetings(error) from error
            report = run_step(pipeline, self.layout.buckets, self._work.stages(self.steps))
            self._set_steps(self.steps + 1)
        self._state = State.READY
        report.seconds = time.monotonic() - start
        with contextlib.suppress(StateFileError):  # a number for the log fails no step
            report.bytes_cached = self.working_set.homes.cached_nbytes()
        self.last_step = report
        logger.info("NVMe streaming step: %s", report)
        return True

    def refresh_main_from_model_params(self, copy_fn: CopyFn | None = None) -> None:
        """Overwrite the main params, one bucket at a time, after the model params were replaced.

        The optimizer's state and step counter stay, as in upstream's `reload_model_params`.

        Args:
            copy_fn: gives more precise values than the 16-bit shards hold; None takes the shards.

        Raises:
            StateStoreError: on all ranks of the group. The store is FAILED.
        """
        with self._collective("refresh of the main params"):
            self._require(State.READY)
            self._bring_home()
            self._write_mains(copy_fn)
        self.working_set.pipeline.read_ahead()

    def remember_quantised(self) -> None:
        """Take note of the quantised params, after the step's cast: see [Note: Quantised params].

        Until then the next step would find that somebody changed them.
        """
        self._work.shards.remember_quantised(self.layout.buckets)

    def save_to(self, base_dir: str | Path) -> None:
        """Write a snapshot into a directory of this store below ``base_dir``.

        Raises:
            StateStoreError: on all ranks of the group. The store stays READY, unless its last step
                could not be written; an older snapshot stays whole.
        """
        self.commit_save(self.prepare_save(base_dir, new_generation(self._group)))

    def prepare_save(self, base_dir: str | Path, generation: str) -> checkpoint.PreparedSnapshot:
        """Write all of a snapshot but the rename that makes it valid: half of `save_to`.

        Args:
            base_dir: as for `save_to`.
            generation: from `new_generation`.

        Raises:
            StateStoreError: on all ranks of the group; nothing is left of it.
        """
        start = time.monotonic()
        directory = Path(base_dir) / self.name
        prepared: checkpoint.PreparedSnapshot | None = None
        try:
            with self._collective("save", is_fatal=False):
                self._require(State.READY)
                self._bring_home()
                self._work.shards.check_published(self.layout.buckets)
                prepared = checkpoint.prepare_snapshot(
                    directory,
                    self.layout,
                    self.working_set.homes,
                    [entry.record for entry in self.entries],
                    self.steps,
                    resident_state(self._optimizer, self.resident),
                    generation,
                    self._work.shards.strides,
                    self._work.fingerprints_to_save(),
                )
        except StateStoreError:
            if prepared is not None:
                prepared.discard()
            raise
        assert prepared is not None, "no error, so there is a snapshot"
        logger.info(
            "NVMe optimizer state saved: %s %.3f GB in %.2fs",
            directory,
            self.layout.nbytes / GB,
            time.monotonic() - start,
        )
        return prepared

    def commit_save(self, prepared: checkpoint.PreparedSnapshot) -> None:
        """Make a prepared snapshot the valid one: the other half of `save_to`.

        Raises:
            StateStoreError: on all ranks of the group, some of which may have the new snapshot and
                some the older one; a load tells them apart by their generation.
        """
        with self._collective("commit of the save", is_fatal=False):
            checkpoint.commit_snapshot(prepared)
        self.generation = prepared.manifest.generation

    def load_from(self, base_dir: str | Path) -> bool:
        """Restore the snapshot that `save_to` wrote below ``base_dir``.

        The model params must have been loaded before: each bucket's main params are compared with
        them (invariant 1).

        Returns:
            False, with nothing changed, if no rank of the group has a snapshot there.

        Raises:
            StateStoreError: on all ranks of the group: a snapshot is missing on some, damaged, of
                other shards, or of other weights. The store is FAILED.
        """
        directory = Path(base_dir) / self.name
        has_one = False
        with self._collective("search for a snapshot", is_fatal=False):
            if self._state not in (State.FAILED, State.STEPPING):
                self._require(State.READY)
            has_one = checkpoint.is_snapshot(directory)
        found = gather(has_one, self._group)
        if not any(found.values()):
            return False
        start = time.monotonic()
        with self._collective("load"):
            missing = sorted(rank for rank, has_one in found.items() if not has_one)
            if missing:
                raise StateStoreError(f"{base_dir}: no snapshot of ranks {missing}")
            self.working_set.pipeline.forget()
            if self._state is not State.READY:
                self.working_set.homes.replace_files()
            manifest, resident = checkpoint.load_snapshot(
                directory,
                self.layout,
                self.working_set.homes,
                [entry.record for entry in self.entries],
            )
            self.working_set.homes.settle()
            set_resident_state(self._optimizer, self.keys, self.resident, resident)
            self._set_steps(manifest.step)
            self._work.shards.strides = manifest.strides
            self.generation = manifest.generation
            self._work.require_saved(manifest.fingerprints)
            pipeline = self.working_set.pipeline
            for bucket in self.layout.buckets:
                pipeline.look_at(bucket, self._work.compare, bucket.starts[MAIN + 1])
        saves = gather((self.steps, self.generation), self._group)
        if len(set(saves.values())) > 1:
            self.fail(f"{base_dir}: the ranks' snapshots are of different saves: {saves}")
            raise StateStoreError(self._failure)
        self._state = State.READY
        logger.info(
            "NVMe optimizer state loaded: %s %.3f GB in %.2fs, step %d",
            directory,
            self.layout.nbytes / GB,
            time.monotonic() - start,
            self.steps,
        )
        return True

    def read_entry(self, index: int) -> dict[str, torch.Tensor]:
        """Return an entry's main params and state, FP32 on the host: for tests and tools."""
        self._require(State.READY)
        self._bring_home()
        self.working_set.pipeline.forget()
        return self._work.read_entry(index, self.working_set.pipeline.look_at)

    def _update_residents(self) -> None:
        if self.resident:
            update_params(
                self._optimizer,
                [resident.param for resident in self.resident],
                [resident.group for resident in self.resident],
            )

    def _write_mains(self, copy_fn: CopyFn | None) -> int:
        """Fill the main params of every bucket and take them home; returns their bytes there."""
        pipeline = self.working_set.pipeline
        pipeline.forget()
        rounds: list[torch.Tensor] = []

        def fill(bucket: Bucket, resident: ResidentBucket) -> None:
            rounds.extend(self._work.fill(bucket, resident, copy_fn))

        total = sum(bucket.starts[MAIN + 1] for bucket in self.layout.buckets)
        progress = Progress(logger, "NVMe optimizer main params, writing", total)
        for bucket in self.layout.buckets:
            progress.advance(pipeline.write_main(bucket, fill))
        pipeline.drain()
        self.working_set.homes.settle()
        if rounds and not bool(torch.stack(rounds).all()):
            raise StateStoreError(
                "the main params that were given do not round to the model params, from which "
                "--stream-optimizer-state-main-storage split takes their upper half; load weights "
                "and main params of one checkpoint, or use fp32"
            )
        return total

    def _set_steps(self, steps: int) -> None:
        """Set the one step counter; groups show it, also those of which this rank has no part."""
        self.steps = steps
        self.keys.count_in_groups(self._optimizer.param_groups, steps)

    # ------------------------------------------------------------------------- states and failures

    def _require(self, state: State) -> None:
        if self._state is not state:
            detail = f": {self._failure}" if self._failure else ""
            raise StateStoreError(
                f"store {self.name} is {self._state.value}, expected {state.value}{detail}"
            )

    @contextlib.contextmanager
    def _collective(self, what: str, *, is_fatal: bool = True) -> Iterator[None]:
        """Run the body, then agree with the other ranks on whether it failed anywhere."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        try:
            agree(error, self._group, self._device)
        except StateStoreError as agreed:
            text = f"NVMe optimizer state store, {what}: {agreed}"
            if is_fatal:
                self.fail(text)
            raised = StateStoreError(text)
            raised.names_ranks = agreed.names_ranks
            raise raised from error


def new_generation(group: dist.ProcessGroup | None) -> str:
    """Return a name for the next save that all ranks of ``group`` agree on."""
    return str(next(iter(gather(uuid.uuid4().hex, group).values())))
