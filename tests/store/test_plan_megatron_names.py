"""The names that a plan knows are those of Megatron's real parser, and so is their shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from argparse import SUPPRESS, ArgumentParser, _HelpAction
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store import errors
from megatron.core.optimizer.nvme_state_store.plan.megatron_names import (
    MEGATRON,
    NAMES,
    WITH_ONE_VALUE,
    WITH_VALUES,
    WITHOUT_VALUE,
)
from megatron.core.optimizer.nvme_state_store.plan.megatron_words import CHOICES
from megatron.core.optimizer.nvme_state_store.plan.ranks import NOT_PLANNED, OPTIMIZERS

from buildtools.paths import ROOT


def parser_arguments() -> dict[str, Any]:
    """Return how many values each of Megatron's arguments takes, and which are accepted."""
    from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser(allow_abbrev=False, argument_default=SUPPRESS)
    add_megatron_arguments(parser)
    return {
        name[2:]: {"nargs": action.nargs, "choices": [*map(str, action.choices or ())]}
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and not isinstance(action, _HelpAction)
    }


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process of its own: importing Megatron's training leaves much behind."""
    written = tmp_path_factory.mktemp("parser") / "arguments.json"
    script = (
        "import json, pathlib, sys; "
        "from tests.store.test_plan_megatron_names import parser_arguments; "
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


def test_they_are_the_parsers(real: dict[str, Any]) -> None:
    """Else correct `megatron_names` by what this shows, after a move to another Megatron."""
    shapes = {0: WITHOUT_VALUE, None: WITH_ONE_VALUE}
    for nargs, names in shapes.items():
        parsers = {name for name, each in real.items() if each["nargs"] == nargs}
        assert sorted(parsers ^ names) == []
    rest = {name for name, each in real.items() if each["nargs"] not in shapes}
    assert sorted(rest ^ WITH_VALUES) == []
    assert set(real) == NAMES


def test_it_is_the_megatron_that_is_patched() -> None:
    with (ROOT / "upstream.toml").open("rb") as file:
        assert tomllib.load(file)["upstream"]["version"] == MEGATRON


def test_accepted_words_are_the_parsers(real: dict[str, Any]) -> None:
    for name, words in CHOICES.items():
        assert list(words) == real[name]["choices"]
    assert {*OPTIMIZERS, *NOT_PLANNED} == set(real["optimizer"]["choices"])
