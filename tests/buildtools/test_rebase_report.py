"""What a rebase says of every patch, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buildtools.console import BuildError
from buildtools.pin import read_pin
from buildtools.rebase import Rebase
from buildtools.releases import Shop
from buildtools.report import ADAPTED, UNCHANGED
from tests.buildtools.mover import CONFLICTING, EARLY, MOVED, NEXT, UPSTREAMED, Mover, finished
from tests.buildtools.toy import FILES, MODEL, make_toy


def test_the_report_is_written_as_markdown_or_json(mover: Mover, tmp_path: Path) -> None:
    mover.begin(CONFLICTING, tmp_path / "report.json")
    mover.resolve()
    mover.go_on()

    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["old"], document["new"]) == ("1.2.3", "1.2.4")
    # What somebody adapted is to be looked at again: a line of the patch is not there any more.
    assert document["attention"] == [f"{EARLY}: the resolution left out +line_5 = 55"]
    assert document["clean"] is False
    assert [patch["fate"] for patch in document["patches"]] == [UNCHANGED, ADAPTED, UNCHANGED]
    assert document["patches"][1]["files"][0]["old"] == MODEL
    assert document["counts"] == {UNCHANGED: 2, ADAPTED: 1}


def test_the_page_has_a_row_for_each_patch_and_the_upstream_diff(
    mover: Mover, tmp_path: Path
) -> None:
    mover.begin(UPSTREAMED, tmp_path / "report.md")

    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# 1.2.3 -> 1.2.4\n")
    assert f"| {EARLY} | empty |" in text
    assert "````diff\n--- megatron/core/model.py\n+++ megatron/core/model.py\n" in text
    assert "-line_5 = 5\n+line_5 = 55\n" in text


def test_findings_of_others_are_part_of_the_report(mover: Mover) -> None:
    def findings(pristine: Path) -> list[str]:
        assert (pristine / MODEL).read_text() == (NEXT | MOVED)[MODEL]
        return ["a reader has come"]

    rebase = Rebase(mover.toy.workspace(), findings)
    shop = Shop(mover.toy.root / "cache", mover.toy.download, None)
    report = finished(rebase.begin(str(mover.upstream(MOVED)), shop, None)).report

    assert report is not None
    assert "Tripwires and census:\n  a reader has come" in report.to_text()
    assert "## Tripwires and census\n\n* a reader has come" in report.to_markdown()


@pytest.mark.parametrize("name", ["report.txt", "report"])
def test_another_format_is_refused_before_anything_begins(
    mover: Mover, tmp_path: Path, name: str
) -> None:
    with pytest.raises(BuildError, match=r"expected a name that ends in \.md or \.json"):
        mover.begin(MOVED, tmp_path / name)

    assert not mover.toy.workspace().rebase.exists()


def test_a_report_that_cannot_be_written_keeps_the_rebase_open(
    mover: Mover, tmp_path: Path
) -> None:
    before = mover.toy.contents()
    with pytest.raises(OSError):
        mover.begin(MOVED, tmp_path / "none" / "report.md")

    assert mover.toy.contents() == before
    (tmp_path / "none").mkdir()
    finished(mover.go_on())
    assert (tmp_path / "none" / "report.md").exists()


def test_a_hunk_in_another_symbol_is_written_and_loud(tmp_path: Path) -> None:
    body = "".join(f"    x{n} = {n}\n" for n in range(9))
    edits = [("model: change a line", MODEL, "x5 = 5", "x5 = 55")]
    toy = make_toy(tmp_path / "toy", FILES | {MODEL: f"def step():\n{body}"}, edits)
    toy.write_pin()
    mover = Mover(toy, tmp_path / "mover")

    report = finished(mover.begin({MODEL: f"def other():\n{body}"})).report

    assert report is not None and not report.clean
    assert "a hunk of step now lies in other" in report.to_text()
    assert read_pin(toy.pin_file).version == "1.2.4"
