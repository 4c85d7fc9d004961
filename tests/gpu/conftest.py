"""Fixtures of the tests on real CUDA devices."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def world_size() -> int:
    """All devices of this machine."""
    return torch.cuda.device_count()
