"""The picture has the bytes of the table."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from megatron.core.optimizer.nvme_state_store.__main__ import main

from tests.store.plans import PLAIN


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
    figure, axes = MagicMock(), MagicMock()
    pyplot = SimpleNamespace(subplots=lambda **_: (figure, axes), close=lambda _: None)
    doubles = {"matplotlib": MagicMock(), "matplotlib.pyplot": pyplot}
    monkeypatch.setattr(importlib, "import_module", doubles.__getitem__)

    assert main(["plan", *PLAIN, "--gpu", "h200", "--png", str(tmp_path / "plan.png")]) == 0

    ends = [float(call.args[2]) for call in axes.text.call_args_list]
    lines = capsys.readouterr().out.splitlines()
    assert ends[0] == 36.0
    assert ends[1:] == [float(line.split()[3]) for line in lines if " disk " in line[:25]]
    figure.savefig.assert_called_once()
