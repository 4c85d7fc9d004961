"""Memory for direct I/O begins at a page, and an address is that of the first byte."""

from __future__ import annotations

from megatron.core.optimizer.nvme_state_store.memory import address_of, page_aligned


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
