"""A snapshot is complete or absent, whatever happens while it is written, and damage is found."""

from __future__ import annotations

import io
import os
import random
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store import checkpoint
from megatron.core.optimizer.nvme_state_store.checkpoint import (
    FORMAT,
    MANIFEST,
    EntryRecord,
    PreparedSnapshot,
    commit_snapshot,
    is_snapshot,
    load_snapshot,
    prepare_snapshot,
)
from megatron.core.optimizer.nvme_state_store.errors import StateFileError, StateStoreError
from megatron.core.optimizer.nvme_state_store.formats import BF16, FORMATS, FP32, SPLIT, Format
from megatron.core.optimizer.nvme_state_store.layout import ALIGN_BYTES, Bucket, Layout, make_layout

from tests.store.failing_file import small_tmpfs

SIZES = [100, 5000, 64]
ADAM = ("exp_avg", "exp_avg_sq")
LAYOUT = make_layout(SIZES, 1024, ADAM)
ENTRIES = [EntryRecord(f"0.layer{i}.weight", (n, 2), n, n) for i, n in enumerate(SIZES)]
RESIDENT = b"state of resident params"


def content(step: int, layout: Layout = LAYOUT) -> bytes:
    return random.Random(step).randbytes(layout.nbytes)


class State:
    """The state of a step: buckets that live apart, in another order than in a snapshot."""

    def __init__(self, step: int, layout: Layout = LAYOUT) -> None:
        whole = content(step, layout)
        self.layout = layout
        self.extents = {
            bucket.index: bytearray(whole[bucket.offset : bucket.offset + bucket.nbytes])
            for bucket in reversed(layout.buckets)
        }
        self.num_reads = 0

    def read_into(self, bucket: Bucket, start: int, view: memoryview) -> None:
        self.num_reads += 1
        view[:] = self.extents[bucket.index][start : start + view.nbytes]

    def write_from(self, bucket: Bucket, start: int, view: memoryview) -> None:
        extent = self.extents[bucket.index]
        extent[start : start + view.nbytes] = view
        assert len(extent) == bucket.nbytes

    def content(self) -> bytes:
        return b"".join(self.extents[bucket.index] for bucket in self.layout.buckets)


def save(directory: Path, step: int, resident: bytes | None = RESIDENT) -> None:
    commit_snapshot(prepare(directory, step, resident))


def prepare(
    directory: Path, step: int, resident: bytes | None = RESIDENT, state: State | None = None
) -> PreparedSnapshot:
    state = State(step) if state is None else state
    return prepare_snapshot(directory, LAYOUT, state, ENTRIES, step, resident, f"generation{step}")


def loaded(directory: Path) -> tuple[int, bool, bytes | None]:
    """Return the step, whether the content is that of the step, and the resident state."""
    state = State(0)
    manifest, resident = load_snapshot(directory, LAYOUT, state, ENTRIES)
    return manifest.step, state.content() == content(manifest.step), resident


def test_load_restores_what_was_saved(tmp_path: Path) -> None:
    """Every byte of the file, the counter and the resident state."""
    save(tmp_path / "a" / "b", 1)

    assert loaded(tmp_path / "a" / "b") == (1, True, RESIDENT)


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    """Also where the new one has no resident state; nothing of the old one is left."""
    save(tmp_path / "s", 1)
    save(tmp_path / "s", 2, resident=None)

    assert loaded(tmp_path / "s") == (2, True, None)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        MANIFEST,
        "state-generation2.bin",
    ]


def test_a_discarded_snapshot_leaves_the_older_one_alone(tmp_path: Path) -> None:
    """Nothing of the discarded one is left."""
    save(tmp_path / "s", 1)
    before = sorted((tmp_path / "s").iterdir())

    prepare(tmp_path / "s", 2).discard()

    assert sorted((tmp_path / "s").iterdir()) == before
    assert loaded(tmp_path / "s") == (1, True, RESIDENT)


