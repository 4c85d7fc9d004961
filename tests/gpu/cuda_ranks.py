"""Ranks on real CUDA devices, for all tests here: `tests.rank_pool` without the emulation.

The inner Adam is Transformer Engine's FusedAdam where that is installed, else the stand-in.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from tests import rank_process
from tests.rank_pool import RankPool

LIMIT_S = 240
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


@functools.cache
def _pool() -> RankPool:
    pool = RankPool(LIMIT_S, rank_process.CUDA)
    atexit.register(pool.close)
    return pool


def run(case: Callable[..., Any], world_size: int = 1, **kwargs: Any) -> list[Any]:
    """Call ``case(**kwargs)`` on every rank, each with a device; see `RankPool.run`."""
    return _pool().run(case, world_size, **kwargs)
