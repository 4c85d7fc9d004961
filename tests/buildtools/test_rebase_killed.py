"""A rebase that is killed, or cannot write, at any point goes on where it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import buildtools.rebase as rebases
from buildtools import transaction
from buildtools.console import BuildError
from buildtools.pin import read_pin
from buildtools.rebase import Rebase, Stopped
from buildtools.report import ADAPTED, UNCHANGED
from tests.buildtools.mover import (
    CONFLICTING,
    EARLY,
    LATE,
    MOVED,
    UPSTREAMED,
    Mover,
    fates,
    finished,
)
from tests.buildtools.toy import MODEL, Toy


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
    finished(clean.begin(UPSTREAMED))
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
        finished(mover.go_on())
    elif mover.toy.contents() == before:
        finished(mover.begin(UPSTREAMED))

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

    assert fates(mover.go_on()) == [UNCHANGED, ADAPTED, UNCHANGED]
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
    assert finished(mover.go_on()).report is None
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
    finished(mover.go_on())
