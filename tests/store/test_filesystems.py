"""The filesystem below a path is named, and a bad place for optimizer state is told from a good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from megatron.core.optimizer.nvme_state_store.filesystems import (
    filesystem_type,
    free_bytes,
    warning_about,
)

from tests.store.failing_file import small_tmpfs

MIB = 1 << 20


def test_the_innermost_and_latest_mount_counts(tmp_path: Path) -> None:
    """A space in its name is written as an octal escape."""
    assert filesystem_type(Path("/proc/self")) == "proc"
    before = filesystem_type(tmp_path)
    with small_tmpfs(tmp_path / "a small one") as small:
        assert filesystem_type(small) == filesystem_type(small / "x" / "y") == "tmpfs"
        assert filesystem_type(tmp_path / "a small one beside it") == before


def test_what_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", fail)

    assert filesystem_type(Path("/")) == "unknown"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tmpfs", "is memory, not a disk"),
        ("overlay", "a container's own layer"),
        ("virtiofs", "through another program"),
        *((kind, "network") for kind in ("nfs4", "lustre", "ceph", "fuse.sshfs", "unknown")),
    ],
)
def test_a_bad_place_is_warned_of(kind: str, words: str) -> None:
    assert warning_about(kind).startswith(kind)
    assert words in warning_about(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs"])
def test_a_local_disk_is_not_warned_of(kind: str) -> None:
    assert warning_about(kind) == ""


def test_free_space_is_what_may_still_be_written(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small") as small:
        assert free_bytes(small) == 4 * MIB
        (small / "file").write_bytes(os.urandom(MIB))
        assert free_bytes(small) == 3 * MIB
    with pytest.raises(FileNotFoundError):
        free_bytes(tmp_path / "absent")
