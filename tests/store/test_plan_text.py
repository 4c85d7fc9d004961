"""A plan as a table, with flags and wear."""

from __future__ import annotations

import pytest
from megatron.core.optimizer.nvme_state_store.__main__ import main

from tests.store.plans import FAST, FULL, PLAIN


def test_the_text_has_table_flags_and_wear(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *FULL, *FAST, "--host-gb", "20", "--endurance-tb", "7000"]) == 0

    text = capsys.readouterr().out
    assert text.startswith("model   2.000 B params")
    assert (
        "stock   86.0 GB a GPU = params 4.0 + grads 8.0 + state 24.0 + reserve 50.0: fits" in text
    )
    assert "stream only if its memory is wanted" in text
    assert "    --stream-optimizer-state-to-disk \\\n" in text


def test_all_shows_every_format_once_for_each_choice_of_tiers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag, count in (("--all", 10), ("--inner=te", 5)):
        assert main(["plan", *PLAIN, flag]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.split()[2:3] == ["disk"] for line in lines) == count
