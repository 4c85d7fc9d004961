"""A probe's report gives the rates of a disk, or says why not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store.plan.rates import read_probe
from megatron.core.optimizer.nvme_state_store.probe import Report

from tests.store.plans import PLAIN, PREFIX, only, plan


def report(directory: str, mixed: float, read: float, write: float) -> dict[str, Any]:
    """Return what `probe` says of a directory."""
    return asdict(Report(directory, mixed_gb_per_s=mixed, read_gb_per_s=read, write_gb_per_s=write))


def written(path: Path, reports: object) -> Path:
    """Write a file like that of `probe --json`."""
    file = path / "probe.json"
    file.write_text(json.dumps(reports))
    return file


def test_a_probe_gives_the_rates_of_a_disk(tmp_path: Path) -> None:
    """Of several directories: buckets are striped evenly, so the slowest decides."""
    file = written(tmp_path, [report("a", 3.0, 4.0, 1.0), report("b", 1.0, 2.0, 9.0)])
    directories = (f"{PREFIX}dir", "/a,/b")

    made = only(plan(*PLAIN, "--pcie-gb-per-s", 50, *directories, "--probe", file))

    assert made["step_seconds"] == pytest.approx(48e9 / 2e9, rel=0.01)
    assert read_probe(file) == (2e9, 4e9, 2e9)


def test_a_directory_that_cannot_be_used_has_no_rates(tmp_path: Path) -> None:
    file = written(tmp_path, [report("a", 3.0, 4.0, 1.0) | {"error": "no space"}])

    with pytest.raises(ValueError, match="a cannot be used: no space"):
        read_probe(file)


def test_a_report_of_an_older_probe_is_told_apart(tmp_path: Path) -> None:
    """Its keys said gbps, which is Gbit/s to many."""
    old = {key.replace("gb_per_s", "gbps"): value for key, value in report("a", 3, 4, 1).items()}

    with pytest.raises(ValueError, match=r"an older probe wrote this.* probe again, or rename"):
        read_probe(written(tmp_path, [old]))


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([{"error": ""}], "no 'mixed_gb_per_s'"),
        ([], "expected what `probe DIR... --json` prints"),
        ({"a": 1}, "expected what `probe DIR... --json` prints"),
        ([report("a", 0.0, 4.0, 1.0)], "expected bandwidths above zero"),
        ([report("a", float("nan"), 4.0, 1.0)], "expected bandwidths above zero"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, reports: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_probe(written(tmp_path, reports))
