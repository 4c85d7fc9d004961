"""A durable snapshot of a store: complete or absent, never a mix of generations (invariant 6).

    <base>/<store>/state-<generation>.bin    the extents of all buckets, wherever they live
    <base>/<store>/manifest.json             written last, by rename: what makes it a snapshot

Two phases, so that either every rank has the new snapshot or none has: `prepare_snapshot` writes
and syncs the data beside an older generation; when all ranks have done that, `commit_snapshot`
renames the manifest into place, and only then the older generation goes. A crash at any point
leaves the old snapshot or the new one. All ranks give their snapshots of one save the same
generation, so that a load can tell a mixture. The manifest records fully qualified names and the
range of each shard in its param, so that a later version can restore into another topology.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .errors import StateStoreError
from .formats import FP32
from .layout import ALIGN_BYTES, Bucket, Layout
from .memory import page_aligned
from .progress import Progress
from .state_file import StateFile

logger = logging.getLogger(__name__)

FORMAT = 3
"""Format 1 knew one size for all segments of a bucket, and 2 no formats but FP32: both are read."""
MANIFEST = "manifest.json"
_CHUNK = 16 << 20


class Extents(Protocol):
    """The bytes of the buckets, wherever they live: see `Homes`."""

    def read_into(self, bucket: Bucket, start: int, view: memoryview) -> None:
        """Copy bytes of a bucket's extent, from byte ``start`` on."""
        ...

    def write_from(self, bucket: Bucket, start: int, view: memoryview) -> None:
        """Replace bytes of a bucket's extent, from byte ``start`` on."""
        ...


Strides = tuple[tuple[int, str, tuple[int, ...]], ...]
"""In which order of memory state lies in its segment: see `ModelShards.strides`."""