def test_a_store_without_elements_is_saved_and_loaded(tmp_path: Path) -> None:
    """A rank may have no part of any param."""
    layout = make_layout([0, 0], 1024, ADAM)
    entries = [EntryRecord("a", (3,), 0, 0), EntryRecord("b", (3,), 3, 0)]
    state = State(1, layout)
    commit_snapshot(prepare_snapshot(tmp_path / "s", layout, state, entries, 7, None, "g"))
    manifest, resident = load_snapshot(tmp_path / "s", layout, state, entries)
    assert (manifest.step, resident) == (7, None)


SYSCALLS = [
    *("open", "fsync", "fdatasync", "pwrite", "preadv", "posix_fallocate", "posix_fadvise"),
    *("mkdir", "replace", "unlink", "listdir", "close"),
]


def kill_at(number: int, work: Callable[[], None]) -> bool:
    """Do ``work`` in a child that gets SIGKILL before its n-th system call; True if it did."""
    child = os.fork()
    if child == 0:
        count = 0

        def counting(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in SYSCALLS:
            setattr(os, name, counting(getattr(os, name)))
        io.open = counting(io.open)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_kill_at_any_system_call_leaves_one_complete_snapshot(tmp_path: Path) -> None:
    """The old one or the new one, and the next save works and cleans up."""
    outcomes = []
    for number in range(1, 500):
        directory = tmp_path / f"killed{number}"
        save(directory, 1)
        if not kill_at(number, lambda where=directory: save(where, 2)):  # type: ignore[misc]
            break
        step, is_whole, resident = loaded(directory)
        assert is_whole and resident == RESIDENT
        outcomes.append(step)
        save(directory, 3)
        assert loaded(directory) == (3, True, RESIDENT)
        assert len(list(directory.iterdir())) == 3
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert outcomes.count(1) >= 20 and outcomes.count(2) >= 3


def test_kill_in_a_first_save_leaves_no_snapshot(tmp_path: Path) -> None:
    """A directory without a manifest is none, until the rename."""
    outcomes = []
    for number in range(1, 500):
        directory = tmp_path / f"killed{number}" / "deep"
        if not kill_at(number, lambda where=directory: save(where, 1)):  # type: ignore[misc]
            break
        outcomes.append(is_snapshot(directory))
        if outcomes[-1]:
            assert loaded(directory) == (1, True, RESIDENT)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_every_damaged_byte_of_the_data_is_found(tmp_path: Path) -> None:
    """One flipped bit in any bucket is an error that names the bucket."""
    save(tmp_path / "s", 1)
    (path,) = (tmp_path / "s").glob("state-*")
    sound = path.read_bytes()
    for bucket in LAYOUT.buckets:
        for offset in (bucket.offset, bucket.offset + bucket.nbytes - 1):
            damaged = bytearray(sound)
            damaged[offset] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(StateStoreError, match=f"bucket {bucket.index} at offset"):
                loaded(tmp_path / "s")


def test_every_damaged_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    """Also one that leaves it readable, such as a digit of the step counter."""
    save(tmp_path / "s", 1)
    path = tmp_path / "s" / MANIFEST
    sound = path.read_bytes()
    state = State(0)
    for offset in range(len(sound)):
        damaged = bytearray(sound)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(StateStoreError):
            load_snapshot(tmp_path / "s", LAYOUT, state, ENTRIES)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"format": 1}', "\x00", "\udcff", '{"format": 2}', "1" * 5000]
)
def test_a_manifest_of_anything_is_an_error_of_the_store(text: str, tmp_path: Path) -> None:
    """No other exception escapes."""
    save(tmp_path / "s", 1)
    (tmp_path / "s" / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StateStoreError, match=MANIFEST):
        loaded(tmp_path / "s")


@pytest.mark.parametrize("change", ["cut", "grown", "removed"])
@pytest.mark.parametrize("kind", ["state", "resident"])
def test_data_of_another_size_is_found(kind: str, change: str, tmp_path: Path) -> None:
    """A file that is cut, grown or gone."""
    save(tmp_path / "s", 1)
    (path,) = (tmp_path / "s").glob(f"{kind}-*")
    if change == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if change == "cut" else path.read_bytes() + b"x")
    with pytest.raises((StateStoreError, OSError), match=r"state-|damaged|resident-"):
        loaded(tmp_path / "s")


