"""The commits of the edit tree are written back whole, under their numbers, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from buildtools import transaction
from buildtools.authoring import drop
from buildtools.console import BuildError
from buildtools.dropped import read_dropped
from buildtools.edition import number, series_text
from tests.buildtools.author import EARLY, LATE, Author, dirty, untracked
from tests.buildtools.toy import FILES, MODEL, OPTIMIZER, write_files


def test_a_patch_in_between_takes_a_free_number_or_moves_what_must_move(author: Author) -> None:
    author.write(OPTIMIZER, "rate_9 = 9\n", "rate_9 = 99\n")
    author.commit("optimizer: change a rate", OPTIMIZER)
    order = author.git("rev-list", "--reverse", "pristine..series").split()
    author.git("reset", "--quiet", "--hard", "pristine")
    author.git("cherry-pick", order[0], order[3], order[1], order[2])

    assert author.export() == [
        f"renamed  {EARLY} -> 0003-model-change-an-early-line.patch",
        f"renamed  {LATE} -> 0004-model-change-a-late-line.patch",
        "new      0002-optimizer-change-a-rate.patch",
    ]
    assert [name[:4] for name in author.names()] == ["0001", "0002", "0003", "0004"]
    assert (author.toy.patches / "series").read_text().splitlines()[0] == "# toy"


@pytest.mark.parametrize(
    ("known", "taken", "expected"),
    [
        ([1, 2, 3], (), [1, 2, 3]),
        ([1, 2, 3, None], (), [1, 2, 3, 4]),
        ([1, 2, None], (3,), [1, 2, 4]),
        ([1, None, 3], (2,), [1, 2, 3]),
        ([1, None, None, 10, None], (), [1, 2, 3, 10, 11]),
        ([10, None, 20, 30], (), [10, 11, 20, 30]),
        ([1, None, 2, 3], (), [1, 2, 3, 4]),
        ([2, 1, 3], (), [2, 3, 4]),
        ([3, 1, 2], (), [3, 4, 5]),
        ([None, 1], (), [1, 2]),
        ([5, 4, 6], (), [1, 4, 6]),
        ([None, None], (), [1, 2]),
        ([], (), []),
    ],
)
def test_numbers_are_kept_where_they_can_be(
    known: list[int | None], taken: tuple[int, ...], expected: list[int]
) -> None:
    assert number(known, taken) == expected


def test_comments_of_the_series_stay_with_their_patches() -> None:
    old = "# head\n\n0001-a.patch\n# of b\n0002-b.patch\n# of c\n0003-c.patch\n# tail\n"

    names = {"0001-a.patch": "0002-a.patch", "0002-b.patch": "0001-b.patch"}
    text = series_text(old, names, ["0001-b.patch", "0002-a.patch", "0003-d.patch"])

    assert text == "# head\n\n# of b\n0001-b.patch\n0002-a.patch\n0003-d.patch\n# tail\n"
    same = {f"000{n}-{x}.patch": f"000{n}-{x}.patch" for n, x in ((1, "a"), (2, "b"), (3, "c"))}
    assert series_text(old, same, list(same)) == old


def test_a_reworded_subject_keeps_the_number(author: Author) -> None:
    author.git(
        "rebase", "-i", "pristine",
        GIT_SEQUENCE_EDITOR="sed -i -e '2s/^pick/reword/'",
        GIT_EDITOR="sed -i -e '1s/change/alter/'",
    )  # fmt: skip

    assert author.export() == [
        f"renamed  {EARLY} -> 0002-model-alter-an-early-line.patch",
        "changed  0002-model-alter-an-early-line.patch",
    ]
    assert read_dropped(author.toy.patches) == []


def _staged(author: Author) -> None:
    dirty(author)
    author.git("add", "--all")


def _merge(author: Author) -> None:
    author.git("switch", "--quiet", "-c", "side", "HEAD~1")
    author.write(OPTIMIZER, "rate_9 = 9\n", "rate_9 = 99\n")
    author.commit("optimizer: change a rate")
    author.git("switch", "--quiet", "series")
    author.git("merge", "--quiet", "--no-edit", "side")


def _other_base(author: Author) -> None:
    author.git("switch", "--quiet", "--orphan", "other")
    write_files(author.tree.path, FILES | {OPTIMIZER: "rate = 0\n"})
    author.commit("pristine")
    author.git("tag", "--force", "pristine")
    author.git("switch", "--quiet", "series")


def _not_on_base(author: Author) -> None:
    author.git("checkout", "--quiet", "--orphan", "other", "pristine")
    author.git("commit", "--quiet", "-m", "another root")
    author.write(MODEL, "line_9 = 9\n", "line_9 = 99\n")
    author.commit("model: change a line")
    author.git("branch", "--quiet", "--force", "series")
    author.git("switch", "--quiet", "series")


def _empty(author: Author) -> None:
    author.git("commit", "--quiet", "--allow-empty", "-m", "model: change nothing")


def _none(author: Author) -> None:
    author.git("reset", "--quiet", "--hard", "pristine")


def _creation(author: Author) -> None:
    write_files(author.tree.path, {"megatron/core/new.py": "x = 1\n"})
    author.commit("model: add a file")


def _deletion(author: Author) -> None:
    author.git("rm", "--quiet", OPTIMIZER)
    author.commit("optimizer: delete it")


def _renaming(author: Author) -> None:
    author.git("mv", OPTIMIZER, "megatron/core/rates.py")
    author.commit("optimizer: rename it")


def _mode(author: Author) -> None:
    (author.tree.path / OPTIMIZER).chmod(0o755)
    author.commit("optimizer: make it executable")


def _link(author: Author) -> None:
    (author.tree.path / OPTIMIZER).unlink()
    (author.tree.path / OPTIMIZER).symlink_to("model.py")
    author.commit("optimizer: make it a link")


def _binary(author: Author) -> None:
    (author.tree.path / OPTIMIZER).write_bytes(b"\0\1\2")
    author.commit("optimizer: make it binary")


def _fixup(author: Author) -> None:
    dirty(author)
    author.git("commit", "--quiet", "-a", "--fixup", "HEAD")


def _twice(author: Author) -> None:
    dirty(author)
    author.commit("model: change a late line")


def _two_line_subject(author: Author) -> None:
    dirty(author)
    author.git("commit", "--quiet", "-a", "-m", "model: change\nand more\n\nbody")


def _diff_in_message(author: Author) -> None:
    dirty(author)
    author.git("commit", "--quiet", "-a", "-m", "model: x y\n\ndiff --git a/x b/x\nindex 1..2\n")


def _other_branch(author: Author) -> None:
    author.git("switch", "--quiet", "-c", "mine")


def _rebase_under_way(author: Author) -> None:
    author.git("rebase", "-i", "pristine", GIT_SEQUENCE_EDITOR="sed -i -e '1s/^pick/edit/'")


def _series_changed(author: Author) -> None:
    text = author.toy.patch_path(1).read_text()
    author.toy.patch_path(1).write_text(text.replace("always on", "always off"))
    dirty(author)
    author.commit("model: change another line")


REFUSED: dict[Callable[[Author], None], str] = {
    dirty: "these files are not committed",
    untracked: r"\?\? notes.txt",
    _staged: "these files are not committed",
    _merge: "refused: merge commits in the series:\n.*Merge branch 'side'",
    _other_base: "tag pristine is tree .*, the pin's is",
    _not_on_base: "series does not start from tag pristine",
    _empty: "model: change nothing: changes nothing",
    _none: "the series would be empty: refused",
    _creation: "creates a file",
    _deletion: "deletes a file",
    _renaming: "renames a file|renames or copies a file",
    _mode: "changes a file mode",
    _link: "file mode 120000|deletes a file|changes a file mode",
    _binary: "has a binary hunk",
    _fixup: "is still to be folded in: git rebase -i --autosquash pristine",
    _twice: "subject 'model: change a late line': more than one commit has it",
    _two_line_subject: "the second line of its message must be empty",
    _diff_in_message: "model: x y: ",
    _other_branch: "mine is checked out, expected series",
    _rebase_under_way: "a rebase is under way",
    _series_changed: "has changed since .* was opened: export would undo that",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__.strip("_"))
def test_export_refuses(author: Author, spoil: Callable[[Author], None]) -> None:
    spoil(author)
    before = author.toy.contents()

    with pytest.raises(BuildError, match=REFUSED[spoil]):
        author.export()

    assert author.toy.contents() == before


def test_every_fault_is_reported_at_once(author: Author) -> None:
    _empty(author)
    _creation(author)

    with pytest.raises(BuildError) as caught:
        author.export()

    assert "changes nothing" in str(caught.value) and "creates a file" in str(caught.value)


def test_export_and_rebase_exclude_each_other(author: Author) -> None:
    author.toy.workspace().rebase.mkdir(parents=True)

    with pytest.raises(BuildError, match="a rebase is open"):
        author.export()
    with pytest.raises(BuildError, match="a rebase is open"):
        author.open()
    with pytest.raises(BuildError, match="a rebase is open"):
        drop(author.toy.workspace(), "3", "x")


@pytest.mark.parametrize("failing", range(6))
def test_an_export_that_fails_leaves_everything_as_it_was(
    author: Author, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    author.write(MODEL, "line_5 = 55\n", "line_5 = 555\n")
    author.fixup("model: change an early line")
    author.write(OPTIMIZER, "rate_9 = 9\n", "rate_9 = 99\n")
    author.commit("optimizer: change a rate", OPTIMIZER)
    before = author.toy.contents()
    replace = Path.replace
    calls = 0

    def full(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError("no space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    if failing == 0:
        author.export()
        assert calls == 5, "three patches, the series and the marker are written"
        return
    with pytest.raises(OSError, match="no space left"):
        author.export()

    assert author.toy.contents() == before
    assert not author.toy.workspace().journal.exists()
    monkeypatch.undo()
    assert len(author.export()) == 3


class Killed(BaseException):
    """Stands for kill -9: nothing may be cleaned up on its way."""


@pytest.mark.parametrize("reached", range(1, 6))
def test_an_export_that_is_killed_is_finished_by_the_next_verb(
    author: Author, monkeypatch: pytest.MonkeyPatch, reached: int
) -> None:
    author.write(MODEL, "line_5 = 55\n", "line_5 = 555\n")
    author.fixup("model: change an early line")
    author.write(OPTIMIZER, "rate_9 = 9\n", "rate_9 = 99\n")
    author.commit("optimizer: change a rate", OPTIMIZER)
    apply = transaction._apply
    calls = 0

    def killed(changes: dict[Path, bytes | None]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            apply(dict(list(changes.items())[:reached]))
            (author.toy.patches / ".series.new").write_text("half")
        raise Killed

    monkeypatch.setattr(transaction, "_apply", killed)
    with pytest.raises(Killed):
        author.export()
    monkeypatch.undo()

    transaction.recover(author.toy.root / "work" / "journal")

    assert author.export() == []
    assert author.names()[-1] == "0004-optimizer-change-a-rate.patch"
    assert not list(author.toy.patches.glob(".*"))
    assert not (author.toy.root / "work" / "journal").exists()
