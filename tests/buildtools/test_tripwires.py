"""The record is accepted entry by entry; whatever differs from it is a finding with its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from buildtools.console import BuildError
from buildtools.leans import Lean
from buildtools.record import Entry, Record, read_record, render_record
from buildtools.symbols import Sources
from buildtools.tripwires import (
    Finding,
    compare,
    findings,
    render_finding,
    side_by_side,
    survey,
    update_record,
)

STEP = "m/a.py::Model.step"
READ = "m/a.py::norm"
SOURCE = """\
class Model:
    def step(self):
        first()
        second()


def norm(param):
    return param.main_param.norm()
"""
LEANS = {STEP: Lean(STEP, {"0007", "m/overlay.py"})}


def tree(edit: Callable[[str], str] = str) -> Sources:
    return Sources({"m/a.py": edit(SOURCE).encode()})


def accepted(sources: Sources | None = None) -> Record:
    now = survey(LEANS, sources or tree(), {})
    record, _ = update_record({}, now, "1.0", [STEP], "seen")
    record, still_open = update_record(record, now, "1.0", [READ], "its norm", "served")
    assert still_open == []
    return record


def found(record: Record, sources: Sources, leans: dict[str, Lean] | None = None) -> list[Finding]:
    chosen = LEANS if leans is None else leans
    old = survey(chosen, tree(), record)
    now = survey(chosen, sources, record)
    return findings(record, lambda _: old, now, sources)


def test_everything_is_open_before_it_is_accepted() -> None:
    assert compare({}, survey(LEANS, tree(), {})) == [
        ("symbol", STEP, "new"),
        ("reader", READ, "new"),
    ]


def test_an_accepted_tree_has_no_findings() -> None:
    assert found(accepted(), tree()) == []


def test_a_changed_symbol_shows_both_sources_and_who_leans_on_it() -> None:
    (finding,) = found(accepted(), tree(lambda text: text.replace("second()", "third()")))

    text = render_finding(finding, width=40)
    assert text.startswith("m/a.py:2: symbol changed: m/a.py::Model.step\n")
    assert "leaned on by: 0007, m/overlay.py" in text
    assert "accepted because seen" in text
    (row,) = [line for line in text.splitlines() if "second()" in line]
    assert row.index("second()") < row.index("|") < row.index("third()")


def test_a_reader_is_found_with_file_and_line() -> None:
    (finding,) = found(accepted(), tree(lambda text: text + "\n\ndef new(p):\n    p.main_param\n"))

    assert (finding.where, finding.what) == ("m/a.py:12", "new")
    assert "touches main_param; not in the census" in render_finding(finding)


def test_what_is_gone_says_where_it_went() -> None:
    sources = Sources({"m/a.py": b"", "m/b.py": SOURCE.encode()})

    kinds = {(each.name, each.what): each for each in found(accepted(), sources)}
    assert kinds[STEP, "gone"].hint.endswith("there is m/b.py::Model.step")
    assert kinds[READ, "gone"].hint.endswith("there is m/b.py::norm")
    assert ("m/b.py::norm", "new") in kinds


def test_a_symbol_that_upstream_renamed_under_the_overlay_is_not_forgotten() -> None:
    """Nobody leans on the old name any more: the overlay now overrides nothing."""
    (finding,) = found(accepted(), tree(lambda text: text.replace("step", "take_step")), leans={})

    assert (finding.name, finding.what) == (STEP, "gone")


def test_a_symbol_that_nobody_leans_on_leaves_the_record() -> None:
    record = accepted()

    updated, still_open = update_record(record, survey({}, tree(), record), "1.0", [], "")
    assert ("symbol", STEP) not in updated
    assert still_open == []


def test_who_leans_on_a_symbol_is_kept_up_to_date() -> None:
    record = accepted()
    now = survey({STEP: Lean(STEP, {"0008"})}, tree(), record)

    updated, _ = update_record(record, now, "1.0", [], "")
    assert updated["symbol", STEP].by == ("0008",)


def test_accepting_takes_one_entry_and_leaves_the_others_open() -> None:
    record = accepted()
    sources = tree(lambda text: text.replace("second()", "x()").replace(".norm()", ".sum()"))
    now = survey(LEANS, sources, record)

    updated, still_open = update_record(record, now, "2.0", [STEP], "looked again")
    entry = updated["symbol", STEP]
    assert (entry.because, entry.release) == ("looked again", "2.0")
    assert still_open == [("reader", READ, "changed")]
    assert updated["reader", READ] == record["reader", READ]


def test_an_accepted_reader_keeps_its_class_and_a_gone_one_leaves() -> None:
    record = accepted()
    changed = survey(LEANS, tree(lambda text: text.replace(".norm()", ".sum()")), record)
    updated, _ = update_record(record, changed, "2.0", [READ], "a sum now")
    assert updated["reader", READ].classed == "served"

    gone = survey(LEANS, tree(lambda text: text.partition("def norm")[0]), record)
    updated, still_open = update_record(record, gone, "2.0", [READ], "upstream dropped it")
    assert ("reader", READ) not in updated
    assert still_open == []


@pytest.mark.parametrize(
    ("edit", "name", "message"),
    [
        (str, STEP, "nothing of it is open"),
        (str, "m/a.py::other", "nothing of it is open"),
        (str, f"symbol:{STEP}", "nothing of it is open"),
        (lambda text: text.replace("def step", "def other"), STEP, "change what leans on it: 0007"),
        (lambda text: f"{text}\n\nv = lambda p: p.main_param\n", "m/a.py::", "needs a class"),
    ],
)
def test_what_cannot_be_accepted_is_refused(
    edit: Callable[[str], str], name: str, message: str
) -> None:
    record = accepted()

    with pytest.raises(BuildError, match=message):
        update_record(record, survey(LEANS, tree(edit), record), "2.0", [name], "why not")


def test_a_name_that_is_symbol_and_reader_is_accepted_one_at_a_time() -> None:
    leans = {READ: Lean(READ, {"0010"})}
    now = survey(leans, tree(), {})

    with pytest.raises(BuildError, match=rf"two things .*: symbol:{READ} or reader:{READ}"):
        update_record({}, now, "1.0", [READ], "which?", "served")
    with pytest.raises(BuildError, match="--as is for readers"):
        update_record({}, now, "1.0", [f"symbol:{READ}"], "seen", "served")
    updated, still_open = update_record({}, now, "1.0", [f"symbol:{READ}"], "seen")
    assert list(updated) == [("symbol", READ)]
    assert still_open == [("reader", READ, "new")]


def test_the_record_survives_writing_and_reading(tmp_path: Path) -> None:
    record = dict(accepted())
    odd = Entry("symbol", 'm/ü.py::"x"', "0" * 16, 'because "quoted" \\ and ü', "1.0", by=("0001",))
    record["symbol", odd.name] = odd
    path = tmp_path / "tripwires.toml"
    path.write_text(render_record(record.values()))

    assert read_record(path) == record
    assert render_record(read_record(path).values()) == path.read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('because = "seen"', 'because = " "', "because is empty"),
        ('class = "served"', 'class = "fine"', "class 'fine' is none of served"),
        ("[[reader]]", "[[readr]]", "unknown table readr"),
        ('release = "1.0"', 'released = "1.0"', "cannot read"),
        ('name = "', "name = ", "cannot read"),
        ('because = "seen"', "because = 5", "because is 5"),
        ('by = ["0007"', 'by = [7, "0007"', r"by is \(7,"),
        ("[[symbol]]", "[symbol]", "cannot read"),
    ],
)
def test_an_unsound_record_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "tripwires.toml"
    text = render_record(accepted().values())
    assert old in text
    path.write_text(text.replace(old, new, 1))

    with pytest.raises(BuildError, match=message):
        read_record(path)


def test_an_entry_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tripwires.toml"
    path.write_text(render_record([*accepted().values(), *accepted().values()]))

    with pytest.raises(BuildError, match="twice"):
        read_record(path)


def test_long_lines_are_wrapped_so_that_the_difference_is_seen() -> None:
    old, new = "x = " + "a" * 50 + "1", "x = " + "a" * 50 + "2"

    rows = side_by_side([old], [new], width=20)
    assert "".join(row[:20].strip() for row in rows).replace(" ", "") == old.replace(" ", "")
    assert any("1 |" in row.replace("  ", " ") or "1" in row[:20] for row in rows)
    assert all(len(row) <= 43 for row in rows)