@pytest.mark.parametrize(
    "entries",
    [
        ENTRIES[:-1],
        [*ENTRIES, EntryRecord("new", (1,), 0, 1)],
        [ENTRIES[1], ENTRIES[0], ENTRIES[2]],
        [EntryRecord("0.other.weight", *list(vars(ENTRIES[0]).values())[1:]), *ENTRIES[1:]],
        [EntryRecord(ENTRIES[0].name, (100, 3), 100, 100), *ENTRIES[1:]],
        [EntryRecord(ENTRIES[0].name, (100, 2), 0, 100), *ENTRIES[1:]],
    ],
)
def test_other_shards_are_refused(entries: list[EntryRecord], tmp_path: Path) -> None:
    """Another number, order, name, shape or range."""
    save(tmp_path / "s", 1)
    with pytest.raises(StateStoreError, match="other shards"):
        load_snapshot(tmp_path / "s", LAYOUT, State(0), entries)


def test_other_buckets_are_refused(tmp_path: Path) -> None:
    """The message says which flag must be the same."""
    save(tmp_path / "s", 1)
    layout = make_layout(SIZES, 2048, ADAM)
    with pytest.raises(StateStoreError, match="--stream-optimizer-state-bucket-numel"):
        load_snapshot(tmp_path / "s", layout, State(0, layout), ENTRIES)


@pytest.mark.parametrize("keys", [(), ("exp_avg",), ("exp_avg", "max"), ("exp_avg_sq", "exp_avg")])
def test_state_of_another_optimizer_is_refused(keys: tuple[str, ...], tmp_path: Path) -> None:
    """More, fewer, others or in another order; the message says what there is and what to do."""
    save(tmp_path / "s", 1)
    layout = make_layout(SIZES, 1024, keys)
    with pytest.raises(StateStoreError, match="saved with another optimizer") as caught:
        load_snapshot(tmp_path / "s", layout, State(0, layout), ENTRIES)
    assert "holds main, exp_avg, exp_avg_sq, expected main" in str(caught.value)
    assert "--no-load-optim" in str(caught.value)


@pytest.mark.parametrize("keys", [(), ("momentum_buffer",)], ids=len)
def test_snapshots_of_fewer_segments_are_whole(keys: tuple[str, ...], tmp_path: Path) -> None:
    """The manifest names them, and every byte comes back."""
    layout = make_layout(SIZES, 1024, keys)
    one, two = State(1, layout), State(2, layout)
    commit_snapshot(prepare_snapshot(tmp_path / "s", layout, one, ENTRIES, 1, None, "g"))
    manifest, _ = load_snapshot(tmp_path / "s", layout, two, ENTRIES)
    assert two.content() == content(1, layout)
    assert manifest.segments == ("main", *keys)


FORMAT_1 = """{
 "format": 1, "generation": "g", "step": 7, "segments": ["main", "exp_avg", "exp_avg_sq"],
 "entries": [{"name": "0.w", "shape": [8], "start": 0, "numel": 8}],
 "buckets": [[0, 8, 2317716204]], "resident": null, "checksum": 113307606
}"""
"""As version 0.19.2+nvme.1 wrote it while it knew Adam only; its state is zeros."""
FORMAT_2 = """{
 "format": 2, "generation": "g", "step": 7, "segments": ["main", "exp_avg", "exp_avg_sq"],
 "entries": [{"name": "0.w", "shape": [8], "start": 0, "numel": 8}],
 "buckets": [[0, [8, 8, 8], 2317716204]], "resident": null, "strides": [[0, "exp_avg", [1]]],
 "checksum": 2454481055
}"""
"""As it wrote it before it knew formats but FP32."""


