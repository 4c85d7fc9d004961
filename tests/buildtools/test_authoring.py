"""Patches are made as commits: opened, added, dropped, and nothing that is done is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from buildtools.authoring import drop, new_patch, open_edit
from buildtools.console import BuildError
from buildtools.dropped import read_dropped
from buildtools.edittree import EditTree
from buildtools.series import lint, load_patches, render_readme
from buildtools.status import status
from tests.buildtools.author import EARLY, LATE, Author, commit, dirty, dropped_commit, untracked
from tests.buildtools.toy import EDITS, MODEL, OPTIMIZER, Toy, make_toy, write_files


def test_open_and_export_changes_no_byte(author: Author) -> None:
    before = author.toy.contents()

    assert author.export() == []

    assert author.toy.contents() == before
    assert author.git("log", "--format=%s", "pristine..series").splitlines() == [
        subject for subject, *_ in reversed(EDITS)
    ]
    assert author.git("branch", "--show-current").strip() == "series"


def test_a_fixup_changes_its_patch_and_the_later_ones_of_the_file(author: Author) -> None:
    author.write(MODEL, "line_5 = 55\n", "line_5 = 555\n")
    author.fixup("model: change an early line")

    assert author.export() == [f"changed  {EARLY}", f"changed  {LATE}"]

    assert b"+line_5 = 555" in (author.toy.patches / EARLY).read_bytes()
    author.open()
    assert author.export() == []


def test_a_new_patch_gets_the_next_number_and_its_author(author: Author) -> None:
    author.write(OPTIMIZER, "rate_9 = 9\n", "rate_9 = 99\n")
    new_patch(author.tree, "optimizer: change a rate", "hook")

    assert author.export() == ["new      0004-optimizer-change-a-rate.patch"]

    patch = load_patches(author.toy.patches)[-1]
    assert "From: =?UTF-8?q?Zo=C3=AB=20Q?= <zoe@example.org>" in patch.message
    assert author.names()[-1] == patch.name


def test_the_template_names_what_is_missing_and_never_passes(author: Author) -> None:
    author.write(OPTIMIZER, "rate_9 = 9\n", "rate_9 = 99\n")
    new_patch(author.tree, "optimizer: change a rate", None)
    author.export()

    found = "\n".join(lint(load_patches(author.toy.patches), author.toy.root, set()))

    for part in ("'Why a patch: FILL-IN", "'When off: FILL-IN", "Reason 'FILL-IN", "Guard-Test"):
        assert part in found
    for key in ("Reason", "Upstream-Status", "Drop-When", "Tripwires", "Guard-Test"):
        assert f"trailer {key} is still to be filled in" in found
    assert all(line.startswith("0004-") for line in found.splitlines())


@pytest.mark.parametrize("kept", ["Why a patch", "When off", "Drop-When", "Tripwires"])
def test_a_single_placeholder_is_enough_to_fail(author: Author, kept: str) -> None:
    author.write(OPTIMIZER, "rate_9 = 9\n", "rate_9 = 99\n")
    author.commit("optimizer: change a rate", OPTIMIZER)
    message = author.git("log", "-1", "--format=%B")
    author.git(
        "commit", "--quiet", "--amend", "-m", message.replace(f"{kept}:", f"{kept}: FILL-IN")
    )
    author.export()

    found = lint(load_patches(author.toy.patches), author.toy.root, set())

    assert len(found) == 1 and "FILL-IN" in found[0] and found[0].startswith("0004-")


def _stash(author: Author) -> None:
    dirty(author)
    author.git("stash", "--quiet")


def _side_branch(author: Author) -> None:
    author.git("switch", "--quiet", "-c", "side")
    commit(author)
    author.git("switch", "--quiet", "series")


def _broken(author: Author) -> None:
    (author.tree.path / ".git" / "HEAD").write_text("nonsense")


def _staged(author: Author) -> None:
    dirty(author)
    author.git("add", "--all")


WORK = [dirty, untracked, _staged, _stash, commit, _side_branch, dropped_commit, _broken]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__.strip("_"))
def test_unexported_work_is_not_overwritten(author: Author, work: Callable[[Author], None]) -> None:
    work(author)

    with pytest.raises(BuildError, match=r"holds work that is not exported:\n  .*"):
        author.open()
    assert status(author.toy.workspace(), author.tree).unexported

    author.open(discard=True)
    assert not status(author.toy.workspace(), author.tree).unexported


def test_an_edit_tree_without_work_is_opened_anew(author: Author) -> None:
    commit(author)
    author.export()
    write_files(author.tree.path, {"megatron/core/__pycache__/model.pyc": "x"})

    author.open()

    assert len(author.git("log", "--format=%s", "pristine..").splitlines()) == 4


def test_a_directory_that_is_no_edit_tree_is_never_replaced(toy: Toy, tmp_path: Path) -> None:
    write_files(tmp_path / "mine", {"precious": "x"})

    for discard in (False, True):
        with pytest.raises(BuildError, match="exists and is no edit tree"):
            open_edit(toy.workspace(), tmp_path / "mine", discard=discard)

    assert (tmp_path / "mine" / "precious").exists()


def test_who_has_no_identity_in_git_gets_one(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    author = Author(toy)
    author.open()
    commit(author)

    assert author.git("log", "-1", "--format=%an").strip() == "megatron-nvme"


@pytest.mark.parametrize(
    ("subject", "change", "message"),
    [
        ("Model: change", dirty, "is not '<area>: <imperative>'"),
        ("model: change a late line", dirty, "is there already"),
        ("model: change nothing", lambda author: None, "nothing has changed"),
        ("model: add a file", untracked, "creates a file"),
    ],
)
def test_a_new_patch_is_refused(
    author: Author, subject: str, change: Callable[[Author], None], message: str
) -> None:
    change(author)
    before = author.git("status", "--porcelain"), author.git("rev-parse", "HEAD")

    with pytest.raises(BuildError, match=message):
        new_patch(author.tree, subject, None)

    assert (author.git("status", "--porcelain"), author.git("rev-parse", "HEAD")) == before


def test_without_an_edit_tree_there_is_nothing_to_export(toy: Toy) -> None:
    with pytest.raises(BuildError, match="no edit tree; open one"):
        Author(toy).export()


def test_a_dropped_patch_is_recorded_and_the_later_ones_follow(toy: Toy) -> None:
    drop(toy.workspace(), "2", 'upstream "has" it | since\nlong')

    assert [patch.name for patch in load_patches(toy.patches)] == [
        "0001-info-label-the-build.patch",
        LATE,
    ]
    (entry,) = read_dropped(toy.patches)
    assert (entry.patch, entry.upstream) == (EARLY, "1.2.3")
    assert entry.reason == 'upstream "has" it | since long'
    table = render_readme(load_patches(toy.patches), read_dropped(toy.patches))
    assert '| 0002 | model: change an early line | 1.2.3 | upstream "has" it \\| since long |' in (
        table
    )


def test_the_record_only_grows(toy: Toy) -> None:
    drop(toy.workspace(), "0003-model", "first")
    first = (toy.patches / "dropped.toml").read_text()
    drop(toy.workspace(), EARLY, "second")

    assert (toy.patches / "dropped.toml").read_text().startswith(first)
    assert [entry.reason for entry in read_dropped(toy.patches)] == ["first", "second"]


def test_a_patch_that_others_need_is_not_dropped(tmp_path: Path) -> None:
    edits = [
        *EDITS,
        ("model: change it again", MODEL, "line_5 = 55\n", "line_5 = 555\n"),
    ]
    toy = make_toy(tmp_path / "toy", edits=edits)
    workspace = toy.workspace()
    before = toy.contents()

    with pytest.raises(BuildError) as caught:
        drop(workspace, "2", "no more")

    text = str(caught.value)
    assert f"{EARLY} cannot be dropped alone: 0004-model-change-it-again.patch changes" in text
    assert "git rebase -i pristine" in text and "build.py export --because" in text
    assert toy.contents() == before


@pytest.mark.parametrize("name", ["4", "0009", "000", "", "model", "0002-model-x"])
def test_a_name_must_name_one_patch(toy: Toy, name: str) -> None:
    with pytest.raises(BuildError, match="must name one patch"):
        drop(toy.workspace(), name, "x")


def test_the_last_patch_is_not_dropped(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", edits=EDITS[:1])

    with pytest.raises(BuildError, match="the series would be empty"):
        drop(toy.workspace(), "1", "x")


def test_a_drop_needs_a_reason_and_no_open_work(author: Author) -> None:
    with pytest.raises(BuildError, match="say why"):
        drop(author.toy.workspace(), "3", "  ")
    dirty(author)
    with pytest.raises(BuildError, match="holds work that is not exported"):
        drop(author.toy.workspace(), "3", "x")


def test_a_patch_dropped_by_hand_needs_a_reason(author: Author) -> None:
    dropped_commit(author)

    with pytest.raises(BuildError, match=rf"{LATE}: gone from .*--because"):
        author.export()

    assert author.export("squashed") == [f"removed  {LATE}"]
    assert read_dropped(author.toy.patches)[0].reason == "squashed"
    commit(author)
    with pytest.raises(BuildError, match="no patch is gone"):
        author.export("why")
    assert author.export() == ["new      0004-model-change-a-line.patch"], "0003 is taken"


def test_a_damaged_record_is_an_error(toy: Toy) -> None:
    write_files(toy.patches, {"dropped.toml": "[[dropped]]\npatch = 1\n"})

    with pytest.raises(BuildError, match=r"cannot read .*dropped\.toml"):
        drop(toy.workspace(), "3", "x")


def test_status_says_what_export_would_change(author: Author) -> None:
    workspace = author.toy.workspace()
    clean = status(workspace, author.tree)
    assert not clean.unexported
    assert any(line.endswith("all is exported") for line in clean.lines)
    commit(author)
    untracked(author)

    found = status(workspace, author.tree)

    assert found.unexported
    text = "\n".join(found.lines)
    assert "not committed: ?? notes.txt" in text
    assert "new      0004-model-change-a-line.patch" in text
    assert "not current: README.md" in text


def test_status_of_nothing(toy: Toy) -> None:
    found = status(toy.workspace(), EditTree(toy.workspace().edit))

    assert not found.unexported
    assert found.lines[:2] == ["edit: not open", "rebase: not open"]
