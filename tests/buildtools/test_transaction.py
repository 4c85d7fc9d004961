"""Several files change as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from buildtools.console import BuildError
from buildtools.paths import ROOT
from buildtools.transaction import exclusive, recover, replace_all


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "work" / "journal"


def test_files_are_written_made_and_removed(tmp_path: Path, journal: Path) -> None:
    old, gone, same, new = (tmp_path / name for name in ("old", "gone", "same", "new"))
    for path in (old, gone, same):
        path.write_bytes(b"1")
    stamp = same.stat().st_mtime_ns

    changed = replace_all({old: b"2", gone: None, same: b"1", new: b"3"}, journal)

    assert changed == [old, gone, new]
    assert (old.read_bytes(), gone.exists(), new.read_bytes()) == (b"2", False, b"3")
    assert same.stat().st_mtime_ns == stamp
    assert not journal.exists()


def test_nothing_to_change_writes_nothing(tmp_path: Path, journal: Path) -> None:
    assert replace_all({tmp_path / "none": None}, journal) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]


def test_an_error_takes_back_what_was_made(tmp_path: Path, journal: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"1")
    blocked = tmp_path / "blocked"
    blocked.mkdir()

    with pytest.raises(OSError):
        replace_all({old: b"2", new: b"3", blocked / "x" / "y": b"4", old / "z": b"5"}, journal)

    assert old.read_bytes() == b"1"
    assert not new.exists() and not journal.exists()
    assert list(tmp_path.glob(".*")) == []


def test_a_journal_that_cannot_be_read_is_no_permission_to_go_on(
    tmp_path: Path, journal: Path
) -> None:
    journal.mkdir(parents=True)
    (journal / "plan.json").write_text("{")

    with pytest.raises(BuildError, match="cannot finish the change it describes"):
        recover(journal)
    with pytest.raises(BuildError, match="cannot finish the change it describes"):
        replace_all({tmp_path / "x": b"1"}, journal)

    assert not (tmp_path / "x").exists()


HOLD = """
import sys
from pathlib import Path
from buildtools.transaction import exclusive
with exclusive(Path(sys.argv[1]), "rebase"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_at_a_time_and_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    name = tmp_path / "work" / "series"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(name)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"

    message = rf"build\.py rebase \(process {holder.pid}\) is at work here: let it end"
    with pytest.raises(BuildError, match=message), exclusive(name, "edit", wait=False):
        pass
    holder.kill()
    holder.communicate()
    with exclusive(name, "edit", wait=False):
        note = name.with_name("series.lock").read_text()
        assert note == f"build.py edit (process {os.getpid()})", "and nothing of the one before"
    assert name.with_name("series.lock").read_text() == ""


def test_without_a_journal_there_is_nothing_to_recover(journal: Path) -> None:
    recover(journal)

    assert not journal.parent.exists()
