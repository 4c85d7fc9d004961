"""Options and fixtures that every test may use."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rank_pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a test run look at another Megatron than the installed one."""
    parser.addoption(
        "--megatron-site",
        type=Path,
        help="directory into which the Megatron under test is installed (default: where this "
        "Python imports it from); the proof of the guard tests passes one without the patch",
    )


@pytest.fixture(scope="session")
def megatron_site(request: pytest.FixtureRequest) -> Path:
    """Directory that holds ``megatron/`` and its ``.dist-info``."""
    chosen: Path | None = request.config.getoption("--megatron-site")
    if chosen is not None:
        return chosen
    return Path(str(importlib.metadata.distribution("megatron-core").locate_file("")))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool of ranks, each with an emulated CUDA device."""
    with RankPool() as pool:
        yield pool
