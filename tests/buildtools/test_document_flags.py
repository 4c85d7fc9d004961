"""Flags that a document names exist, those of training train, and the table of them is whole."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from buildtools.verbs import VERBS
from tests import gpt, streaming
from tests.buildtools.command import build_py, run
from tests.buildtools.documents import (
    DOCUMENTS,
    Command,
    all_commands,
    is_training,
    rows,
    spans,
    text_of,
)
from tests.rank_pool import RankPool


def megatron_arguments() -> dict[str, tuple[Any, list[str]]]:
    """Return Megatron's flags: default and choices of each."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {
        flag: (action.default, list(map(str, action.choices or ())))
        for action in parser._actions
        for flag in action.option_strings
    }


def train(arguments: list[str], directory: str) -> int:
    """Train one step with the arguments of a document, and return the buckets of the store."""
    words = [directory if word.startswith("/") else word for word in arguments]
    counts: list[int] = []

    def after_setup(model: Any, optimizer: Any) -> None:
        counts.extend(len(store.layout.buckets) for store in optimizer._stores())

    gpt.train(
        [*gpt.BF16, *words],
        until=1,
        after_setup=after_setup,
        optimizer_tensors=streaming.streamed_tensors,
    )
    return sum(counts)


@pytest.fixture(scope="module")
def known(ranks: RankPool) -> dict[str, tuple[Any, list[str]]]:
    """Megatron's flags."""
    (found,) = ranks.run(megatron_arguments)
    return dict(found)


TRAINED = sorted({each.text: each for each in all_commands() if is_training(each)}.items())


@pytest.mark.parametrize("command", [each for _, each in TRAINED], ids=str)
def test_training_with_the_arguments_of_a_document_streams(
    command: Command, ranks: RankPool, tmp_path: Path
) -> None:
    words = shlex.split(command.text.removeprefix("... "))
    assert ranks.run(train, arguments=words, directory=str(tmp_path)) >= [1]


OTHERS = {
    *(
        "--no-deps",
        "--no-index",
        "--require-hashes",
        "--generate-hashes",
        "--hash",
        "--force-reinstall",
    ),  # pip
    *("--fixup", "--autosquash", "--amend", "--onto", "--fuzz"),  # git, quilt
    *("--rm", "--user", "--env", "--label", "--network", "--net"),  # docker and its like
    *("--strict", "--accumulate-allreduce-grads-in-fp32"),  # mypy, another project
}
"""Flags of programs that are not Megatron's and not ours."""
_FLAG = r"(?<![\w-])--[a-z][a-z0-9-]*+(?!\.\.\.)"


def flags(text: str) -> set[str]:
    return set(re.findall(_FLAG, text))


def help_of(verb: str) -> str:
    """Return what `build.py VERB --help` prints."""
    done = build_py(verb, "--help", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def verbs() -> dict[str, set[str]]:
    """The flags of each verb of `build.py`."""
    return {name: flags(help_of(name)) for name in VERBS}


def test_every_flag_in_a_document_exists(known: dict[str, Any], verbs: dict[str, set[str]]) -> None:
    store = "megatron.core.optimizer.nvme_state_store"
    tools = [run(sys.executable, "-m", store, tool, "--help").stdout for tool in ("plan", "probe")]
    ours = set().union(*verbs.values()) | flags(" ".join(tools))
    for document in DOCUMENTS:
        assert flags(text_of(document)) <= ours | {*known} | OTHERS, document


def test_every_verb_that_a_document_names_has_the_flags_it_is_named_with(
    verbs: dict[str, set[str]],
) -> None:
    """Also in a sentence: those in blocks are run."""
    for document in DOCUMENTS:
        for span in spans(text_of(document)):
            words = span.removeprefix("python3 ").split()
            if words[0] == "build.py" and len(words) > 1:
                for verb in words[1].split("|"):
                    assert verb in verbs, (document, span)
                    wanted = flags(span.partition(" -- ")[0])
                    passed_on = {"test", "train-example"} & {verb}
                    assert passed_on or wanted <= verbs[verb], (document, span)


def test_the_table_of_flags_is_the_parsers(known: dict[str, tuple[Any, list[str]]]) -> None:
    """All of ours, each with its default and its choices."""
    table = {
        row[0].strip("`").split()[0]: row[1:]
        for row in rows(
            text_of("docs/running.md"), "flag (`OptimizerConfig` field of the same name)"
        )
    }
    ours = {flag for flag in known if flag.startswith("--stream-optimizer-state")}
    assert set(table) == ours
    for flag, (default, meaning) in table.items():
        value, choices = known[flag]
        if value is not None:
            assert _value(default) == value, flag
        assert set(choices) <= {_value(default), *re.findall("`([^`]+)`", meaning)}, flag


def _value(cell: str) -> object:
    """Return the default that a cell of the table shows."""
    if cell == "off":
        return False
    number = re.fullmatch(r"(\d+)( M)?", cell)
    if number:
        return int(number[1]) * (1_000_000 if number[2] else 1)
    return cell.strip("`")
