"""The picture has the bytes of the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot
from megatron.core.optimizer.nvme_state_store.__main__ import main

from tests.store.plans import PLAIN

matplotlib.use("Agg")


def test_without_matplotlib_a_picture_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert main(["plan", *PLAIN, "--png", str(tmp_path / "plan.png")]) == 2
    assert "expected matplotlib, which is not installed" in capsys.readouterr().err


def test_the_picture_stacks_stock_and_every_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each bar ends at what the table says for its GPU."""
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    picture = tmp_path / "plan.png"

    assert main(["plan", *PLAIN, "--gpu", "h200", "--png", str(picture)]) == 0

    assert picture.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    ends: dict[int, float] = {}
    for bar in axes.patches:
        place = round(bar.get_y() + bar.get_height() / 2)
        ends[place] = max(ends.get(place, 0.0), round(bar.get_x() + bar.get_width(), 1))
    lines = capsys.readouterr().out.splitlines()
    table = [float(line.split()[3]) for line in lines if " disk " in line[:25]]
    assert [ends[place] for place in sorted(ends)] == [36.0, *table]
    assert [float(text.get_text()) for text in axes.texts] == [36.0, *table]
