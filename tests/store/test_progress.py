"""Long operations tell how far they are, short ones nothing."""

from __future__ import annotations

import logging

import pytest
from megatron.core.optimizer.nvme_state_store.progress import INTERVAL_S, Progress

GB = 10**9


class Clock:
    """Seconds that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds", [0.0, INTERVAL_S - 0.1])
def test_what_ends_soon_logs_nothing(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(logging.getLogger("x"), "writing", 2 * GB, clock)

    clock.now += seconds
    progress.advance(2 * GB)

    assert caplog.messages == []


def test_a_line_comes_at_most_every_interval(caplog: pytest.LogCaptureFixture) -> None:
    """With what is done, of how much, and since when."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(logging.getLogger("x"), "writing", 8 * GB, clock)

    for _ in range(8):
        clock.now += INTERVAL_S / 2
        progress.advance(GB)

    assert caplog.messages == [
        f"writing: {done}.000 of 8.000 GB in {done * 5}s" for done in (2, 4, 6, 8)
    ]
