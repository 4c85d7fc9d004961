"""Megatron's arguments: what its parser refuses is refused, what does not matter passed over."""

from __future__ import annotations

import re

import pytest
from megatron.core.optimizer.nvme_state_store.plan.megatron_words import megatron_flags

from tests.store.plans import PLAIN, plan


def test_known_arguments_that_do_not_matter_are_passed_over_in_silence() -> None:
    words = "--lr 1e-5 --data-path a b --bf16 --seq-length=4096 --no-bias-swiglu-fusion"

    assert megatron_flags(words.split()) == {
        **{"lr": "1e-5", "data-path": "a b", "bf16": "", "seq-length": "4096"},
        "no-bias-swiglu-fusion": "",
    }
    assert plan(*PLAIN, "--", *words.split())["warnings"] == []


def test_the_last_of_two_counts_as_in_megatrons_parser() -> None:
    assert megatron_flags(["--num-layers", "2", "--num-layers", "4"]) == {"num-layers": "4"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layer 3", "-- --num-layer: expected an argument of Megatron 0.19.2; did you mean"),
        ("--num-layer 3", "--num-layers"),
        ("--hiden-size=64", "did you mean --hidden-size"),
        ("--num_layers 3", "did you mean --num-layers"),
        ("--swigul", "did you mean --swiglu"),
        ("--stream-optimizer-state-hostgb 3", "did you mean --stream-optimizer-state-host-gb"),
        ("--zzzzzzzz 3", "leave out what only your own script knows"),
        ("--data-parallel-size 8", "Megatron has none, it follows from the ranks; use --dp N"),
        ("--swiglu yes", "-- --swiglu yes: expected no value, --swiglu stands alone"),
        ("--bf16=1", "-- --bf16 1: expected no value"),
        ("--num-layers --hidden-size 64", "-- --num-layers: expected one value, got 0"),
        ("--num-layers 3 4", "-- --num-layers 3 4: expected one value, got 2"),
        ("--normalization RMSnorm", "RMSnorm: expected one of LayerNorm, RMSNorm"),
        ("--position-embedding-type rotary", "rotary: expected one of learned_absolute, rope"),
        ("32", "-- 32: expected Megatron's arguments, such as --num-layers 32"),
    ],
)
def test_what_megatron_would_refuse_is_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        megatron_flags(words.split())
