"""What runs inside a rank of `tests.rank_pool`, and in the fork server that ranks are forked from.

The fork server imports this module once, which installs the emulated device and imports Megatron
(several seconds); for ranks on real devices it only imports, and touches no device, since CUDA does
not survive a fork. A rank is then a fork of that: process state as after a fresh import, in some
ten milliseconds.

[Note: Forking after torch was imported]
A forked child has only the thread that forked. Thread pools of the parent (OpenMP, OpenBLAS) would
be locked for ever in it, so the server runs with one thread for each of them and refuses to serve
when a second thread exists; with real devices, where Transformer Engine leaves one, it does serve.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Imported while only the server's thread exists; the rest of Megatron comes with them.
_PRELOADED = (
    "megatron.core",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text",
    "megatron.training.training",
    "megatron.training.checkpointing",
)

# A rank kills itself this long after its pool should have: the pool's process may be dead.
ORPHAN_GRACE_S = 30


@dataclass(frozen=True, slots=True)
class Rank:
    """Everything a rank is told at its start."""

    rank: int
    world_size: int
    master_port: int
    timeout_s: float
    log: Path
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank sends back: the pickled result of its case, or the traceback."""

    result: bytes = b""
    traceback: str = ""


def _num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _preload(device: str) -> str:
    """Install the doubles and import Megatron; returns a traceback if that failed.

    The fork server would swallow an ImportError, and die from any other exception.
    """
    try:
        from tests import emulated_cuda, fused_adam

        if device == EMULATED:
            emulated_cuda.install()
        if device == EMULATED or importlib.util.find_spec("transformer_engine") is None:
            fused_adam.install()
        for name in _PRELOADED:
            importlib.import_module(name)
        torch: Any = importlib.import_module("torch")
        if device == CUDA and torch.cuda.is_initialized():
            raise RuntimeError("an import has initialized CUDA; forks could not use it")
        # Transformer Engine's import leaves a thread; a fork that hangs for it ends by its timeout.
        if _num_threads() != 1 and device == EMULATED:
            raise RuntimeError(f"the fork server has {_num_threads()} threads; forks would hang")
        _remember_sources()
        gc.collect()
        gc.freeze()  # a rank's collections neither walk nor copy what Megatron's imports left
    except Exception:
        return traceback.format_exc()
    return ""


def _remember_sources() -> None:
    """Let ranks know the sources of the classes whose fields are arguments: 40 ms for each."""
    remembered: Any = functools.cache(inspect.getsource)
    inspect.getsource = remembered
    arguments: Any = importlib.import_module("megatron.training.arguments")
    arguments.add_megatron_arguments(argparse.ArgumentParser())


# Only the fork server preloads. Everything else that imports this module (pytest, which needs its
# names) must stay free of the emulated device.
PRELOAD_MARK = "TESTS_RANK_PROCESS_PRELOADS"
EMULATED = "emulated"
CUDA = "cuda"
_DEVICE = os.environ.pop(PRELOAD_MARK, None)
_SERVER_PID = None if _DEVICE is None else os.getpid()
_FAILURE = "" if _DEVICE is None else _preload(_DEVICE)


def run_rank(rank: Rank, channel: Connection, call: bytes) -> None:
    """Run a case as one rank of a world and send its `Outcome`.

    Args:
        rank: who this process is.
        channel: where the outcome goes.
        call: the pickled case and its keyword arguments; unpickled here, so that a module that
            cannot be imported is reported as any other failure.
    """
    _isolate(rank)
    try:
        if _SERVER_PID in (None, os.getpid()):
            raise RuntimeError("the fork server did not preload tests.rank_process")
        if _FAILURE:
            raise RuntimeError(f"the fork server failed to preload Megatron:\n{_FAILURE}")
        case, kwargs = pickle.loads(call)
        outcome = Outcome(result=pickle.dumps(case(**kwargs)))
        _leave_process_group()
    except BaseException:  # SystemExit and KeyboardInterrupt are failures of a case, too
        outcome = Outcome(traceback=traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send_bytes(pickle.dumps(outcome))
    channel.close()


def _isolate(rank: Rank) -> None:
    """Own process group, own output file, own environment, own fork server."""
    os.setsid()
    signal.alarm(int(rank.timeout_s) + ORPHAN_GRACE_S)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(rank.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):  # a killed rank flushes nothing any more
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    warnings.resetwarnings()  # the server ignores them, for the sake of its imports
    os.environ.pop("PYTHONWARNINGS", None)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(
        rank.environment,
        RANK=str(rank.rank),
        LOCAL_RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_WORLD_SIZE=str(rank.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(rank.master_port),
    )
    # A checkpoint writer of the rank that asks for a fork server must not get ours: it would
    # outlive the rank, and keep the server from ending.
    server: Any = forkserver._forkserver
    server._forkserver_address = None
    server._forkserver_alive_fd = None
    server._forkserver_pid = None


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
