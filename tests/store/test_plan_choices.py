"""What is suggested fits, loses the least, and is what its flags make."""

from __future__ import annotations

from tests.store.plans import FAST, FULL, PLAIN, only, plan


def test_what_was_not_told_is_not_called_fitting() -> None:
    """Each choice is judged by what it needs itself."""
    made = plan("--params", "8e9", "--dp", 8, "--gpu", "h100", "--host-gb", 4000, "--all")

    on_disk = [each for each in made["choices"] if each["disk_bytes"] and not each["lacks"]]
    in_memory = [each for each in made["choices"] if not each["disk_bytes"] and not each["lacks"]]
    assert on_disk and in_memory
    assert {each["fits"] for each in on_disk} == {None}
    assert {each["fits"] for each in in_memory} == {True}


def test_what_is_suggested_fits_and_is_lossless_if_that_fits() -> None:
    suggested = plan(*FULL, *FAST)["suggested"]

    assert suggested["fits"]
    assert suggested["moment_dtype"] == "fp32"
    assert "--stream-optimizer-state-to-disk" in suggested["flags"]


def test_lossy_formats_are_suggested_if_nothing_else_fits() -> None:
    made = plan(*PLAIN, "--disk-gb", 15)

    assert made["suggested"]["moment_dtype"] in ("bf16", "fp16")
    assert made["suggested"]["disk_bytes"] <= 15e9
    assert only(made)["lacks"] == ["disk"]


def test_the_flags_that_are_suggested_make_the_plan_that_is_shown() -> None:
    suggested = plan(*FULL, *FAST)["suggested"]
    words = [word for flag in suggested["flags"] for word in flag.split()]

    again = plan(*FULL, *FAST, "--", *words)

    names = ("device", "host_bytes", "disk_bytes", "step_seconds")
    for name in names:
        formats = (suggested["main_storage"], suggested["moment_dtype"])
        assert only(again, *formats)[name] == suggested[name]


def test_a_row_without_room_says_for_what() -> None:
    made = plan(*PLAIN, "--gpu-gb", 13, "--host-gb", 9, "--disk-gb", 1)

    assert only(made)["lacks"] == ["GPU", "host", "disk"]
    assert made["suggested"] is None


def test_no_choice_is_shown_twice() -> None:
    """A host tier too small for one bucket is none."""
    choices = plan(*PLAIN, "--host-gb", 10.9, "--disk-gb", 100)["choices"]
    shown = [(each["main_storage"], each["moment_dtype"], each["tiers"]) for each in choices]
    assert len(shown) == len(set(shown))


def test_no_more_is_pinned_for_the_host_tier_than_it_holds() -> None:
    """What the device took away from it is not asked for."""
    made = plan(*PLAIN, "--gpu-gb", 40, "--activation-gb", 15, "--host-gb", 128)
    (row,) = [
        each
        for each in made["choices"]
        if each["tiers"] == "device+host"
        if (each["main_storage"], each["moment_dtype"]) == ("fp32", "fp32")
    ]
    flags = " ".join(made["suggested"]["flags"])
    assert row["fits"]
    asked = float(flags.partition("-host-gb ")[2].split()[0])
    held = made["suggested"]["host_tier_bytes"] / 1e9
    assert held <= asked < held + 0.8
