"""Memory for direct I/O begins at a page, and an address is that of the first byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.optimizer.nvme_state_store import memory
from megatron.core.optimizer.nvme_state_store.memory import address_of, huge_nbytes, page_aligned


def test_memory_begins_at_a_page_and_is_zero() -> None:
    views = [page_aligned(nbytes) for nbytes in (1, 4096, 5000)]

    assert [view.nbytes for view in views] == [1, 4096, 5000]
    assert all(address_of(view) % 4096 == 0 for view in views)
    assert not any(any(view) for view in views)


def test_an_address_is_that_of_the_first_byte() -> None:
    view = page_aligned(4096)

    assert address_of(view[7:]) == address_of(view) + 7
    assert address_of(view.toreadonly()) == 0
    assert address_of(view[:0]) == 0


def test_large_memory_is_in_huge_pages_where_the_kernel_has_them() -> None:
    """A disk's driver gets one range for each page: see [Note: Huge pages]."""
    nbytes = 64 << 20
    view = page_aligned(nbytes)
    view[::4096] = bytes(nbytes // 4096 * [1])

    found = huge_nbytes(address_of(view), nbytes)
    assert found is not None
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if mode.exists() and "[never]" not in mode.read_text():
        assert found >= nbytes // 2


def test_huge_pages_are_counted_of_the_mappings_that_meet_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings = [
        "1000-3000 rw-p 00000000 00:00 0\nRss: 8 kB\nAnonHugePages: 1 kB",
        "3000-9000 rw-p 00000000 00:00 0 [heap]\nAnonHugePages:     2048 kB\nVmFlags: rd wr",
        "9000-a000 r--p 00000000 00:00 0 /some file\nAnonHugePages: 4 kB",
    ]
    monkeypatch.setattr(memory, "_SMAPS", tmp_path / "smaps")
    assert huge_nbytes(0x3000, 1) is None

    (tmp_path / "smaps").write_text("\n".join(mappings) + "\n")
    assert huge_nbytes(0x3000, 0x6000) == 2048 << 10
    assert huge_nbytes(0x2FFF, 0x6001) == 2049 << 10
    assert huge_nbytes(0x8000, 0x1001) == 2052 << 10
    (tmp_path / "smaps").write_text("what is this\n")
    assert huge_nbytes(0x3000, 1) is None