@dataclass(frozen=True)
class EntryRecord:
    """One main-param shard in the manifest.

    Attributes:
        name: fully qualified name of the param, with the model chunk before it.
        shape: shape of the whole param on this model-parallel rank.
        start: first element of the shard in the flattened param.
        numel: elements of the shard.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int


@dataclass(frozen=True)
class Manifest:
    """What a snapshot says of itself.

    Attributes:
        generation: number of the save, the same on all ranks.
        step: optimizer steps that its state has seen.
        segments: main params and the keys of the optimizer's state: what each bucket holds.
        entries: the shards, in layout order.
        buckets: (offset, elements of each segment, crc32 of the extent) of each bucket.
        resident: crc32 of the file of resident state, or None if there is none.
        strides: (entry, key, strides) of state that does not lie row by row in its segment.
        formats: how the elements of each segment are stored.
        fingerprints: of the model's shards of each bucket, if the main params are not whole
            without them; else empty.
    """

    format: int
    generation: str
    step: int
    segments: tuple[str, ...]
    entries: tuple[EntryRecord, ...]
    buckets: tuple[tuple[int, tuple[int, ...], int], ...]
    resident: int | None
    strides: Strides = ()
    formats: tuple[str, ...] = ()
    fingerprints: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> str:
        """Return the text of the manifest, with a checksum of itself."""
        document = asdict(self)
        return json.dumps({**document, "checksum": _checksum(document)}, indent=1) + "\n"


def _checksum(document: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _parse(path: Path) -> Manifest:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] not in range(1, FORMAT + 1):
            raise StateStoreError(f"{path}: format {document['format']}, expected 1 to {FORMAT}")
        if document.pop("checksum") != _checksum(document):
            raise StateStoreError(f"{path}: the checksum is wrong: the checkpoint is damaged")
        segments = tuple(document["segments"])

        def sizes(numels: Any) -> tuple[int, ...]:
            return (numels,) * len(segments) if document["format"] == 1 else tuple(numels)

        entries = tuple(
            EntryRecord(e["name"], tuple(e["shape"]), e["start"], e["numel"])
            for e in document["entries"]
        )
        return Manifest(
            format=FORMAT,
            generation=document["generation"],
            step=document["step"],
            segments=segments,
            entries=entries,
            buckets=tuple((b[0], sizes(b[1]), b[2]) for b in document["buckets"]),
            resident=document["resident"],
            strides=tuple((s[0], s[1], tuple(s[2])) for s in document.get("strides", ())),
            formats=tuple(document.get("formats", (FP32.name,) * len(segments))),
            fingerprints=tuple(tuple(each) for each in document.get("fingerprints", ())),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise StateStoreError(f"{path}: cannot be read as a manifest: {error!r}") from error


def is_snapshot(directory: Path) -> bool:
    """Return whether ``directory`` holds a complete snapshot.

    Raises:
        OSError: that cannot be told.
    """
    return (directory / MANIFEST).is_file()


def _state_path(directory: Path, generation: str) -> Path:
    return directory / f"state-{generation}.bin"


def _resident_path(directory: Path, generation: str) -> Path:
    return directory / f"resident-{generation}.pt"


def _pending_path(directory: Path, generation: str) -> Path:
    return directory / f"manifest-{generation}.json"


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class PreparedSnapshot:
    """Data that is on disk and synced, but that no manifest names yet."""

    directory: Path
    manifest: Manifest

    def discard(self) -> None:
        """Remove the data, as far as that is possible; the next commit removes the rest."""
        for path_of in (_state_path, _resident_path, _pending_path):
            with contextlib.suppress(OSError):
                path_of(self.directory, self.manifest.generation).unlink(missing_ok=True)


def prepare_snapshot(
    directory: Path,
    layout: Layout,
    extents: Extents,
    entries: Sequence[EntryRecord],
    step: int,
    resident: bytes | None,
    generation: str,
    strides: Strides = (),
    fingerprints: tuple[tuple[int, ...], ...] = (),
) -> PreparedSnapshot:
    """Write the data of a snapshot into ``directory``: all but a rename.

    Args:
        directory: of this store alone; made if missing. An older snapshot in it stays valid.
        layout: the buckets.
        extents: what is copied; nobody may change it meanwhile.
        entries: the shards, in layout order.
        step: the store's step counter.
        resident: serialized state of params that do not stream, or None.
        generation: letters and digits that no other save uses; the same on all ranks.
        strides: as in the manifest.
        fingerprints: likewise.

    Raises:
        StateFileError: reading, writing or syncing the data failed; nothing of it is left.
        OSError: the directory, the resident state or the manifest could not be written; nothing
            is left either.
    """
    _make_directory(directory)
    manifest = Manifest(
        format=FORMAT,
        generation=generation,
        step=step,
        segments=layout.segments,
        entries=tuple(entries),
        buckets=(),
        resident=None if resident is None else zlib.crc32(resident),
        strides=strides,
        formats=tuple(each.name for each in layout.formats),
        fingerprints=fingerprints,
    )
    try:
        manifest = replace(manifest, buckets=_copy_state(directory, layout, extents, generation))
        if resident is not None:
            _write_durably(_resident_path(directory, generation), resident)
        _write_durably(_pending_path(directory, generation), manifest.to_json().encode())
        _sync_directory(directory)
    except BaseException:
        PreparedSnapshot(directory, manifest).discard()
        raise
    return PreparedSnapshot(directory, manifest)


def _snapshot_nbytes(layout: Layout) -> int:
    """Return the size of the file: at least a page, since a state file is never empty."""
    return max(layout.nbytes, ALIGN_BYTES)


def _copy_state(
    directory: Path, layout: Layout, extents: Extents, generation: str
) -> tuple[tuple[int, tuple[int, ...], int], ...]:
    """Copy all extents, and return what the manifest says of the buckets."""
    copy = StateFile.create(_state_path(directory, generation), _snapshot_nbytes(layout))
    try:
        buckets = []
        buffer = page_aligned(_CHUNK)
        progress = Progress(logger, f"NVMe optimizer state, saving {directory}", layout.nbytes)
        for bucket in layout.buckets:
            checksum = 0
            for start, piece in _pieces(bucket, buffer):
                extents.read_into(bucket, start, piece)
                copy.write_from(bucket.offset + start, piece)
                checksum = zlib.crc32(piece, checksum)
                progress.advance(piece.nbytes)
            buckets.append((bucket.offset, bucket.numels, checksum))
        copy.sync()
        copy.drop_page_cache()
    finally:
        copy.close()
    return tuple(buckets)


def _pieces(bucket: Bucket, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (start, room for the bytes from there) until the extent is through."""
    for start in range(0, bucket.nbytes, buffer.nbytes):
        yield start, buffer[: bucket.nbytes - start]


