"""Every patch explains itself, and every breach of the series' rules is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildtools.console import BuildError
from buildtools.series import file_name, lint, load_patches, parse_header, render_readme
from tests.buildtools.toy import MODEL, Toy, write_files


@pytest.fixture
def sound(toy: Toy) -> Toy:
    """The toy with the guard test that its patches name."""
    write_files(toy.root, {"tests/test_toy.py": "def test_toy():\n    pass\n"})
    return toy


def _lint(toy: Toy) -> str:
    return "\n".join(lint(load_patches(toy.patches), toy.root, {"megatron/core/extra/store.py"}))


def test_a_sound_series_has_no_breach(sound: Toy) -> None:
    assert _lint(sound) == ""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Reason: hook", "Reason: because", "Reason 'because' is none of hook, upstream-bug"),
        ("Reason: hook\n", "", "trailer Reason is missing"),
        ("Upstream-Status: pending", "Upstream-Status: soon", "Upstream-Status 'soon' is none of"),
        ("Upstream-Status: pending\n", "", "trailer Upstream-Status is missing"),
        ("Drop-When: never\n", "", "trailer Drop-When is missing"),
        (f"Tripwires: {MODEL}\n", "", "trailer Tripwires is missing"),
        ("::test_toy", "::test_gone", "Guard-Test 'tests/test_toy.py::test_gone' does not exist"),
        ("tests/test_toy.py", "tests/none.py", "Guard-Test 'tests/none.py::test_toy' does not"),
        ("Why a patch:", "Because:", "no paragraph starts with 'Why a patch:'"),
        ("When off:", "Else:", "no paragraph starts with 'When off:'"),
        (
            "Subject: model: change",
            "Subject: Changed",
            "subject 'Changed an early line' is not '<area>: <imperative>'",
        ),
        ("change an early line", "alter an early line", "must be named 0002-model-alter-an-early"),
    ],
)
def test_a_breach_of_the_header_is_named(sound: Toy, old: str, new: str, message: str) -> None:
    sound.rewrite(2, old, new)

    assert f"0002-model-change-an-early-line.patch: {message}" in _lint(sound)


def test_all_breaches_are_reported_at_once(sound: Toy) -> None:
    sound.rewrite(1, "Reason: hook\n", "")
    sound.rewrite(3, "When off:", "Else:")

    assert len(_lint(sound).splitlines()) == 2


def test_a_patch_over_budget_is_named(sound: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildtools.series.BUDGET", 1)

    assert "2 changed lines, at most 1 are allowed" in _lint(sound)


def test_a_patch_of_an_overlay_file_is_named(sound: Toy) -> None:
    found = lint(load_patches(sound.patches), sound.root, {MODEL})

    assert (
        f"0002-model-change-an-early-line.patch: touches {MODEL}, which is the overlay's" in found
    )


def test_a_name_listed_twice_and_a_bad_name_are_named(sound: Toy) -> None:
    series = sound.patches / "series"
    series.write_text(series.read_text() + "0003-model-change-a-late-line.patch\nfix.patch\n")
    (sound.patches / "fix.patch").write_text("")

    with pytest.raises(BuildError) as caught:
        load_patches(sound.patches)

    assert "0003-model-change-a-late-line.patch: listed twice" in str(caught.value)
    assert "fix.patch: not named NNNN-<area>-<imperative>.patch" in str(caught.value)
    assert "fix.patch: holds no diff" in str(caught.value)


def test_a_missing_series_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot read the series"):
        load_patches(tmp_path)


def test_trailers_may_be_continued() -> None:
    header = parse_header("From 0\nSubject: a: b c\n\nWhy a patch: x\n\nTripwires: one,\n two\n")

    assert header.trailers == {"Tripwires": "one, two"}
    assert header.area == "a"


def test_file_names_follow_subjects() -> None:
    assert file_name(7, "optimizer: select the NVMe store") == (
        "0007-optimizer-select-the-nvme-store.patch"
    )


def test_the_table_shows_every_patch_and_the_total(sound: Toy) -> None:
    text = render_readme(load_patches(sound.patches))

    assert text.count("| [000") == 3
    assert "Total: 3 patches, 2 files, 3 hunks, 5 changed lines." in text


def test_a_patch_that_cannot_be_read_is_named(sound: Toy) -> None:
    path = sound.patch_path(3)
    path.unlink()
    path.mkdir()

    with pytest.raises(BuildError, match=r"0003-model-change-a-late-line\.patch: cannot be read"):
        load_patches(sound.patches)


def test_whatever_else_lies_in_the_folder_is_named(sound: Toy) -> None:
    write_files(sound.patches, {"0004-a-b.diff": "x", "sub/0005-c-d.patch": "x"})

    with pytest.raises(BuildError, match=r"0004-a-b\.diff: unlisted") as caught:
        load_patches(sound.patches)

    assert "sub: unlisted" in str(caught.value)
