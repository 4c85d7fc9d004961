"""What paths carry, and how it is read from what ``probe`` printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UPDATE_PARAMS_PER_S = {"torch": 39e9, "te": 72e9, "muon": 2.5e9}
"""Of stock runs on an H200: docs/benchmarks/2026-11-30-engine.md and -muon.md, 2026-11-29."""
_KEYS = ("mixed_gb_per_s", "read_gb_per_s", "write_gb_per_s")


@dataclass(frozen=True)
class Rates:
    """What paths carry, in bytes a second; None: not known.

    Attributes:
        disk: all directories of a node, reading and writing at the same time, added up.
        disk_read: reading alone.
        disk_write: writing alone.
        pcie: each GPU, each way, both ways at once.
        update: params that one GPU updates in a second.
    """

    disk: float | None
    disk_read: float | None
    disk_write: float | None
    pcie: float | None
    update: float


def read_probe(path: Path) -> tuple[float, float, float]:
    """Return mixed, read and write bandwidth from what ``probe --json`` printed, in bytes a second.

    Buckets are striped evenly, so each of n directories carries what the slowest can.

    Raises:
        ValueError: it cannot be read, is an older probe's, or a directory cannot be used.
    """
    flag = f"--probe {path}"
    try:
        reports: Any = json.loads(path.read_text())
        for report in reports:
            if report["error"]:
                raise ValueError(f"{report['directory']} cannot be used: {report['error']}")
            if "mixed_gbps" in report:
                raise ValueError(
                    "an older probe wrote this, whose *_gbps were GB/s and could be taken for "
                    "Gbit/s; probe again, or rename *_gbps to *_gb_per_s"
                )
        mixed, read, write = (
            1e9 * len(reports) * min(float(report[name]) for report in reports) for name in _KEYS
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{flag}: expected what `probe DIR... --json` prints: {what}") from error
    if not 0 < min(mixed, read, write) < float("inf"):
        raise ValueError(f"{flag}: expected bandwidths above zero")
    return mixed, read, write
