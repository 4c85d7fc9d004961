"""Every command of docs/planning.md prints what is below it there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron.core.optimizer.nvme_state_store.__main__ import main

from buildtools.paths import ROOT

PAGE = ROOT / "docs" / "planning.md"
TOOL = ["python", "-m", "megatron.core.optimizer.nvme_state_store"]


@dataclass(frozen=True)
class Example:
    """A command of the page, and the lines below it."""

    words: list[str]
    output: str


def examples() -> list[Example]:
    """Return the commands, in order: indented blocks whose first line begins with a dollar."""
    found = []
    for block in PAGE.read_text().split("\n\n    $ ")[1:]:
        lines = [line[4:] for line in _indented(block)]
        command = lines.pop(0)
        while command.endswith("\\"):
            command = command[:-1] + lines.pop(0)
        found.append(Example(shlex.split(command), "\n".join(lines).strip() + "\n"))
    return found


def _indented(block: str) -> list[str]:
    """Return the lines of an indented block, which may be parted by single empty ones."""
    lines = [f"    {block.splitlines()[0]}"]
    for line in block.splitlines()[1:]:
        if line and not line.startswith("    "):
            break
        lines.append(line)
    return lines


def test_the_page_has_a_plan_for_each_kind_of_input() -> None:
    words = [word for example in examples() for word in example.words]
    for flag in ("--params", "--hf-config", "--num-layers"):
        assert flag in words


def test_every_command_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cat` shows a file that the commands after it read."""
    monkeypatch.chdir(tmp_path)
    for example in examples():
        if example.words[0] == "cat":
            Path(example.words[1]).write_text(example.output)
            continue
        assert example.words[:3] == TOOL
        assert main(example.words[3:]) == ("nothing fits" in example.output)
        assert capsys.readouterr().out == example.output


def test_the_page_shows_what_happens_when_nothing_fits() -> None:
    assert any("nothing fits" in example.output for example in examples())


def test_the_help_that_the_page_names_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--help"])

    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--params", "--hf-config", "--gpu", "--probe", "--png", "--endurance-tb"):
        assert flag in text
        assert flag in PAGE.read_text()
