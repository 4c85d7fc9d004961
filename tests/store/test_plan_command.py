"""From a command line to a plan, or to what is wrong with it."""

from __future__ import annotations

import pytest
from megatron.core.optimizer.nvme_state_store.__main__ import main

from tests.store.failing_file import start_process
from tests.store.plans import PLAIN, PREFIX


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 descriptions of the model: expected one of --params"),
        ([*PLAIN, "--hf-config", "x"], "2 descriptions of the model"),
        (["--hf-config", "/nowhere"], "--hf-config /nowhere: expected a readable config.json"),
        ([*PLAIN, "--expert-params", "3e9"], "--expert-params 3000000000: expected a part"),
        ([*PLAIN, "--tp", "0"], "--tp 0: expected a positive number"),
        ([*PLAIN, "--dp", "2", "--ep", "3"], "--ep 3: expected ep x etp = 3 x 1 to divide"),
        ([*PLAIN, "--gpu", "h200", "--gpu-gb", "1"], "--gpu h200 and --gpu-gb 1: expected one"),
        ([*PLAIN, f"{PREFIX}host-gb", "auto"], "auto: expected --host-gb with it"),
        ([*PLAIN, f"{PREFIX}moment-dtype", "int8"], "moment-dtype int8: expected one of fp32"),
        ([*PLAIN, f"{PREFIX}bucket-numel", "0"], "bucket-numel 0: expected a positive number"),
        ([*PLAIN, "--probe", "/nowhere"], "--probe /nowhere: expected what `probe DIR... --json`"),
        ([*PLAIN, "--", "--optimizer", "soap"], "--optimizer soap: not planned, its factors take"),
        ([*PLAIN, "--optimizer", "soap"], "see Sizing in docs/running.md; expected one of adam"),
        ([*PLAIN, "--optimizer", "adaptive_muon"], "--optimizer adaptive_muon: not planned, its"),
        ([*PLAIN, "--", "--optimizer", "dist_muon"], "--optimizer muon is what it becomes"),
        ([*PLAIN, "--optimizer", "adamw"], "--optimizer adamw: expected one of adam, muon"),
        ([*PLAIN, "--", "--optimizer-cpu-offload"], "cannot be used with optimizer_cpu_offload"),
        (
            [*PLAIN, f"{PREFIX}main-storage", "split", "--", "--fp16"],
            "main-storage split needs --bf16",
        ),
        (
            [*PLAIN, "--optimizer", "sgd", "--", "--use-distributed-optimizer"],
            "leave out --use-distributed-optimizer",
        ),
        (["--params", "0"], "--params 0: expected a positive number, such as 8e9, 8b"),
        ([*PLAIN, "--", "32"], "-- 32: expected Megatron's arguments"),
        (["--", "--num-layers", "2"], "-- --hidden-size: expected it among Megatron's"),
        (["--", "--num-layers", "x"], "-- --num-layers x: expected a whole number"),
    ],
)
def test_wrong_input_is_named_with_what_is_accepted(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_argument_that_overrides_one_of_megatrons_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other of the two may be the one that was meant."""
    ours = ["--tp", "4", "--pp", "2", "--optimizer", "adam", f"{PREFIX}host-gb", "40"]
    sizes = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --optimizer muon"
    theirs = [*sizes.split(), f"{PREFIX}host-gb", "40.0", f"{PREFIX}moment-dtype", "bf16"]

    assert main(["plan", *PLAIN, "--host-gb", "900", *ours, "--", *theirs]) == 0

    told = [line for line in "".join(capsys.readouterr()).splitlines() if "planned with" in line]
    assert len(told) == 2
    assert "--tp 4 is planned with, not -- --tensor-model-parallel-size 8" in told[0]
    assert "--optimizer adam is planned with, not -- --optimizer muon" in told[1]


def test_it_runs_without_torch_and_megatron() -> None:
    """In a Python without site-packages."""
    script = (
        "from nvme_state_store.__main__ import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    process = start_process(script, "plan", *PLAIN, "--", "--lr", "1")
    out, err = process.communicate()

    assert process.returncode == 0, err
    assert out.startswith("model   2.000 B params")
