"""A line in the log now and then, while something takes minutes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 10.0
"""Seconds between two lines: what ends sooner logs none."""


class Progress:
    """How much of a long operation is done.

    Args:
        logger: gets the lines.
        what: begins them.
        nbytes: of all of it.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        logger: logging.Logger,
        what: str,
        nbytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._what = what
        self._nbytes = nbytes
        self._clock = clock
        self._done = 0
        self._began = self._told = clock()

    def advance(self, nbytes: int) -> None:
        """Count bytes that are done, and tell if it is time."""
        self._done += nbytes
        now = self._clock()
        if now - self._told < INTERVAL_S:
            return
        self._told = now
        self._logger.info(
            "%s: %.3f of %.3f GB in %.0fs",
            self._what,
            self._done / 1e9,
            self._nbytes / 1e9,
            now - self._began,
        )
