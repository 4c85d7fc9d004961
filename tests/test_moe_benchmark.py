"""The benchmark of a mixture of experts: its arithmetic, and two ranks of it without a GPU."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import moe, moe_table
from buildtools.paths import ROOT

# Of the shape, only smaller.
TINY = shlex.split("""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --kv-channels 16 --num-attention-heads 4
    --num-query-groups 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32
    --vocab-size 255 --seq-length 32 --max-position-embeddings 32
""")


def rank(**changes: Any) -> dict[str, Any]:
    """Return what a rank prints: streamed, two stores, four steps, 3 GB of I/O in each."""
    report = {"bytes_read": 1e9, "bytes_written": 2e9}
    return {
        "params": 1000,
        "inner": ["FusedAdam"],
        "construction_peak_gb": 30.0,
        "step_peak_gb": 38.0,
        "step_reserved_gb": 50.0,
        "save_peak_gb": 39.0,
        "step_s": [9.0, 9.0, 1.0, 1.2, 1.1],
        "exposed_s": [5.0, 5.0, 0.1, 0.3, 0.2],
        "losses": [loss.hex() for loss in (4.0, 3.0, 2.0, 1.0, 0.5)],
        "weights": [1, 2],
        "reports": [report] * 5,
        "log_lines": 10,
        "stores": 2,
        "disk_tier_gb": 1.5,
        "host_tier_gb": 0.5,
        **changes,
    }


def stock(**changes: Any) -> dict[str, Any]:
    """Return what a rank of stock prints."""
    nothing = {"reports": [{"bytes_read": 0, "bytes_written": 0}] * 5, "log_lines": 0, "stores": 0}
    tiers = {"disk_tier_gb": 0.0, "host_tier_gb": 0.0}
    return rank(step_peak_gb=81.0, step_s=[9, 9, 1, 1, 1], **nothing, **tiers, **changes)


def cells(table: str, name: str) -> list[str]:
    """Return the row of a table that begins with a name."""
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_slowest_rank_and_the_steps_after_the_warm_up_count() -> None:
    slow = rank(step_s=[1.0, 1.0, 3.0, 2.0, 4.0], step_peak_gb=40.0)
    variants = {"stock": [stock(), stock()], "bf16-disk": [rank(), slow]}

    assert cells(moe_table.time_table(variants), "bf16-disk")[1:4] == ["3.000", "+200.0%", "0.200"]
    assert cells(moe_table.memory_table(variants), "bf16-disk")[1:7] == [
        *("30.00", "40.00", "39.00", "41.00 (51%)", "3.0", "1.0")
    ]
    assert cells(moe_table.memory_table({"bf16-disk": [rank()]}), "bf16-disk")[4] == "-"


def test_the_disk_is_shared_by_all_ranks() -> None:
    limit = {"read": 2.0, "write": 2.5, "mixed": None, "balanced": 60.0}
    table = moe_table.disk_table({"stock": [stock()], "fp32-disk": [rank(), rank()]}, limit)

    assert cells(table, "fp32-disk")[1:] == ["6.0", "3.00 to 3.00", "5.45", "30.00", "0.50"]
    assert "| stock |" not in table
    assert "plain threads: read, write, mixed, balanced: 2.00, 2.50, 60.00" in table


def test_training_is_compared_bit_by_bit_and_else_by_the_largest_gap() -> None:
    other = [rank(weights=[1, 3]), rank()]
    away = [rank(), rank(losses=[loss.hex() for loss in (4.0, 3.3, 2.0, 1.0, 0.5)])]

    assert moe_table.agreement([rank(), rank()], [stock(), stock()]) == "losses and weights equal"
    assert moe_table.agreement(other, [stock(), stock()]) == "losses within 0.0e+00"
    assert moe_table.agreement(away, [stock(), stock()]) == "losses within 1.0e-01"
    assert moe_table.agreement([rank()], [stock(), stock()]) == "other ranks or steps"


def test_a_rank_that_logged_too_little_shows() -> None:
    table = moe_table.time_table({"bf16-disk": [rank(), rank(log_lines=9)]})

    assert cells(table, "bf16-disk")[5] == "NO (9)"


def test_the_published_run_is_the_bar() -> None:
    def met(*ours: dict[str, Any]) -> list[str]:
        table = moe_table.bars_table({"stock": [stock()], moe_table.PUBLISHED: ours})
        names = ("freed GB", "freed part of the peak", "training step")
        return [cells(table, name)[-1] for name in names]

    assert met(rank()) == ["yes", "yes", "yes"]
    assert met(rank(step_peak_gb=39.0)) == ["NO", "NO", "yes"]
    assert met(rank(step_s=[1, 1, 1.14, 1.14, 1.14])) == ["yes", "yes", "NO"]
    assert moe_table.bars_table({"stock": [stock()]}) == "needs stock and bf16-host"


def test_every_variant_has_flags_and_only_streamed_ones_have(tmp_path: Path) -> None:
    args = moe.parsed_arguments(["--gpus", "4", "--host-gb", "10", "--directory", str(tmp_path)])
    flags = {name: moe.streaming_flags(name, args) for name in moe.VARIANTS}

    assert flags["stock"] == flags["stock-again"] == []
    streamed = [tuple(flags[name]) for name in moe.VARIANTS if name not in moe.STOCK]
    assert len(set(streamed)) == len(streamed) == 8
    assert flags["split-bf16-host"][-2:] == ["--stream-optimizer-state-host-gb", "2.5"]
    assert "--stream-optimizer-state-host-gb" not in flags["split-bf16-disk"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--only", "stock,fp8"], "fp8: expected some of stock"), (["--steps", "2"], "at least 3")],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        moe.parsed_arguments(arguments)
    assert expected in capsys.readouterr().err


def test_two_ranks_train_save_and_agree_with_stock(tmp_path: Path) -> None:
    """On emulated CUDA: what the whole command does, but for the size."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "moe.py")),
            *("--gpus", "2", "--steps", "3", "--micro-batches", "2", "--bucket-numel", "20000"),
            *("--only", "stock,fp32-disk", "--save", "--directory", str(tmp_path / "state")),
            *("--limit-gb", "0.2", "--limit-seconds", "0.1", "--out", str(tmp_path / "out")),
            *("--", *TINY),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "not run" not in done.stdout
    known = json.loads((tmp_path / "out" / "moe.json").read_text())
    for each in known["variants"]["fp32-disk"]["results"]:
        assert each["stores"] == 2
        assert each["log_lines"] == 6
        assert each["save_peak_gb"] > 0
    ours = {name: each["results"] for name, each in known["variants"].items()}
    assert moe_table.agreement(ours["fp32-disk"], ours["stock"]) == "losses and weights equal"
    assert moe_table.moved_gb(ours["fp32-disk"]) > 0
    assert list((tmp_path / "state").iterdir()) == [], "state and checkpoint are removed"
