"""A rebase is resumable, writes everything or nothing, and says what became of every patch."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import buildtools.rebase as rebases
from buildtools import transaction
from buildtools.apply import PythonEngine
from buildtools.authoring import new_patch, open_edit
from buildtools.console import BuildError
from buildtools.dropped import read_dropped
from buildtools.edittree import EditTree
from buildtools.pin import read_pin
from buildtools.rebase import Finished, Rebase, Stopped
from buildtools.releases import Shop
from buildtools.report import ADAPTED, EMPTY, REPLACED, UNCHANGED
from buildtools.series import load_patches
from buildtools.status import status
from buildtools.tree import assemble
from tests.buildtools.toy import EDITS, FILES, MODEL, PACKAGE_INFO, Toy, make_toy, write_files

EARLY = "0002-model-change-an-early-line.patch"
LATE = "0003-model-change-a-late-line.patch"
NEXT = FILES | {PACKAGE_INFO: FILES[PACKAGE_INFO].replace("PATCH = 3", "PATCH = 4")}
MOVED = {MODEL: "first = 0\n" + FILES[MODEL]}
UPSTREAMED = {MODEL: FILES[MODEL].replace("line_5 = 5\n", "line_5 = 55\n")}
CONFLICTING = {MODEL: FILES[MODEL].replace("line_5 = 5\n", "line_5 = 6\n")}


class Mover:
    """Somebody who moves the toy to another upstream."""

    def __init__(self, toy: Toy, root: Path) -> None:
        self.toy = toy
        self.root = root

    @property
    def rebase(self) -> Rebase:
        return Rebase(self.toy.workspace())

    @property
    def tree(self) -> Path:
        return self.toy.workspace().rebase / "tree"

    def upstream(self, changes: dict[str, str]) -> Path:
        root = self.root / "upstream"
        shutil.rmtree(root, ignore_errors=True)
        return write_files(root, NEXT | changes)

    def begin(self, changes: dict[str, str], report: Path | None = None) -> Stopped | Finished:
        shop = Shop(self.toy.root / "cache", self.toy.download, None)
        return self.rebase.begin(str(self.upstream(changes)), shop, report)

    def go_on(self, because: str | None = None) -> Stopped | Finished:
        return self.rebase.go_on(because, None)

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.tree, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def resolve(self, path: str = MODEL, *, value: str = "line_5 = 65\n") -> None:
        """Take our side of every conflict in a file, with a value of its own, and add it."""
        lines, keep = [], True
        for line in (self.tree / path).read_text().splitlines(keepends=True):
            if line.startswith(("<<<<<<< ", "||||||| ")):
                keep = False
            elif line.startswith("======="):
                lines.append(value)
            elif line.startswith(">>>>>>> "):
                keep = True
            elif keep:
                lines.append(line)
        (self.tree / path).write_text("".join(lines))
        self.git("add", path)

    def assembled(self) -> Path:
        """Return the tree that the rebased series makes of the new upstream."""
        workspace = self.toy.workspace()
        source = replace(workspace.recipe.source, kind="path", path=self.root / "upstream")
        destination = self.root / "assembled"
        shutil.rmtree(destination, ignore_errors=True)
        recipe = replace(workspace.recipe, source=source)
        assemble(recipe, PythonEngine(), destination, locked=False)
        return destination


@pytest.fixture
def mover(toy: Toy, tmp_path: Path) -> Mover:
    toy.write_pin()
    return Mover(toy, tmp_path / "mover")


def _finished(result: Stopped | Finished) -> Finished:
    assert isinstance(result, Finished), result
    return result


def _fates(result: Stopped | Finished) -> list[str]:
    report = _finished(result).report
    assert report is not None
    return [patch.fate for patch in report.patches]


# --------------------------------------------------------------------------------- what comes out


def test_a_clean_rebase_writes_the_series_and_the_pin_at_once(mover: Mover) -> None:
    result = _finished(mover.begin(MOVED))

    assert _fates(result) == [UNCHANGED, REPLACED, REPLACED]
    assert sorted(path.name for path in result.changed) == [
        "0001-info-label-the-build.patch", EARLY, LATE, "upstream.toml",
    ]  # fmt: skip
    model = (mover.assembled() / MODEL).read_text()
    assert "line_5 = 55\n" in model and "added = True" in model and model.startswith("first")
    assert not mover.toy.workspace().rebase.exists()


def test_the_pin_says_what_is_known_and_leaves_the_rest_empty(mover: Mover) -> None:
    before = mover.toy.pin_file.read_text()
    mover.begin(MOVED)

    pin = read_pin(mover.toy.pin_file)
    assert (pin.version, pin.sdist, pin.git_ref) == ("1.2.4", "toy-1.2.4.tar.gz", "v1.2.4")
    assert (pin.sdist_sha256, pin.published_sha256, pin.git_commit) == ("", "", "")
    assert pin.releases == {"1.2.3": mover.toy.pin.sdist_sha256}
    assert pin.lock.pristine != mover.toy.pin.lock.pristine
    changed = {a for a, b in zip(before.splitlines(), mover.toy.pin_file.read_text().splitlines(),
                                 strict=False) if a != b}  # fmt: skip
    assert "# a toy" not in changed and "revision = 1" not in changed
    with pytest.raises(BuildError, match=r"\[source.index\] sha256 is empty"):
        mover.toy.workspace().history(mover.root / "history")


def test_a_rebase_onto_the_same_content_changes_no_byte(mover: Mover) -> None:
    before = mover.toy.contents()
    shop = Shop(mover.toy.root / "cache", mover.toy.download, None)

    for same in (str(mover.toy.sdist), "1.2.3", str(write_files(mover.root / "same", FILES))):
        result = _finished(mover.rebase.begin(same, shop, None))

        assert _fates(result) == [UNCHANGED] * 3
        assert result.changed == []
        assert mover.toy.contents() == before


def test_an_archive_gives_its_hash_and_joins_the_known_releases(mover: Mover) -> None:
    from buildtools.archive import sha256_of
    from tests.buildtools.toy import sdist_members, write_archive

    archive = write_archive(mover.root / "toy-1.2.4.tar.gz", sdist_members(NEXT | MOVED))
    shop = Shop(mover.toy.root / "cache", mover.toy.download, None)

    mover.rebase.begin(str(archive), shop, None)

    pin = read_pin(mover.toy.pin_file)
    assert pin.sdist_sha256 == sha256_of(archive) == pin.releases["1.2.4"]


def test_a_patch_that_upstream_has_is_dropped_and_recorded(mover: Mover) -> None:
    result = mover.begin(UPSTREAMED)

    assert _fates(result) == [UNCHANGED, EMPTY, UNCHANGED]
    assert [patch.name for patch in load_patches(mover.toy.patches)] == [
        "0001-info-label-the-build.patch",
        LATE,
    ]
    (entry,) = read_dropped(mover.toy.patches)
    assert (entry.patch, entry.upstream) == (EARLY, "1.2.4")
    assert entry.reason == "upstream 1.2.4 has it"


def test_nothing_is_written_if_nothing_would_be_left(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", edits=EDITS[1:2])
    mover = Mover(toy, tmp_path / "mover")
    toy.write_pin()
    before = toy.contents()

    with pytest.raises(BuildError, match="nothing would be left of the series"):
        mover.begin(UPSTREAMED)

    assert toy.contents() == before
    mover.rebase.abort()


def test_authors_and_messages_survive(mover: Mover) -> None:
    text = mover.toy.patch_path(2).read_text()
    mover.toy.patch_path(2).write_text(
        text.replace("From: megatron-nvme <megatron-nvme@localhost>",
                     "From: =?UTF-8?q?J=C3=BCrgen=20Gro=C3=9F?= <j@example.org>")
        .replace("Thu, 1 Jan 1970 00:00:00 +0000", "Tue, 14 Nov 2023 22:13:20 +0530")
    )  # fmt: skip
    head = mover.toy.patch_path(2).read_text().partition("diff --git")[0]

    mover.begin(MOVED)

    assert mover.toy.patch_path(2).read_text().partition("diff --git")[0] == head


# ---------------------------------------------------------------------------------- a conflict


def test_a_conflict_shows_both_sides_and_leaves_the_series_alone(mover: Mover) -> None:
    before = mover.toy.contents()

    stopped = mover.begin(CONFLICTING)

    assert isinstance(stopped, Stopped)
    assert stopped.patch.name == EARLY
    assert stopped.files == [f"{MODEL}: both changed the same lines"]
    assert stopped.tree == mover.tree
    (sides,) = stopped.sides
    for line in ("line_5 = 6\n", "line_5 = 5\n", "line_5 = 55\n"):
        assert line in sides
    assert mover.toy.contents() == before
    found = status(mover.toy.workspace(), EditTree(mover.toy.workspace().edit))
    assert found.unexported
    assert "rebase to 1.2.4: 1 of 3 patches are done" in "\n".join(found.lines)


def _by_add(mover: Mover) -> None:
    mover.resolve()


def _by_commit(mover: Mover) -> None:
    mover.resolve()
    mover.git("-c", "core.editor=true", "commit", "--quiet")


def _by_cherry_pick(mover: Mover) -> None:
    mover.resolve()
    mover.git("-c", "core.editor=true", "cherry-pick", "--continue")


@pytest.mark.parametrize("resolve", [_by_add, _by_commit, _by_cherry_pick])
def test_a_resolution_is_taken_and_the_rest_follows(
    mover: Mover, resolve: Callable[[Mover], None]
) -> None:
    mover.begin(CONFLICTING)
    head = mover.toy.patch_path(2).read_text().partition("diff --git")[0]
    resolve(mover)

    result = mover.go_on()

    assert _fates(result) == [UNCHANGED, ADAPTED, UNCHANGED]
    assert "+line_5 = 65" in mover.toy.patch_path(2).read_text()
    assert mover.toy.patch_path(2).read_text().partition("diff --git")[0] == head
    assert "line_5 = 65\n" in (mover.assembled() / MODEL).read_text()


def _unmerged(mover: Mover) -> None:
    del mover


def _markers(mover: Mover) -> None:
    mover.git("add", MODEL)


def _markers_committed(mover: Mover) -> None:
    mover.git("add", MODEL)
    mover.git("-c", "core.editor=true", "commit", "--quiet")


def _not_added(mover: Mover) -> None:
    mover.resolve()
    (mover.tree / MODEL).write_text((mover.tree / MODEL).read_text() + "more = 1\n")


def _untracked(mover: Mover) -> None:
    mover.resolve()
    write_files(mover.tree, {"model.py.orig": "x"})


def _creation(mover: Mover) -> None:
    mover.resolve()
    write_files(mover.tree, {"megatron/core/new.py": "x = 1\n"})
    mover.git("add", "--all")


def _two_commits(mover: Mover) -> None:
    _by_commit(mover)
    mover.git("commit", "--quiet", "--allow-empty", "-m", "more")


def _nothing_left(mover: Mover) -> None:
    mover.git("checkout", "--quiet", "HEAD", "--", MODEL)


def _given_up(mover: Mover) -> None:
    mover.git("cherry-pick", "--abort")


UNRESOLVED: dict[Callable[[Mover], None], str] = {
    _unmerged: f"{MODEL}: not resolved: both changed the same lines\n.*conflict markers are left",
    _markers: f"{MODEL}: conflict markers are left",
    _markers_committed: f"{MODEL}: conflict markers are left",
    _not_added: f"{MODEL}: not added",
    _untracked: r"model\.py\.orig: not added",
    _creation: "creates a file",
    _two_commits: "expected HEAD at .*, or one commit on it",
    _nothing_left: f"nothing is left of {EARLY}.*--because TEXT",
    _given_up: f"nothing is left of {EARLY}.*git cherry-pick",
}


@pytest.mark.parametrize("leave", UNRESOLVED, ids=lambda leave: leave.__name__.strip("_"))
def test_what_is_not_resolved_is_not_taken(mover: Mover, leave: Callable[[Mover], None]) -> None:
    before = mover.toy.contents()
    mover.begin(CONFLICTING)
    leave(mover)

    with pytest.raises(BuildError, match=UNRESOLVED[leave]):
        mover.go_on()

    assert mover.toy.contents() == before
    assert mover.rebase._load().waiting == EARLY


def test_a_resolution_that_leaves_nothing_needs_a_reason(mover: Mover) -> None:
    mover.begin(CONFLICTING)
    mover.git("checkout", "--quiet", "HEAD", "--", MODEL)

    assert _fates(mover.go_on("upstream does it otherwise")) == [UNCHANGED, EMPTY, UNCHANGED]

    assert read_dropped(mover.toy.patches)[0].reason == "upstream does it otherwise"


def test_a_reason_without_need_is_refused(mover: Mover) -> None:
    mover.begin(CONFLICTING)
    mover.resolve()

    with pytest.raises(BuildError, match="still changes something"):
        mover.go_on("because")


# ----------------------------------------------------------------------------- abort and refusals


def test_abort_leaves_all_as_it_was(mover: Mover) -> None:
    before = mover.toy.contents()
    mover.begin(CONFLICTING)
    mover.resolve()

    mover.rebase.abort()

    assert mover.toy.contents() == before
    assert not mover.toy.workspace().rebase.exists()
    assert isinstance(mover.begin(MOVED), Finished)


def test_without_a_rebase_there_is_nothing_to_continue_or_abort(mover: Mover) -> None:
    for verb in (mover.go_on, mover.rebase.abort):
        with pytest.raises(BuildError, match="no rebase is open"):
            verb()


def test_a_second_rebase_is_refused(mover: Mover) -> None:
    mover.begin(CONFLICTING)

    with pytest.raises(BuildError, match="a rebase is open in"):
        mover.begin(MOVED)


def test_unexported_work_is_not_left_behind(mover: Mover) -> None:
    workspace = mover.toy.workspace()
    tree = open_edit(workspace, workspace.edit, discard=False)
    write_files(tree.path, {MODEL: (tree.path / MODEL).read_text() + "more = 1\n"})
    new_patch(tree, "model: add more", None)

    with pytest.raises(BuildError, match="holds work that is not exported"):
        mover.begin(MOVED)


@pytest.mark.parametrize("victim", ["patch", "pin"])
def test_a_series_that_changed_meanwhile_is_not_overwritten(mover: Mover, victim: str) -> None:
    mover.begin(CONFLICTING)
    mover.resolve()
    path = mover.toy.patch_path(1) if victim == "patch" else mover.toy.pin_file
    path.write_text(path.read_text().replace("always on", "always off").replace("a toy", "mine"))

    with pytest.raises(BuildError, match="has changed since the rebase began"):
        mover.go_on()


def test_a_damaged_state_can_only_be_given_up(mover: Mover) -> None:
    mover.begin(CONFLICTING)
    state = mover.toy.workspace().rebase / "state.json"
    state.write_text(state.read_text()[:50])

    with pytest.raises(BuildError, match=r"cannot be read .*rebase --abort"):
        mover.go_on()

    assert status(mover.toy.workspace(), EditTree(mover.toy.workspace().edit)).unexported
    mover.rebase.abort()


def test_a_target_that_cannot_be_had_opens_nothing(mover: Mover) -> None:
    shop = Shop(mover.toy.root / "cache", mover.toy.download, None)

    with pytest.raises(BuildError, match="expected a version like"):
        mover.rebase.begin("nowhere", shop, None)

    work = mover.toy.workspace().work
    assert not mover.toy.workspace().rebase.exists()
    assert [path.name for path in work.iterdir()] == []


# ------------------------------------------------------------------------------------ kill -9


class Killed(BaseException):
    """Stands for kill -9: nothing that runs on its way may clean up."""


def _kill(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, at: int, *, after: bool) -> None:
    """Die at the ``at``-th call of a function, before or after it has done its work."""
    body = getattr(place, name)
    calls = 0

    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not after:
            raise Killed
        result = body(*arguments, **named)
        if calls == at:
            raise Killed
        return result

    monkeypatch.setattr(place, name, dying)


POINTS = [
    *((rebases, "save", at, after) for at in range(1, 5) for after in (False, True)),
    *((rebases, "pick", at, after) for at in range(1, 4) for after in (False, True)),
    *((rebases, "conclude", 1, after) for after in (False, True)),
    *((rebases, "replace_all", 1, after) for after in (False, True)),
    *((transaction, "_write_journal", 1, after) for after in (False, True)),
    (transaction, "_remove", 1, False),
    (transaction, "_remove", 1, True),
    (Rebase, "_remove", 1, False),
    (Rebase, "_remove", 1, True),
]


@pytest.mark.parametrize(
    ("place", "name", "at", "after"),
    POINTS,
    ids=[f"{'after' if after else 'before'} {name} {at}" for _, name, at, after in POINTS],
)
def test_a_killed_rebase_goes_on_where_it_was(
    mover: Mover, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, at: int, after: bool
) -> None:
    shutil.copytree(mover.toy.root, mover.root / "clean")
    clean = Mover(Toy(mover.root / "clean", mover.toy.pin), mover.root)
    _finished(clean.begin(UPSTREAMED))
    before = mover.toy.contents()
    with monkeypatch.context() as patch:
        _kill(patch, place, name, at, after=after)
        with pytest.raises(Killed):
            mover.begin(UPSTREAMED)

    transaction.recover(mover.toy.workspace().journal)  # every verb begins with it
    if mover.toy.workspace().rebase.exists():
        if not mover.rebase._load().written:
            assert mover.toy.contents() == before
        (mover.tree / ".git" / "index.lock").write_text("")
        _finished(mover.go_on())
    elif mover.toy.contents() == before:
        _finished(mover.begin(UPSTREAMED))

    assert list(mover.toy.contents().values()) == list(clean.toy.contents().values())
    assert not mover.toy.workspace().rebase.exists()


@pytest.mark.parametrize("after", [False, True])
def test_a_conflict_that_nobody_has_been_told_of_comes_again(
    mover: Mover, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    with monkeypatch.context() as patch:
        _kill(patch, rebases, "pick", 2, after=after)
        with pytest.raises(Killed):
            mover.begin(CONFLICTING)

    stopped = mover.go_on()

    assert isinstance(stopped, Stopped)
    assert (stopped.patch.name, len(stopped.sides)) == (EARLY, 1)


@pytest.mark.parametrize(("at", "after"), [(1, False), (1, True), (2, False), (2, True)])
def test_a_resolution_survives(
    mover: Mover, monkeypatch: pytest.MonkeyPatch, at: int, after: bool
) -> None:
    mover.begin(CONFLICTING)
    mover.resolve()
    with monkeypatch.context() as patch:
        _kill(patch, rebases, "save", at, after=after)
        with pytest.raises(Killed):
            mover.go_on()

    assert _fates(mover.go_on()) == [UNCHANGED, ADAPTED, UNCHANGED]
    assert "+line_5 = 65" in mover.toy.patch_path(2).read_text()


@pytest.mark.parametrize("reached", range(1, 6))
def test_half_a_write_is_finished_by_the_next_verb(
    mover: Mover, monkeypatch: pytest.MonkeyPatch, reached: int
) -> None:
    apply = transaction._apply

    def killed(changes: dict[Path, bytes | None]) -> None:
        apply(dict(list(changes.items())[:reached]))
        monkeypatch.setattr(transaction, "_apply", _die)
        raise Killed

    def _die(changes: dict[Path, bytes | None]) -> None:
        raise Killed

    monkeypatch.setattr(transaction, "_apply", killed)
    with pytest.raises(Killed):
        mover.begin(MOVED)
    monkeypatch.undo()

    transaction.recover(mover.toy.root / "work" / "journal")

    assert read_pin(mover.toy.pin_file).version == "1.2.4"
    assert "line_5 = 55\n" in (mover.assembled() / MODEL).read_text()
    with pytest.raises(BuildError, match="is written already"):
        mover.rebase.abort()
    assert _finished(mover.go_on()).report is None
    assert not mover.toy.workspace().rebase.exists()


def test_a_write_that_fails_leaves_everything_and_can_be_repeated(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mover.toy.contents()
    replace_path = Path.replace

    def full(path: Path, target: Path) -> Path:
        if Path(target).name == LATE:
            raise OSError("no space left on device")
        return replace_path(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="no space left"):
            mover.begin(MOVED)
        monkeypatch.undo()

    after = mover.toy.contents()
    assert {path: after[path] for path in before} == before
    _finished(mover.go_on())


# ------------------------------------------------------------------------------------ the report


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
    report = _finished(rebase.begin(str(mover.upstream(MOVED)), shop, None)).report

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
    _finished(mover.go_on())
    assert (tmp_path / "none" / "report.md").exists()


def test_a_hunk_in_another_symbol_is_written_and_loud(tmp_path: Path) -> None:
    body = "".join(f"    x{n} = {n}\n" for n in range(9))
    edits = [("model: change a line", MODEL, "x5 = 5", "x5 = 55")]
    toy = make_toy(tmp_path / "toy", FILES | {MODEL: f"def step():\n{body}"}, edits)
    toy.write_pin()
    mover = Mover(toy, tmp_path / "mover")

    report = _finished(mover.begin({MODEL: f"def other():\n{body}"})).report

    assert report is not None and not report.clean
    assert "a hunk of step now lies in other" in report.to_text()
    assert read_pin(toy.pin_file).version == "1.2.4"
