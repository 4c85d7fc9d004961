"""Run a case on real CUDA devices, one fresh process a rank, as `tests.rank_pool` does without.

The inner Adam is Transformer Engine's FusedAdam where that is installed, else the stand-in.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

LIMIT_S = 240
"""A rank that takes longer ends with the stacks of its threads on standard error."""
GRACE_S = 30
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


def _rank(
    rank: int, world_size: int, port: int, case: Callable[..., Any], kwargs: Any, out: Connection
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        TORCHDYNAMO_DISABLE="1",
    )
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        if not HAS_TRANSFORMER_ENGINE:
            from tests import fused_adam

            fused_adam.install()
        out.send((True, case(**kwargs)))
    except BaseException:
        out.send((False, traceback.format_exc()))


def run(case: Callable[..., Any], world_size: int = 1, **kwargs: Any) -> list[Any]:
    """Call ``case(**kwargs)`` on every rank and return the results in order.

    Raises:
        RuntimeError: a rank failed; the message holds its traceback.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = {}
    for rank in range(world_size):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, world_size, port, case, kwargs, sending)
        )
        process.start()
        sending.close()
        running[receiving] = rank, process
    outcomes: dict[int, tuple[bool, Any]] = {}
    while running:
        # After a failure the others may wait for that rank forever.
        is_failing = any(not ok for ok, _ in outcomes.values())
        ready = wait(list(running), timeout=GRACE_S if is_failing else None)
        for receiving in list(running):
            if ready and receiving not in ready:
                continue
            rank, process = running.pop(receiving)
            try:
                outcomes[rank] = receiving.recv() if ready else (False, "was left waiting")
            except EOFError:
                outcomes[rank] = (False, "died without a word")
            process.join(GRACE_S if ready else 0)
            process.kill()
    results = [outcomes[rank] for rank in range(world_size)]
    failures = [text for ok, text in results if not ok]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [result for _, result in results]
