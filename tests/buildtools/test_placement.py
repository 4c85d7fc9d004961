"""Whatever upstream did, a patch ends in the right place, in a conflict, or loudly: the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from buildtools.carry import dry_run
from buildtools.history import History
from buildtools.report import BLOCKED, CONFLICT, EMPTY, REPLACED, UNCHANGED, Report
from buildtools.series import load_patches
from tests.buildtools.toy import FILES, MODEL, make_toy, write_files

NEW_PLACE = "megatron/core/models/model.py"
COPY = "megatron/core/copy.py"


def _function(name: str, factor: int = 2, indent: str = "") -> str:
    """Return a function whose changed line has only lines around it that its twins have too."""
    lines = [
        f"def {name}(value):",
        *(f"    before_{n} = value + {n}" for n in range(6)),
        f"    scaled = before_5 * {factor}",
        *(f"    after_{n} = scaled - {n}" for n in range(6)),
        "    return after_5",
    ]
    return "".join(f"{indent}{line}\n" for line in lines)


def _unlike(name: str) -> str:
    return f"def {name}():\n" + "".join(f"    {name}_{n} = {n}\n" for n in range(12))


FIRST, SECOND, THIRD = (_unlike(name) for name in ("first", "second", "third"))
TARGET, FIXED = _function("target"), _function("target", 4)
TWIN, TWIN_CHANGED = _function("twin"), _function("twin", 4)


def _module(*parts: str) -> str:
    return "\n\n".join(parts)


OLD = _module(FIRST, TARGET, SECOND, TWIN, THIRD)
EDITS = [
    ("model: scale by four", MODEL, TARGET, FIXED),
    ("model: change the third", MODEL, "third_5 = 5\n", "third_5 = 55\n"),
    ("loop: return two", "megatron/training/loop.py", "return 1\n", "return 2\n"),
]


@dataclass(frozen=True)
class Case:
    """What upstream did, and what must come of the first patch.

    Attributes:
        files: upstream's files that are not as they were; None is a file that is gone.
        fate: what becomes of the patch.
        where: the file in which it must be found.
        result: what that file must hold, patched; None if nothing is merged.
        loud: what must be said although the merge was clean.
    """

    files: dict[str, str | None]
    fate: str
    result: str | None = None
    where: str = MODEL
    loud: str = ""


def _third(text: str) -> str:
    """Apply the second patch."""
    return text.replace("third_5 = 5\n", "third_5 = 55\n")


def _merged(*parts: str) -> str:
    return _third(_module(*parts))


IN_CLASS = "class Owner:\n" + _function("target", indent="    ")
REWRITTEN = TARGET.replace("scaled = before_5 * 2", "scaled = math.prod((before_5, 2))")
INSERTED = TARGET.replace("    before_5 = ", "    inserted = 0\n    before_4b = 9\n    before_5 = ")
INSERTED_ABOVE = TARGET.replace("    before_4 = ", "    inserted = 0\n    before_4 = ")
OTHER_FIX = TARGET.replace("before_5 * 2", "before_5 * 3")
RENAMED = TARGET.replace("def target", "def renamed")

CASES = {
    "nothing changed": Case({}, UNCHANGED, _merged(FIRST, FIXED, SECOND, TWIN, THIRD)),
    "pure offset": Case(
        {MODEL: _module("import math\n" * 9, OLD)},
        REPLACED,
        _merged("import math\n" * 9, FIRST, FIXED, SECOND, TWIN, THIRD),
    ),
    "a line inserted in the context": Case(
        {MODEL: OLD.replace(TARGET, INSERTED_ABOVE)},
        REPLACED,
        _third(OLD.replace(TARGET, INSERTED_ABOVE.replace("* 2", "* 4"))),
    ),
    "lines inserted right above": Case(
        {MODEL: OLD.replace(TARGET, INSERTED)},
        REPLACED,
        _third(OLD.replace(TARGET, INSERTED.replace("* 2", "* 4"))),
    ),
    "the target moved beside its twin": Case(
        {MODEL: _module(FIRST, SECOND, TWIN, TARGET, THIRD)}, CONFLICT
    ),
    "the target moved past others": Case(
        {MODEL: _module(FIRST, SECOND, TARGET, TWIN, THIRD)},
        REPLACED,
        _merged(FIRST, SECOND, FIXED, TWIN, THIRD),
    ),
    # To a merge of lines, the twin that changed places with the target is the target renamed: it
    # is this that the comparison of symbols is for.
    "the target and its twin changed places": Case(
        {MODEL: _module(FIRST, TWIN, SECOND, TARGET, THIRD)},
        UNCHANGED,
        _merged(FIRST, TWIN_CHANGED, SECOND, TARGET, THIRD),
        loud=f"{MODEL}: a hunk of target now lies in twin",
    ),
    "the target rewritten, a twin elsewhere": Case(
        {MODEL: _module(FIRST, REWRITTEN, SECOND, TWIN, THIRD)}, CONFLICT
    ),
    "the identical fix": Case(
        {MODEL: OLD.replace(TARGET, FIXED)}, EMPTY, _merged(FIRST, FIXED, SECOND, TWIN, THIRD)
    ),
    "the identical fix, and the twin has the old text": Case(
        {MODEL: _module(TWIN, FIRST, FIXED, SECOND, THIRD)},
        EMPTY,
        _merged(TWIN, FIRST, FIXED, SECOND, THIRD),
    ),
    "another fix of the same line": Case(
        {MODEL: _module(FIRST, OTHER_FIX, SECOND, TWIN, THIRD)}, CONFLICT
    ),
    "the file renamed": Case(
        {MODEL: None, NEW_PLACE: OLD},
        REPLACED,
        _merged(FIRST, FIXED, SECOND, TWIN, THIRD),
        where=NEW_PLACE,
    ),
    "the file renamed and changed": Case(
        {MODEL: None, NEW_PLACE: _module("import math\n", OLD)},
        REPLACED,
        _merged("import math\n", FIRST, FIXED, SECOND, TWIN, THIRD),
        where=NEW_PLACE,
    ),
    "re-indented into a class": Case(
        {MODEL: _module(FIRST, IN_CLASS, SECOND, TWIN, THIRD)}, CONFLICT
    ),
    "the function deleted": Case({MODEL: _module(FIRST, SECOND, THIRD)}, CONFLICT),
    "the function deleted, its twin stays": Case(
        {MODEL: _module(FIRST, SECOND, TWIN, THIRD)}, CONFLICT
    ),
    "the file deleted": Case({MODEL: None}, CONFLICT),
    "the file deleted, another has a twin": Case(
        {MODEL: None, COPY: _module(*map(_unlike, "abcdefgh"), TWIN, *map(_unlike, "ijklm"))},
        CONFLICT,
    ),
    "duplicated in its file": Case(
        {MODEL: _module(FIRST, TARGET, SECOND, TWIN, THIRD, _function("copied"))},
        UNCHANGED,
        _merged(FIRST, FIXED, SECOND, TWIN, THIRD, _function("copied")),
        loud=f"duplicated: upstream has copied {MODEL}::target to {MODEL}::copied",
    ),
    "duplicated into another file": Case(
        {COPY: _function("target")},
        UNCHANGED,
        _merged(FIRST, FIXED, SECOND, TWIN, THIRD),
        loud=f"duplicated: upstream has copied {MODEL}::target to {COPY}::target",
    ),
    "duplicated and fixed in one place": Case(
        {MODEL: OLD.replace(TARGET, FIXED), COPY: _function("target")},
        EMPTY,
        _merged(FIRST, FIXED, SECOND, TWIN, THIRD),
        loud=f"duplicated: upstream has copied {MODEL}::target to {COPY}::target",
    ),
    "the function renamed": Case(
        {MODEL: _module(FIRST, RENAMED, SECOND, TWIN, THIRD)},
        UNCHANGED,
        _third(_module(FIRST, RENAMED.replace("* 2", "* 4"), SECOND, TWIN, THIRD)),
        loud=f"{MODEL}: a hunk of target now lies in renamed",
    ),
}


def _run(
    tmp_path: Path, old: dict[str, str], files: dict[str, str | None]
) -> tuple[History, Report]:
    return _carry(tmp_path, old, files, EDITS)


def _carry(
    tmp_path: Path,
    old: dict[str, str],
    files: dict[str, str | None],
    edits: list[tuple[str, str, str, str]],
) -> tuple[History, Report]:
    toy = make_toy(tmp_path / "toy", FILES | old, edits)
    kept = {path: text for path, text in (FILES | old | files).items() if text is not None}
    upstream = write_files(tmp_path / "upstream", kept)
    tree = write_files(tmp_path / "tree", FILES | old)
    history = History(tree, load_patches(toy.patches))
    return history, dry_run(history, upstream, old="1", new="2")


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_or_a_conflict_or_loud(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    history, report = _run(tmp_path, {MODEL: OLD}, case.files)

    first = report.patches[0]
    assert first.fate == case.fate
    if case.result is None:
        assert first.conflicts, "a conflict says where"
        assert report.patches[1].fate == BLOCKED
        assert report.patches[2].fate == UNCHANGED, "the patches of other files are tried"
        assert not report.clean
    else:
        content = history.git.blob("HEAD", case.where)
        assert content is not None and content.decode() == case.result
        assert bool(first.attention) == bool(case.loud)
    assert case.loud in "\n".join(first.attention)


def test_the_lines_alone_do_not_tell_the_twins_apart() -> None:
    """What makes the cases above hard: three lines of context are the same in target and twin."""
    target, twin = TARGET.splitlines(), TWIN.splitlines()
    place = target.index("    scaled = before_5 * 2")

    assert target[place - 3 : place + 4] == twin[place - 3 : place + 4]


def _loud(
    tmp_path: Path, before: str, after: str, edit: tuple[str, str], path: str = MODEL
) -> list[str]:
    edits = [("model: change it", path, *edit)]
    _, report = _carry(tmp_path, {path: before}, {path: after}, edits)
    assert report.patches[0].fate in (UNCHANGED, REPLACED)
    return list(report.patches[0].attention)


def test_a_fix_of_which_upstream_has_a_part_is_loud(tmp_path: Path) -> None:
    before = "".join(f"line_{n} = {n}\n" for n in range(40))
    after = before.replace("line_5 = 5\n", "line_5 = 55\n")
    edits = [("model: change two lines", MODEL, before, before)]
    patched = after.replace("line_30 = 30\n", "line_30 = 33\n")
    edits = [("model: change two lines", MODEL, before, patched)]

    _, report = _carry(tmp_path, {MODEL: before}, {MODEL: after}, edits)

    assert report.patches[0].attention == (
        "the merge left out -line_5 = 5",
        "the merge left out +line_5 = 55",
    )


def test_the_same_fix_at_another_place_is_loud(tmp_path: Path) -> None:
    before = "".join(f"line_{n} = {n}\n" for n in range(40))
    after = before.replace("line_30 = 30\n", "line_30 = 30\nguard = check_everything()\n")

    edit = ("line_5 = 5\n", "line_5 = 5\nguard = check_everything()\n")
    found = _loud(tmp_path, before, after, edit)

    assert found == [f"{MODEL}: upstream has this line now, too: guard = check_everything()"]


def test_a_file_that_moved_with_a_change_at_module_level_is_loud(tmp_path: Path) -> None:
    edits = [("model: change a line", MODEL, "line_5 = 5\n", "line_5 = 55\n")]

    _, report = _carry(tmp_path, {}, {MODEL: None, NEW_PLACE: FILES[MODEL]}, edits)

    (line,) = report.patches[0].attention
    assert line == f"{MODEL} is now {NEW_PLACE}, and what changes there is in no function"


def test_a_table_that_was_renamed_around_a_change_is_loud(tmp_path: Path) -> None:
    before = "[one]\n" + "".join(f"a{n} = {n}\n" for n in range(9)) + "[two]\nb = 1\n"

    found = _loud(
        tmp_path,
        before,
        before.replace("[one]", "[other]"),
        ("a6 = 6", "a6 = 66"),
        "pyproject.toml",
    )

    assert found == ["pyproject.toml: a hunk of [one] now lies in [other]"]


def test_a_merge_that_is_no_python_is_loud(tmp_path: Path) -> None:
    before = "".join(f"+{n}\n" for n in range(12))

    found = _loud(tmp_path, before, f"total = (\n{before})\n", ("+6\n", "+6\nx = 1\n"))

    assert found == [f"{MODEL} is no valid Python any more"]


def test_a_method_that_went_to_another_class_is_loud(tmp_path: Path) -> None:
    body = "".join(f"        x{n} = {n}\n" for n in range(9))
    before = f"class A:\n    def step(self):\n{body}"

    found = _loud(tmp_path, before, before.replace("class A", "class B"), ("x6 = 6", "x6 = 66"))

    assert f"{MODEL}: a hunk of A.step now lies in B.step" in found


def test_functions_that_changed_their_order_are_not_loud(tmp_path: Path) -> None:
    edits = [
        ("model: change both", MODEL, "x", "x"),
    ]
    one, two = _unlike("first"), _unlike("second")
    before = _module(one, _unlike("third"), two)
    patched = before.replace("first_5 = 5", "first_5 = 55").replace("second_5 = 5", "second_5 = 55")
    edits = [("model: change both", MODEL, before, patched)]

    _, report = _carry(tmp_path, {MODEL: before}, {MODEL: _module("import math\n", before)}, edits)

    assert report.patches[0].attention == ()
    assert report.patches[0].files[0].symbols_now == ("first", "second")


def test_the_history_can_be_carried_again(tmp_path: Path) -> None:
    history, first = _run(tmp_path, {MODEL: OLD}, {MODEL: None})
    again = write_files(tmp_path / "again", FILES | {MODEL: OLD})
    report = dry_run(history, again, old="1", new="3")

    assert first.counts == {CONFLICT: 1, BLOCKED: 1, UNCHANGED: 1}
    assert report.counts == {UNCHANGED: 3}
    assert report.clean


def test_the_report_shows_what_upstream_did(tmp_path: Path) -> None:
    changed = OLD.replace(TARGET, TARGET.replace("before_0 = value + 0", "before_0 = 0"))
    _, report = _run(tmp_path, {MODEL: OLD}, {MODEL: changed})

    (symbol,) = report.patches[0].upstream
    assert (symbol.symbol, symbol.state) == (f"{MODEL}::target", "changed")
    assert "-    before_0 = value + 0\n+    before_0 = 0\n" in symbol.diff
    assert report.patches[1].upstream[0].state == "same"


def test_the_report_says_where_a_symbol_went(tmp_path: Path) -> None:
    files: dict[str, str | None] = {MODEL: _module(FIRST, SECOND, THIRD), COPY: TARGET}
    _, report = _run(tmp_path, {MODEL: OLD}, files)

    (symbol,) = report.patches[0].upstream
    assert (symbol.state, symbol.elsewhere) == ("gone", (f"{COPY}::target",))
    assert f"a symbol of that name is at {COPY}::target" in report.to_text()


def test_a_collision_with_the_overlay_is_loud(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy")
    history = History(write_files(tmp_path / "tree", FILES), load_patches(toy.patches))
    files = FILES | {"megatron/core/extra/store.py": "y = 1\n"}

    report = dry_run(
        history,
        write_files(tmp_path / "upstream", files),
        old="1",
        new="2",
        overlay=["megatron/core/extra/store.py"],
    )

    assert not report.clean
    assert "overlay: megatron/core/extra/store.py: upstream has" in report.attention[0]
