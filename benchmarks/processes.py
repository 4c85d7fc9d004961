"""Processes of a benchmark: one for each rank of a host, and what machine they ran on."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PORTS = 8
"""How many ports in a row a group of ranks gets."""


class NotRunError(Exception):
    """A case could not run; the message says why."""


@contextlib.contextmanager
def reserved_ports() -> Iterator[int]:
    """Yield the first of `PORTS` free TCP ports, which no other caller on this host gets.

    Ranks listen on it only some seconds later. A port that the kernel chooses can belong to the
    next connection of any process by then; these lie below the range that it chooses from.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    blocks = range(10_000, ephemeral - PORTS, PORTS)
    for port in random.SystemRandom().sample(blocks, len(blocks)):
        with socket.socket(socket.AF_UNIX) as claim:  # gone with its process, whatever ends that
            try:
                claim.bind(f"\0nvme-state-store-ports-{port}")
                for each in range(port, port + PORTS):
                    with socket.socket() as probe:
                        probe.bind(("127.0.0.1", each))
            except OSError:
                continue
            yield port
            return
    raise NotRunError(f"no {PORTS} free ports in a row between 10000 and {ephemeral}")


def run_ranks(commands: Sequence[Sequence[str]], logs: Path, timeout_s: float) -> list[Any]:
    """Run one process a rank; return what each printed last, as JSON.

    Raises:
        NotRunError: one failed or took too long; the others are ended.
    """
    with reserved_ports() as port:
        return _run_ranks(commands, logs, timeout_s, str(port))


def _run_ranks(
    commands: Sequence[Sequence[str]], logs: Path, timeout_s: float, port: str
) -> list[Any]:
    processes: list[subprocess.Popen[bytes]] = []
    outputs = [logs.with_name(f"{logs.name}.rank{rank}.out") for rank in range(len(commands))]
    end = time.monotonic() + timeout_s
    failed: int | None = None
    try:
        for rank, (command, output) in enumerate(zip(commands, outputs, strict=True)):
            told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
            told |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(commands)))
            environment = {**os.environ, **told, "MASTER_ADDR": "127.0.0.1"}
            with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
        while any(each.poll() is None for each in processes) and failed is None:
            if time.monotonic() > end:
                raise NotRunError(f"it took longer than {timeout_s:.0f} s")
            time.sleep(0.05)
            failed = next((n for n, each in enumerate(processes) if each.poll()), None)
    finally:
        for each in processes:
            each.kill()
            each.wait()
    if failed is not None:
        text = outputs[failed].with_suffix(".err").read_text(errors="replace")
        last = [line for line in text.splitlines() if line.strip()] or ["it said nothing"]
        status = processes[failed].returncode
        raise NotRunError(f"rank {failed} ended with {status}: {last[-1][-300:]}")
    return [last_json(output.read_text()) for output in outputs]


def last_json(text: str) -> Any:
    """Return the last line that is a JSON object.

    Raises:
        NotRunError: there is none.
    """
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise NotRunError("it printed no result")
    return json.loads(lines[-1])


def machine(directory: Path) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "gpus": said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "filesystem": said("stat", "--file-system", "--format=%T", str(directory)),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def said(*command: str) -> str:
    """Return what a command prints; nothing if there is no such command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
