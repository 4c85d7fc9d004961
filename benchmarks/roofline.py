"""Limits of this machine, measured without the store: disk, tmpfs, PCIe, device memory.

    python benchmarks/roofline.py [--directory DIR[,DIR...]] [--tmpfs DIR] [--no-device]
        [--threads 8] [--chunk-mb 8] [--gb 8] [--seconds 4] [--rounds 2] [--json FILE]

Directories that are separated by commas are measured together, as a store stripes over them. Disks
of virtual machines drift: each round measures everything once, and the table shows all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.raw_disk import DiskLimit, DiskProbe, measured_rows


def parsed_directories(text: str) -> list[Path]:
    """Return the directories of ``DIR[,DIR...]``, made if need be."""
    directories = [Path(each) for each in text.split(",") if each]
    for each in directories:
        each.mkdir(parents=True, exist_ok=True)
    return directories


def copy_rows(limit: dict[str, float | None]) -> Iterator[tuple[str, float]]:
    """Yield what is measured and GB/s."""
    for name, rate in limit.items():
        if rate is not None:
            yield f"copies: {name.replace('_', ' of which ')}", rate


def table(rows: Sequence[Sequence[tuple[str, float]]]) -> str:
    """Return a Markdown table: a line for each thing measured, a column for each round."""
    names = list(dict.fromkeys(name for each in rows for name, _ in each))
    lines = [
        "| GB/s | " + " | ".join(f"round {number + 1}" for number in range(len(rows))) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for name in names:
        cells = [f"{dict(each)[name]:.2f}" if name in dict(each) else "-" for each in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=parsed_directories, default=[])
    parser.add_argument("--tmpfs", type=parsed_directories, default=[])
    parser.add_argument("--no-device", action="store_true")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--chunk-mb", type=int, default=8, help="MiB of one transfer")
    parser.add_argument("--gb", type=float, default=8.0, help="of files, for each kind")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    found: list[dict[str, Any]] = [{} for _ in range(args.rounds)]
    rows: list[list[tuple[str, float]]] = [[] for _ in range(args.rounds)]
    for kind, directories in (("disk", args.directory), ("tmpfs", args.tmpfs)):
        if not directories:
            continue
        with DiskProbe(directories, int(args.gb * 1e9), args.threads, args.chunk_mb << 20) as probe:
            for number in range(args.rounds):
                limit: DiskLimit = probe.measure(args.seconds)
                if not limit.is_direct:
                    print(f"{kind}: no direct I/O, the page cache is measured", file=sys.stderr)
                found[number][kind] = asdict(limit)
                rows[number].extend(measured_rows(limit))
    if not args.no_device:
        from benchmarks.raw_copies import measure_copies

        for number in range(args.rounds):
            copies = asdict(measure_copies())
            found[number]["copies"] = copies
            rows[number].extend(copy_rows(copies))
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
