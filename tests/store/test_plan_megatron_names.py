"""The names that a plan knows are those of Megatron's real parser, and so is their shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store import errors
from megatron.core.optimizer.nvme_state_store.plan.megatron_names import (
    NAMES,
)
from megatron.core.optimizer.nvme_state_store.plan.megatron_words import CHOICES
from megatron.core.optimizer.nvme_state_store.plan.ranks import NOT_PLANNED, OPTIMIZERS

from buildtools.paths import ROOT
from tests.store.megatron_names import PATH, render


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process of its own: importing Megatron's training leaves much behind."""
    written = tmp_path_factory.mktemp("parser") / "arguments.json"
    script = (
        "import json, pathlib, sys; "
        "from tests.store.megatron_names import parser_arguments; "
        "pathlib.Path(sys.argv[1]).write_text(json.dumps(parser_arguments()))"
    )
    site = str(Path(errors.__file__).parents[4])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(written)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((site, str(ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(written.read_text())
    return found


def test_they_are_those_of_the_parser_of_the_megatron_that_is_patched(real: dict[str, Any]) -> None:
    assert PATH.read_text() == render(real), "python -m tests.store.megatron_names"
    assert set(real) == NAMES


def test_accepted_words_are_the_parsers(real: dict[str, Any]) -> None:
    for name, words in CHOICES.items():
        assert list(words) == real[name]["choices"]
    assert {*OPTIMIZERS, *NOT_PLANNED} == set(real["optimizer"]["choices"])
