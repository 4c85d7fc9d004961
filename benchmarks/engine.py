"""The engine's whole table in one command: limits, every case beside its limit, and the bars.

    python benchmarks/engine.py [--only CASE,...] [--directory DIR] [--out DIR] [--two-gpus]
        [--fill-gb N]

Each case is a process of `step.py` (with --two-gpus, two of them: data parallel, one disk), which
measures the limits right before and right after its steps. Results go to OUT/engine.json; a later
call with other cases adds to them, and the table shows all. Logs, timelines and pictures lie
beside it. As root, for memory cgroups and the tmpfs; a case that cannot run says why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import figures
from benchmarks.cases import CASES, Case
from benchmarks.memory import fill_beforehand
from benchmarks.processes import NotRunError, machine, run_ranks
from benchmarks.tables import group_table, peak_table, verdict_table
from benchmarks.verdicts import Results, Verdict, verdict

HERE = Path(__file__).resolve().parent
ROOFLINE = "roofline"
NAMES = (ROOFLINE, *(case.name for case in CASES))
OF_TWO_GPUS = (ROOFLINE, "stock", "host", "disk", "split-bf16-host")


@contextmanager
def mounted_tmpfs(directory: Path, gigabytes: float) -> Iterator[None]:
    """Mount a tmpfs.

    Raises:
        NotRunError: that is not possible, most often for want of rights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    size = f"size={int(gigabytes * 1e9)}"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRunError(f"no tmpfs: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=False)


def run_case(case: Case, args: argparse.Namespace) -> list[Any]:
    """Run a case, and draw its timeline; return the result of each rank."""
    ranks = 2 if args.two_gpus else 1
    directory = args.tmpfs if case.is_on_tmpfs else args.directory
    command = [sys.executable, "-W", "ignore", str(HERE / "step.py")]
    command += [*case.arguments(ranks), "--directory", str(directory)]
    command += args.step_options.split()
    timeline = args.out / f"{case.name}.timeline.json"
    commands = [[*command] for _ in range(ranks)]
    if case.has_timeline:
        for rank in commands:  # all of them make the same steps
            shown = timeline if rank is commands[0] else timeline.with_suffix(".other.json")
            rank += ["--timeline", str(shown)]
    results = run_ranks(commands, args.out / case.name, args.timeout)
    if case.has_timeline:
        try:
            figures.draw(json.loads(timeline.read_text()), timeline.with_suffix(".png"), case.name)
        except ImportError as error:
            print(f"{case.name}: no picture: {error}", file=sys.stderr)
    return results


def run_roofline(args: argparse.Namespace) -> Any:
    """Measure the limits by themselves; return what `roofline.py` writes."""
    written = args.out / "roofline.json"
    command = [sys.executable, str(HERE / "roofline.py"), "--json", str(written)]
    command += ["--directory", str(args.directory), "--tmpfs", str(args.tmpfs)]
    command += args.roofline_options.split()
    done = subprocess.run(command, timeout=args.timeout, stdout=subprocess.PIPE, check=False)
    print(done.stdout.decode(), flush=True)
    if done.returncode:
        raise NotRunError(f"exit status {done.returncode}")
    return json.loads(written.read_text())


def results_of(cases: dict[str, Any]) -> Results:
    """Return the results of the cases that ran."""
    return {name: each["results"] for name, each in cases.items() if each["results"]}


def verdicts(cases: dict[str, Any]) -> dict[str, Verdict | str]:
    """Return what each case that was tried came to, in the table's order."""
    results = results_of(cases)
    found: dict[str, Verdict | str] = {}
    for case in CASES:
        if case.name in results:
            found[case.name] = verdict(case.name, results, case.judge)
        elif case.name in cases:
            found[case.name] = cases[case.name]["not_run"]
    return found


def record(known: dict[str, Any], name: str, args: argparse.Namespace) -> None:
    """Run a case and put into ``known`` its results and what all cases came to."""
    case = next((each for each in CASES if each.name == name), None)
    needs_tmpfs = case is None or case.is_on_tmpfs
    start = time.monotonic()
    entry: dict[str, Any] = {"results": [], "not_run": None}
    try:
        with mounted_tmpfs(args.tmpfs, args.tmpfs_gb) if needs_tmpfs else nullcontext():
            entry["results"] = run_case(case, args) if case else [run_roofline(args)]
    except (NotRunError, subprocess.TimeoutExpired) as error:
        entry["not_run"] = str(error)
        print(f"{name}: NOT RUN: {error}", file=sys.stderr)
    entry["wall_s"] = round(time.monotonic() - start, 1)
    print(f"{name}: {entry['wall_s']} s", file=sys.stderr, flush=True)
    if case is None:
        known[ROOFLINE] = entry
        return
    known["cases"][name] = entry
    known["verdicts"] = {
        key: found if isinstance(found, str) else asdict(found) | {"is_met": is_met(found)}
        for key, found in verdicts(known["cases"]).items()
    }


def is_met(found: Verdict) -> bool | None:
    """Return whether the bar is reached; None if there is none, or nobody knows."""
    return found.judgement.is_met if found.judgement else None


def main() -> None:
    """Run cases and print the table of all that were run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"of {', '.join(NAMES)}; separated by commas")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/engine-benchmark"))
    parser.add_argument("--tmpfs", type=Path, default=Path("/tmp/engine-benchmark-tmpfs"))
    parser.add_argument("--tmpfs-gb", type=float, default=34.0)
    parser.add_argument("--out", type=Path, default=Path("/tmp/engine-results"))
    parser.add_argument("--two-gpus", action="store_true")
    parser.add_argument("--fill-gb", type=float, help="of memory, first: see memory.fill")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of a case")
    parser.add_argument("--step-options", default="", help="for every step.py, in one string")
    parser.add_argument("--roofline-options", default="--rounds 1 --seconds 3 --gb 8")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else OF_TWO_GPUS if args.two_gpus else NAMES
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"--only {', '.join(sorted(unknown))}: expected some of {', '.join(NAMES)}")
    for each in (args.out, args.directory):
        each.mkdir(parents=True, exist_ok=True)
    args.out = args.out / "two-gpus" if args.two_gpus else args.out
    args.out.mkdir(exist_ok=True)
    path = args.out / "engine.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    if args.fill_gb:
        fill_beforehand(args.fill_gb)
    known["machine"] = machine(args.directory)
    for name in (each for each in NAMES if each in chosen):
        record(known, name, args)
        path.write_text(json.dumps(known, indent=1) + "\n")
    results = results_of(known["cases"])
    print(verdict_table(verdicts(known["cases"])), end="\n\n")
    print(f"Ranks, and GB of their devices\n\n{peak_table(results)}\n")
    print(f"Memory groups, GB\n\n{group_table(results)}")


if __name__ == "__main__":
    main()