@pytest.mark.parametrize(
    ("text", "strides"), [(FORMAT_1, ()), (FORMAT_2, ((0, "exp_avg", (1,)),))], ids=["1", "2"]
)
def test_a_snapshot_of_an_older_format_is_loaded(
    text: str, strides: tuple[object, ...], tmp_path: Path
) -> None:
    """Segments have been in the manifest from the beginning; all of them were FP32."""
    layout = make_layout([8], 1024, ADAM)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / MANIFEST).write_text(text)
    (tmp_path / "s" / "state-g.bin").write_bytes(bytes(layout.nbytes))
    state = State(1, layout)
    manifest, _ = load_snapshot(tmp_path / "s", layout, state, [EntryRecord("0.w", (8,), 0, 8)])
    assert (manifest.step, manifest.segments) == (7, layout.segments)
    assert manifest.formats == ("fp32",) * 3
    assert (manifest.fingerprints, manifest.strides) == ((), strides)
    assert not any(state.content())


@pytest.mark.parametrize("text", [FORMAT_1, FORMAT_2], ids=["1", "2"])
def test_a_snapshot_of_an_older_format_does_not_pass_for_another_storage(
    text: str, tmp_path: Path
) -> None:
    """A manifest without formats is one of FP32."""
    layout = make_layout([8], 1024, ADAM, (FP32, BF16, BF16))
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / MANIFEST).write_text(text)
    with pytest.raises(StateStoreError, match="was saved as main fp32, exp_avg fp32"):
        entries = [EntryRecord("0.w", (8,), 0, 8)]
        load_snapshot(tmp_path / "s", layout, State(1, layout), entries)


def test_a_snapshot_of_a_format_to_come_is_refused(tmp_path: Path) -> None:
    """By its number, not by what it lacks."""
    save(tmp_path / "s", 1)
    path = tmp_path / "s" / MANIFEST
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    with pytest.raises(StateStoreError, match=f"format {FORMAT + 1}, expected 1 to {FORMAT}"):
        loaded(tmp_path / "s")


EIGHT_BITS = (SPLIT, FORMATS["fp8e4m3"], FORMATS["fp8e4m3-sqrt"])


@pytest.mark.parametrize("formats", [(FP32, BF16, BF16), EIGHT_BITS], ids=["bf16", "split"])
def test_a_snapshot_names_its_formats_and_fingerprints(
    formats: tuple[Format, ...], tmp_path: Path
) -> None:
    """Fingerprints are numbers of 64 bits with a sign, and come back as they are."""
    layout = make_layout(SIZES, 1024, ADAM, formats)
    prints = tuple((-(2**63) + each.index, 2**63 - 1) for each in layout.buckets)
    one, two = State(1, layout), State(2, layout)
    prepared = prepare_snapshot(
        *(tmp_path / "s", layout, one, ENTRIES, 1, None, "g"), fingerprints=prints
    )
    commit_snapshot(prepared)
    manifest, _ = load_snapshot(tmp_path / "s", layout, two, ENTRIES)

    assert manifest == prepared.manifest
    assert manifest.format == FORMAT
    assert manifest.formats == tuple(each.name for each in formats)
    assert manifest.fingerprints == prints
    assert two.content() == content(1, layout)
    (path,) = (tmp_path / "s").glob("state-*")
    assert path.stat().st_size == layout.nbytes


def test_other_formats_are_refused(tmp_path: Path) -> None:
    """Bytes would be taken for other numbers; the message says which flags must be the same."""
    save(tmp_path / "s", 1)
    layout = make_layout(SIZES, 1024, ADAM, EIGHT_BITS)
    with pytest.raises(StateStoreError, match="--stream-optimizer-state-main-storage") as caught:
        load_snapshot(tmp_path / "s", layout, State(0, layout), ENTRIES)
    assert "was saved as main fp32, exp_avg fp32, exp_avg_sq fp32, expected main split" in str(
        caught.value
    )
    assert "--stream-optimizer-state-moment-dtype" in str(caught.value)


