"""When nothing fits, the status says so, and each piece of advice makes a plan that fits."""

from __future__ import annotations

import re
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store.__main__ import main

from tests.store.plans import PLAIN, PREFIX, plan

EIGHT = ["--params", "8e9", "--gpu", "h100", "--activation-gb", "20"]


def advice(made: dict[str, Any], begin: str) -> dict[str, Any]:
    """Return the one piece of advice that begins so."""
    (found,) = [each for each in made["advice"] if each["change"].startswith(begin)]
    return dict(found)


def test_the_status_is_one_and_the_text_says_what_would_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *PLAIN, "--disk-gb", "10", f"{PREFIX}moment-dtype", "fp32"]) == 1

    lines = capsys.readouterr().out.splitlines()
    start = lines.index("nothing fits. Each of these alone would make it fit:")
    text = "\n".join(lines[start:])
    assert "other formats: main split, moments fp8e4m3, disk" in text
    assert "--dp 4 instead of 1 (4 GPUs instead of 1)" not in text, "they share the disk of a node"
    assert "more memory, 20.3 GB of disk a node instead of 10.0: main split" in text


def test_nothing_is_advised_if_something_fits() -> None:
    made = plan(*PLAIN, "--disk-gb", 100)
    assert made["suggested"]
    assert made["advice"] == []


def test_what_is_not_known_is_not_called_too_little() -> None:
    assert plan(*PLAIN)["suggested"]


@pytest.mark.parametrize(
    ("kind", "flag", "least"),
    [("of disk a node", "--disk-gb", 1), ("of host memory a node", "--host-gb", 1)],
)
def test_more_memory_is_enough_and_no_more_than_needed(kind: str, flag: str, least: float) -> None:
    given = {"--disk-gb": 10, "--host-gb": 9.0}
    options = [*EIGHT, "--gpus-per-node", 1]
    made = plan(*options, *(word for pair in given.items() for word in pair))
    assert made["suggested"] is None
    pattern = rf"more memory, ([\d.]+) GB {kind} instead of [\d.]+"
    matches = [(re.fullmatch(pattern, each["change"]), each) for each in made["advice"]]
    ((match, found),) = [(match, each) for match, each in matches if match]

    amount = float(match[1])
    for size, fits in ((amount, True), (amount - least, False)):
        again = {**given, flag: size}
        formats = [f"{PREFIX}moment-dtype", found["moment_dtype"]]
        formats += [f"{PREFIX}main-storage", found["main_storage"]]
        words = [word for pair in again.items() for word in pair]
        assert bool(plan(*options, *words, *formats)["suggested"]) is fits


def test_larger_gpus_are_advised_if_params_and_gradients_do_not_fit() -> None:
    made = plan("--params", "8e9", "--gpu-gb", 45)

    assert made["suggested"] is None
    found = advice(made, "more memory")
    size = float(re.findall(r"([\d.]+) GB a GPU instead of 45.0", found["change"])[0])
    assert plan("--params", "8e9", "--gpu-gb", size)["suggested"]


def test_more_ranks_are_the_fewest_of_powers_of_two() -> None:
    made = plan("--params", "8e9", "--gpu-gb", 45)

    assert "--tp 2 instead of 1 (2 GPUs instead of 1)" in advice(made, "more ranks, --tp")["change"]
    assert plan("--params", "8e9", "--gpu-gb", 45, "--tp", 2)["suggested"]
    # Params and gradients stay whole under data parallelism: 48 GB on each.
    assert not [each for each in made["advice"] if "--dp" in each["change"]]


def test_experts_over_more_ranks_need_no_more_gpus() -> None:
    options = ["--params", "30e9", "--expert-params", "28e9", "--dp", 8, "--gpu-gb", 80]
    found = advice(plan(*options), "experts over more ranks")

    assert "--ep 4 instead of 1 (8 GPUs instead of 8)" in found["change"]
    assert plan(*options, "--ep", 4)["suggested"]
    assert not plan(*options, "--ep", 2)["suggested"]


def test_only_splits_that_megatron_makes_are_advised() -> None:
    """61 layers have no other even stages than one, and 127 heads no tensor parallelism."""
    words = "--num-layers 61 --hidden-size 12700 --num-attention-heads 127 --ffn-hidden-size 127"
    made = plan("--gpu-gb", 100, "--", *words.split())

    assert made["suggested"] is None
    assert not re.search(r"--(tp|pp) \d+ instead", str(made["advice"]))


def test_tiers_that_were_given_can_be_what_is_too_much() -> None:
    given = (f"{PREFIX}device-gb", 60, "--disk-gb", 1000)
    made = plan(*EIGHT, *given)

    assert made["suggested"] is None
    change = advice(made, "other tiers")["change"]
    assert "leave out --stream-optimizer-state-host-gb and -device-gb" in change
    assert plan(*EIGHT, "--disk-gb", 1000)["suggested"]


def test_smaller_slots_can_be_enough() -> None:
    made = plan(*PLAIN, "--gpu-gb", 13.2, f"{PREFIX}moment-dtype", "fp32")

    found = advice(made, "smaller slots")
    numel = found["change"].split()[-1]
    again = ("--gpu-gb", 13.2, f"{PREFIX}moment-dtype", "fp32", f"{PREFIX}bucket-numel", numel)
    assert plan(*PLAIN, *again)["suggested"]


def test_several_kinds_of_memory_are_advised_together_if_one_is_not_enough() -> None:
    made = plan(*PLAIN, "--gpu-gb", 11, "--host-gb", 8.5, "--disk-gb", 1)

    change = advice(made, "more memory")["change"]
    assert " and " in change
    assert "GB a GPU instead of 11.0" in change


def test_split_main_params_are_not_advised_for_fp16() -> None:
    made = plan(*PLAIN, "--disk-gb", 1, "--", "--fp16")

    assert made["advice"]
    assert all(each["main_storage"] == "fp32" for each in [*made["advice"], *made["choices"]])


def test_formats_and_tiers_are_advised_each_for_itself_if_each_is_enough() -> None:
    """And together if neither is."""
    given = ("--disk-gb", 90, "--host-gb", 64, f"{PREFIX}moment-dtype", "fp32")
    alone = plan(*EIGHT, *given, f"{PREFIX}main-storage", "fp32", f"{PREFIX}host-gb", 0)
    assert advice(alone, "other formats")["disk_bytes"] <= 90e9
    assert advice(alone, "other tiers")["moment_dtype"] == "fp32"

    both = plan(*EIGHT, "--disk-gb", 5, *given[2:], f"{PREFIX}host-gb", 0)
    assert advice(both, "other formats and tiers")
    assert not [each for each in both["advice"] if each["change"] == "other formats"]
