"""A rebase writes everything or nothing, and a conflict waits until it is resolved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from buildtools.authoring import new_patch, open_edit
from buildtools.console import BuildError
from buildtools.dropped import read_dropped
from buildtools.edittree import EditTree
from buildtools.pin import read_pin
from buildtools.rebase import Finished, Stopped
from buildtools.releases import Shop
from buildtools.report import ADAPTED, EMPTY, REPLACED, UNCHANGED
from buildtools.series import load_patches
from buildtools.status import status
from tests.buildtools.mover import (
    CONFLICTING,
    EARLY,
    LATE,
    MOVED,
    NEXT,
    UPSTREAMED,
    Mover,
    fates,
    finished,
)
from tests.buildtools.toy import EDITS, FILES, MODEL, make_toy, write_files

# --------------------------------------------------------------------------------- what comes out


def test_a_clean_rebase_writes_the_series_and_the_pin_at_once(mover: Mover) -> None:
    result = finished(mover.begin(MOVED))

    assert fates(result) == [UNCHANGED, REPLACED, REPLACED]
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
        result = finished(mover.rebase.begin(same, shop, None))

        assert fates(result) == [UNCHANGED] * 3
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

    assert fates(result) == [UNCHANGED, EMPTY, UNCHANGED]
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

    assert fates(result) == [UNCHANGED, ADAPTED, UNCHANGED]
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

    assert fates(mover.go_on("upstream does it otherwise")) == [UNCHANGED, EMPTY, UNCHANGED]

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