@pytest.mark.parametrize("chunk", [ALIGN_BYTES, 3 * ALIGN_BYTES, 1 << 20])
def test_extents_larger_than_a_piece_are_copied_piece_by_piece(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rest at the end; the checksum is that of the whole extent."""
    monkeypatch.setattr(checkpoint, "_CHUNK", chunk)
    state = State(1)
    prepared = prepare(tmp_path / "s", 1, state=state)
    commit_snapshot(prepared)

    assert state.num_reads == sum(-(-bucket.nbytes // chunk) for bucket in LAYOUT.buckets)
    for bucket, (offset, numels, checksum) in zip(
        LAYOUT.buckets, prepared.manifest.buckets, strict=True
    ):
        assert (offset, numels) == (bucket.offset, bucket.numels)
        assert checksum == zlib.crc32(state.extents[bucket.index])
    assert loaded(tmp_path / "s") == (1, True, RESIDENT)


def test_a_failing_read_of_the_store_leaves_the_older_snapshot(tmp_path: Path) -> None:
    """And nothing of the new one."""
    save(tmp_path / "s", 1)
    before = sorted((tmp_path / "s").iterdir())

    class Broken(State):
        def read_into(self, bucket: Bucket, start: int, view: memoryview) -> None:
            super().read_into(bucket, start, view)
            if self.num_reads == 2:
                raise StateFileError(Path("state.bin"), "read", errno=5)

    with pytest.raises(StateStoreError, match="read failed"):
        prepare(tmp_path / "s", 2, state=Broken(2))
    assert sorted((tmp_path / "s").iterdir()) == before
    assert loaded(tmp_path / "s") == (1, True, RESIDENT)


def test_a_failing_write_to_the_store_is_an_error_of_the_load(tmp_path: Path) -> None:
    """The snapshot itself is as good as before."""
    save(tmp_path / "s", 1)

    class Broken(State):
        def write_from(self, bucket: Bucket, start: int, view: memoryview) -> None:
            raise StateFileError(Path("state.bin"), "write", errno=5)

    with pytest.raises(StateStoreError, match="write failed"):
        load_snapshot(tmp_path / "s", LAYOUT, Broken(2), ENTRIES)
    assert loaded(tmp_path / "s") == (1, True, RESIDENT)


def test_a_full_filesystem_leaves_the_older_snapshot(tmp_path: Path) -> None:
    """Whether it is the state, the resident state or the manifest that finds no room."""
    with small_tmpfs(tmp_path / "small", f"size={LAYOUT.nbytes * 3 // 2}") as small:
        save(small / "s", 1)
        before = sorted((small / "s").iterdir())
        with pytest.raises(StateStoreError, match="No space left"):
            save(small / "s", 2)
        assert sorted((small / "s").iterdir()) == before
        assert loaded(small / "s") == (1, True, RESIDENT)


def test_no_room_for_the_resident_state_leaves_nothing(tmp_path: Path) -> None:
    """The state that had room already is removed again."""
    with small_tmpfs(tmp_path / "small", f"size={LAYOUT.nbytes * 3 // 2}") as small:
        with pytest.raises(OSError, match="No space left"):
            save(small / "s", 2, resident=bytes(LAYOUT.nbytes))
        assert list((small / "s").iterdir()) == []


def test_directories_are_synced_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest on disk names data on disk, and the names of new directories are there, too."""
    calls: list[str] = []
    sync, rename = checkpoint._sync_directory, Path.replace

    def recorded_sync(path: Path) -> None:
        calls.append(path.name)
        sync(path)

    def recorded_rename(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr(checkpoint, "_sync_directory", recorded_sync)
    monkeypatch.setattr(Path, "replace", recorded_rename)
    (tmp_path / "base").mkdir()

    save(tmp_path / "base" / "rank0" / "s", 1)

    assert calls == ["rank0", "base", "s", "rename", "s"]


def test_a_directory_that_cannot_be_looked_into_is_an_error(tmp_path: Path) -> None:
    """It must not pass for one without a snapshot."""
    if os.geteuid() == 0:
        # Root may read everything: a name that is too long cannot be looked at by anybody.
        with pytest.raises(OSError, match="File name too long"):
            is_snapshot(tmp_path / ("x" * 300))
    else:
        (tmp_path / "closed").mkdir(mode=0o000)
        with pytest.raises(PermissionError):
            is_snapshot(tmp_path / "closed")
