"""Values of the command line are read, or named with what is accepted."""

from __future__ import annotations

import pytest
from megatron.core.optimizer.nvme_state_store import arguments as flags
from megatron.core.optimizer.nvme_state_store.__main__ import main
from megatron.core.optimizer.nvme_state_store.plan.arguments import STREAM_DEFAULTS

from tests.store.plans import PLAIN, plan


def test_defaults_of_the_store_are_those_of_its_flags() -> None:
    of_fields = {
        name.removeprefix("stream_optimizer_state_").replace("_", "-"): default
        for name, default in flags._DEFAULTS.items()
    }

    assert {name: of_fields[name] for name in STREAM_DEFAULTS} == dict(STREAM_DEFAULTS)


@pytest.mark.parametrize(
    ("text", "params"),
    [
        *(("8b", 8e9), ("744B", 744e9), ("1.5t", 1.5e12), ("8e9", 8e9), ("1.1b", 1_100_000_000)),
        *(("350M", 350e6), ("64k", 64_000), ("8000000000", 8e9), (".5b", 5e8), ("8E9", 8e9)),
    ],
)
def test_params_may_have_a_suffix(text: str, params: float) -> None:
    assert plan("--params", text, "--pp", 256)["model"]["params"] == params


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "many"], "many: expected a whole number of params, such as 8e9, 8b, 744B"),
        (["--params", "1.5"], "1.5: expected a whole number of params"),
        (["--params", "8g"], "8g: expected a whole number of params"),
        (["--params", "-8b"], "expected one argument"),
        (["--expert-params", "x"], "x: expected a whole number of params"),
        ([*PLAIN, "--dp", "8b"], "8b: expected a whole number, such as 8"),
        ([*PLAIN, "--dp", "1.5"], "1.5: expected a whole number, such as 8"),
        (["--host-gb", "-1"], "--host-gb: -1: expected a positive number"),
        (["--host-gb", "64g"], "--host-gb: 64g: expected a positive number"),
        (["--pcie-gb-per-s", "nan"], "nan: expected a positive number"),
        (["--gpu", "x"], "argument --gpu: invalid choice: 'x'"),
        (["--stream-optimizer-state-host-gb", "x"], "x: expected a number of GB, or auto"),
        (["--stream-optimizer-state-bucket-numel", "x"], "x: expected a whole number"),
    ],
)
def test_a_value_that_cannot_be_parsed_is_named_with_what_is_accepted(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])

    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert message in text
    assert any(word in text.splitlines()[-1] for word in arguments if word[:2] == "--")
