"""A misspelt argument is refused, with what was meant."""

from __future__ import annotations

import pytest
from megatron.core.optimizer.nvme_state_store import probe
from megatron.core.optimizer.nvme_state_store.__main__ import main
from megatron.core.optimizer.nvme_state_store.plan import command

from tests.store.plans import PLAIN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--parms", "8b"], "instead of --parms, did you mean --params?"),
        (["plan", *PLAIN, "--disk", "8"], "instead of --disk, did you mean --disk-gb?"),
        (["plan", *PLAIN, "--param", "8"], "did you mean --params?"),
        (["plan", *PLAIN, "--num-layers", "8"], "Megatron's own arguments go after --"),
        (["probe", "/tmp", "--thread", "8"], "did you mean --threads?"),
        (["probe", "/tmp", "--zzz=1"], "unrecognized arguments: --zzz=1\n"),
    ],
)
def test_arguments_that_no_command_has_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what argparse would take for an abbreviation."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])

    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "description"), [("plan", command.DESCRIPTION), ("probe", probe.DESCRIPTION)]
)
def test_help_names_the_commands(
    name: str, description: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--help"], [name, "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert description[:30] in capsys.readouterr().out
