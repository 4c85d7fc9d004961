"""The example trains on a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train_example import train_example

pytestmark = pytest.mark.gpu


def test_the_example_trains_saves_and_resumes_on_cuda(tmp_path: Path) -> None:
    assert torch.cuda.is_available(), "-m gpu was asked for, but there is no CUDA device"

    done = train_example(tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{torch.cuda.device_count()} CUDA GPUs" in done.stdout
    for name in ("stock-resumed", "streamed-straight", "streamed-resumed"):
        assert f"{name}: equal bit for bit (40 steps, every rank's loss)" in done.stdout
        assert f"{name}: weights, main params and moments equal" in done.stdout