def _make_directory(directory: Path) -> None:
    """Make a directory and its parents, and sync the names of those that are new."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in missing:
        _sync_directory(each.parent)


def commit_snapshot(prepared: PreparedSnapshot) -> None:
    """Make a prepared snapshot the one in its directory, and remove the one before.

    Raises:
        OSError: the manifest could not be renamed: the older snapshot is valid; or the older data
            could not be removed: the new snapshot is valid.
    """
    directory = prepared.directory
    _pending_path(directory, prepared.manifest.generation).replace(directory / MANIFEST)
    _sync_directory(directory)
    for path in directory.iterdir():
        if path.name != MANIFEST and prepared.manifest.generation not in path.name:
            path.unlink()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def load_snapshot(
    directory: Path, layout: Layout, extents: Extents, entries: Sequence[EntryRecord]
) -> tuple[Manifest, bytes | None]:
    """Restore all extents from the snapshot in ``directory``.

    Args:
        directory: where `commit_snapshot` left one.
        layout: the buckets.
        extents: what is overwritten. After an error their content is undefined.
        entries: the shards this rank has now.

    Returns:
        The manifest and the serialized resident state.

    Raises:
        StateStoreError: the snapshot is of other shards or another layout, or is damaged.
        StateFileError: reading or writing the data failed.
    """
    manifest = _parse(directory / MANIFEST)
    _check_same(directory, manifest, layout, entries)
    path = _state_path(directory, manifest.generation)
    copy = StateFile.open_existing(path, _snapshot_nbytes(layout))
    try:
        buffer = page_aligned(_CHUNK)
        progress = Progress(logger, f"NVMe optimizer state, loading {directory}", layout.nbytes)
        for bucket, (_, _, expected) in zip(layout.buckets, manifest.buckets, strict=True):
            checksum = 0
            for start, piece in _pieces(bucket, buffer):
                copy.read_into(bucket.offset + start, piece)
                extents.write_from(bucket, start, piece)
                checksum = zlib.crc32(piece, checksum)
                progress.advance(piece.nbytes)
            if checksum != expected:
                raise StateStoreError(
                    f"{directory}: bucket {bucket.index} at offset {bucket.offset}: expected "
                    f"checksum {expected:08x}, got {checksum:08x}: the checkpoint is damaged"
                )
        copy.drop_page_cache()
    finally:
        copy.close()
    resident = None
    if manifest.resident is not None:
        resident = _resident_path(directory, manifest.generation).read_bytes()
        if zlib.crc32(resident) != manifest.resident:
            raise StateStoreError(f"{directory}: the resident state is damaged")
    return manifest, resident


def _check_same(
    directory: Path, manifest: Manifest, layout: Layout, entries: Sequence[EntryRecord]
) -> None:
    if manifest.segments != layout.segments:
        raise StateStoreError(
            f"{directory}: holds {', '.join(manifest.segments)}, expected "
            f"{', '.join(layout.segments)}: it was saved with another optimizer; load it with the "
            "same --optimizer, or with --no-load-optim to start afresh from its weights"
        )
    formats = tuple(each.name for each in layout.formats)
    if manifest.formats != formats:
        raise StateStoreError(
            f"{directory}: was saved as {_formats(manifest.segments, manifest.formats)}, expected "
            f"{_formats(layout.segments, formats)}; load it with the same "
            "--stream-optimizer-state-main-storage and --stream-optimizer-state-moment-dtype"
        )
    if manifest.entries != tuple(entries):
        ours, theirs = set(entries), set(manifest.entries)
        example = next(iter(ours ^ theirs), "their order")
        raise StateStoreError(
            f"{directory}: the checkpoint holds other shards than this rank has (it has "
            f"{len(theirs)}, expected {len(ours)}; first difference: {example}): load it with the "
            "same parallel topology and model"
        )
    saved = tuple((offset, numels) for offset, numels, _ in manifest.buckets)
    if saved != tuple((bucket.offset, bucket.numels) for bucket in layout.buckets):
        raise StateStoreError(
            f"{directory}: was saved with other buckets, or with state of other sizes; load it "
            "with the same --stream-optimizer-state-bucket-numel and optimizer"
        )


def _formats(segments: Sequence[str], formats: Sequence[str]) -> str:
    return ", ".join(f"{segment} {name}" for segment, name in zip(segments, formats, strict=True))
