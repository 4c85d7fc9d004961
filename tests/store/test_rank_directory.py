"""Live runs never share or lose a directory, dead ones leave nothing behind (invariant 8)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store import rank_directory
from megatron.core.optimizer.nvme_state_store.errors import DirectoryError
from megatron.core.optimizer.nvme_state_store.rank_directory import RankDirectory

from tests.store.failing_file import PATIENCE_S, missing_ability, small_tmpfs, start_process

MIB = 1 << 20

HOLD = """
directory = RankDirectory.acquire(Path(sys.argv[1]), 'rank0')
fd = os.open(directory.path / 'state.bin', os.O_CREAT | os.O_RDWR)
os.posix_fallocate(fd, 0, 1 << 20)
print(directory.path, directory.reclaimed_bytes, flush=True)
"""
"""Acquires a directory below argv[1], puts a file of 1 MiB there, and says where."""
WAIT = "sys.stdin.read()\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "base"


@contextlib.contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    running = start_process(script, *arguments)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def announced(running: subprocess.Popen[str]) -> Path:
    """Wait until a process that runs `HOLD` has its directory."""
    assert running.stdout is not None
    line = running.stdout.readline().split()
    assert line, running.communicate()[1]
    return Path(line[0])


def leave_behind(base: Path) -> Path:
    """Let a process die by kill -9 while it has a directory, and return that."""
    with process(HOLD + WAIT, base) as running:
        path = announced(running)
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert (path / "state.bin").exists()
    return path


def lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def visible(base: Path) -> list[str]:
    return sorted(entry.name for entry in base.iterdir() if not entry.name.startswith("."))


# A directory of one's own


def test_a_directory_is_private_and_locked(base: Path) -> None:
    with RankDirectory.acquire(base, "rank0") as directory:
        assert directory.path.parent == base
        assert directory.path.name.startswith(f"rank0-{os.getpid()}-")
        assert base.stat().st_mode & 0o777 == 0o700
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert not list(directory.path.iterdir())
        assert directory.reclaimed_bytes == 0
        with lock_of(directory.path).open("r+") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_release_removes_everything_of_it_and_may_be_repeated(base: Path) -> None:
    directory = RankDirectory.acquire(base, "rank0")
    (directory.path / "deep").mkdir()
    (directory.path / "deep" / "state.bin").write_bytes(b"x")

    directory.release()
    directory.release()

    assert not visible(base)


def test_stores_of_one_process_leave_each_other_alone(base: Path) -> None:
    with RankDirectory.acquire(base, "rank0") as one, RankDirectory.acquire(base, "rank0") as two:
        assert one.path != two.path
        assert one.path.is_dir()
        assert two.reclaimed_bytes == 0


def test_no_descriptor_is_left_open(base: Path) -> None:
    leave_behind(base)
    before = len(list(Path("/proc/self/fd").iterdir()))

    RankDirectory.acquire(base, "rank0").release()

    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("label", ["", ".hidden", "-x", "a/b", "a b", "..", "x" * 101, "a\n"])
def test_labels_that_are_no_names_are_refused(label: str, base: Path) -> None:
    with pytest.raises(ValueError, match="label"):
        RankDirectory.acquire(base, label)
    assert not base.exists()


def test_the_working_directory_may_change(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = RankDirectory.acquire(Path("base"), "rank0")
    monkeypatch.chdir("/")

    directory.release()

    assert not visible(base)


def test_a_base_may_be_a_symlink(base: Path, tmp_path: Path) -> None:
    base.mkdir()
    (tmp_path / "link").symlink_to(base)
    leave_behind(base)

    with RankDirectory.acquire(tmp_path / "link", "rank0") as directory:
        assert directory.path.parent == base
        assert directory.reclaimed_bytes == MIB


# The dead


def test_what_a_killed_run_left_is_reclaimed(base: Path) -> None:
    path = leave_behind(base)
    (path / "link").symlink_to(Path(__file__))

    with RankDirectory.acquire(base, "rank7") as directory:
        assert directory.reclaimed_bytes == MIB
        assert visible(base) == [directory.path.name, directory.path.name + ".lock"]
    assert Path(__file__).exists()


def test_a_live_process_keeps_its_directory(base: Path) -> None:
    with process(HOLD + WAIT, base) as running:
        path = announced(running)

        with RankDirectory.acquire(base, "rank0") as directory:
            assert directory.reclaimed_bytes == 0
            assert directory.path != path
        assert (path / "state.bin").stat().st_size == MIB

        running.communicate(input="")
    assert not visible(base)


def test_processes_that_start_together_reclaim_once_and_keep_apart(base: Path) -> None:
    with contextlib.ExitStack() as dead:
        for each in [dead.enter_context(process(HOLD + WAIT, base)) for _ in range(3)]:
            announced(each)  # all live before the first one is killed
    assert len(visible(base)) == 6
    with contextlib.ExitStack() as stack:
        script = "sys.stdin.readline()\n" + HOLD + WAIT
        running = [stack.enter_context(process(script, base)) for _ in range(6)]
        for each in running:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        told = [each.stdout.readline().split() for each in running if each.stdout is not None]

        assert len({path for path, _ in told}) == 6
        assert all((Path(path) / "state.bin").exists() for path, _ in told)
        assert sum(int(nbytes) for _, nbytes in told) == 3 * MIB
        assert len(visible(base)) == 12


def test_starts_and_ends_do_not_disturb_each_other(base: Path) -> None:
    def come_and_go(number: int) -> int:
        reclaimed = 0
        for _ in range(20):
            with RankDirectory.acquire(base, f"rank{number}") as directory:
                (directory.path / "state.bin").write_bytes(b"x")
                assert lock_of(directory.path).exists()
                reclaimed += directory.reclaimed_bytes
        return reclaimed

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(come_and_go, range(4))) == 0
    assert not visible(base)


def test_a_start_waits_for_another_that_is_reclaiming(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it finds the space free."""
    base.mkdir()
    is_waiting = threading.Event()
    sleep = time.sleep

    def told(seconds: float) -> None:
        is_waiting.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", told)
    with (
        ThreadPoolExecutor(1) as pool,
        (base / f".state-store-{os.geteuid()}.lock").open("w") as other,
    ):
        fcntl.flock(other, fcntl.LOCK_EX)
        starting = pool.submit(RankDirectory.acquire, base, "rank0")
        assert is_waiting.wait(PATIENCE_S)
        assert not visible(base)
        other.close()
        starting.result(PATIENCE_S).release()


def test_a_start_does_not_wait_for_ever(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.mkdir()
    monkeypatch.setattr(rank_directory, "BASE_LOCK_TIMEOUT_S", 0.0)
    with (base / f".state-store-{os.geteuid()}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DirectoryError, match="another process has held the lock"):
            RankDirectory.acquire(base, "rank0")


def test_a_run_that_died_before_its_directory_existed_leaves_nothing(base: Path) -> None:
    base.mkdir()
    (base / "rank0-1-0123456789abcdef.lock").touch()

    with RankDirectory.acquire(base, "rank0") as directory:
        assert len(visible(base)) == 2
        assert directory.reclaimed_bytes == 0


def test_what_is_not_ours_is_left_alone(base: Path, tmp_path: Path) -> None:
    dead = leave_behind(base)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    foreign = [base / "notes.txt", base / "x.lock", base / "rank0-1-0123456789abcdef"]
    foreign[0].write_text("x")
    foreign[1].write_text("x")
    foreign[2].symlink_to(outside)
    (base / "data").mkdir()
    (base / "data" / "x").write_text("x")
    # A lock with another content, a symlink to a lock, and a lock whose directory is a symlink.
    other, link, theirs = (base / f"rank0-{n}-0123456789abcdef" for n in (2, 3, 4))
    other.mkdir()
    lock_of(other).write_text("some other program\n")
    link.mkdir()
    shutil.copy(lock_of(dead), outside / "lock")
    lock_of(link).symlink_to(outside / "lock")
    theirs.symlink_to(outside)
    shutil.copy(lock_of(dead), lock_of(theirs))
    expected = set(visible(base)) - {dead.name, lock_of(dead).name}

    RankDirectory.acquire(base, "rank0").release()

    assert set(visible(base)) == expected
    assert (outside / "precious").read_text() == "x"
    assert (base / "data" / "x").exists()


def test_another_users_leftovers_are_left_alone(base: Path) -> None:
    """Root could remove them."""
    if os.geteuid() != 0:
        missing_ability("only root can give a file away")
    path = leave_behind(base)
    os.chown(lock_of(path), 65534, 65534)

    RankDirectory.acquire(base, "rank0").release()

    assert (path / "state.bin").exists()


def test_a_directory_that_lost_its_lock_file_is_reported_and_kept(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with process(HOLD + WAIT, base) as running:
        path = announced(running)
        lock_of(path).unlink()

        RankDirectory.acquire(base, "rank0").release()

        assert (path / "state.bin").exists()
    assert f"{path} has no lock file" in caplog.text


@pytest.mark.parametrize(("filesystem", "is_kept"), [("lustre", True), ("ext4", False)])
def test_another_boots_leftovers_stay_where_flock_may_not_reach(
    filesystem: str,
    is_kept: bool,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = leave_behind(base)
    monkeypatch.setattr(rank_directory, "_boot_id", lambda: "another")
    monkeypatch.setattr(rank_directory, "_filesystem_type", lambda path: filesystem)

    RankDirectory.acquire(base, "rank0").release()

    assert path.exists() == lock_of(path).exists() == is_kept
    assert ("may be shared" in caplog.text) == is_kept


def test_this_boots_leftovers_are_reclaimed_on_any_filesystem(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = leave_behind(base)
    monkeypatch.setattr(rank_directory, "_filesystem_type", lambda path: "lustre")

    RankDirectory.acquire(base, "rank0").release()

    assert not path.exists()


def test_leftovers_that_cannot_be_removed_stop_nobody(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = leave_behind(base)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        with RankDirectory.acquire(base, "rank0") as directory:
            assert directory.reclaimed_bytes == 0
            patched.undo()
    assert lock_of(path).exists()
    assert "could not be removed" in caplog.text

    with RankDirectory.acquire(base, "rank0") as directory:
        assert directory.reclaimed_bytes == MIB


def refuse(*arguments: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), *arguments)


# Ends


@pytest.mark.parametrize(
    ("end", "is_removed"),
    [
        ("pass", True),
        ("sys.exit(3)", True),
        ("raise ValueError('unhandled')", True),
        ("os._exit(0)", False),
    ],
)
def test_every_ordinary_end_removes_the_directory(end: str, is_removed: bool, base: Path) -> None:
    with process(HOLD + end, base) as running:
        path = announced(running)
        running.communicate()
    assert path.exists() != is_removed

    with RankDirectory.acquire(base, "rank0") as directory:
        assert directory.reclaimed_bytes == (0 if is_removed else MIB)


WORKER = """
import multiprocessing

def work(base):
    directory = RankDirectory.acquire(Path(base), 'rank0')
    (directory.path / 'state.bin').write_bytes(b'x')
    print(directory.path, flush=True)

RankDirectory.acquire(Path(sys.argv[1]), 'parent').release()
worker = multiprocessing.get_context('fork').Process(target=work, args=(sys.argv[1],))
worker.start()
worker.join()
"""


def test_the_end_of_a_multiprocessing_worker_removes_its_directory(base: Path) -> None:
    """Such a process runs no `atexit`, and inherits a parent that had registered already."""
    with process(WORKER, base) as running:
        path = announced(running)
        running.communicate()

    assert path.parent == base
    assert not path.exists()


FORK = """
directory.release() if sys.argv[2] == 'before' else None
child = os.fork()
if child == 0:
    if sys.argv[2] == 'release':
        directory.release()
    sys.exit(0)
os.waitpid(child, 0)
print(directory.path.exists(), flush=True)
other = RankDirectory.acquire(Path(sys.argv[1]), 'rank1')
print(directory.path.exists(), other.reclaimed_bytes, flush=True)
"""


@pytest.mark.parametrize("way", ["exit", "release"])
def test_a_forked_child_keeps_its_parents_directory(way: str, base: Path) -> None:
    """Neither its exit nor a release in it removes or unlocks anything."""
    with process(HOLD + FORK, base, way) as running:
        announced(running)
        out, err = running.communicate()

    assert out.split() == ["True", "True", "0"], err
    assert not visible(base)


def test_a_child_of_a_fork_that_python_did_not_see_removes_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RankDirectory.acquire(base, "rank0") as directory:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            directory.release()
        assert directory.path.exists()
    assert not visible(base)


def test_an_orphaned_child_does_not_keep_the_lock_of_a_killed_parent(base: Path) -> None:
    script = HOLD + "child = os.fork()\nprint(child, flush=True)\n" + WAIT
    with process(script, base) as running:
        path = announced(running)
        assert running.stdout is not None
        child = max(int(running.stdout.readline()) for _ in range(2))
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        os.kill(child, 0)  # it lives

        with RankDirectory.acquire(base, "rank0") as directory:
            assert directory.reclaimed_bytes == MIB
        os.kill(child, signal.SIGKILL)
    assert not path.exists()


def test_a_program_started_by_a_killed_parent_does_not_keep_the_lock(base: Path) -> None:
    script = HOLD + (
        "import subprocess\n"
        "started = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "print(started.pid, flush=True)\n" + WAIT
    )
    with process(script, base) as running:
        announced(running)
        assert running.stdout is not None
        started = int(running.stdout.readline())
        running.send_signal(signal.SIGKILL)
        running.wait()
        try:
            with RankDirectory.acquire(base, "rank0") as directory:
                assert directory.reclaimed_bytes == MIB
        finally:
            os.kill(started, signal.SIGKILL)


def test_a_directory_removed_behind_our_back_is_no_error(base: Path) -> None:
    directory = RankDirectory.acquire(base, "rank0")
    shutil.rmtree(base)

    directory.release()


def test_a_directory_that_cannot_be_removed_is_named_and_taken_by_the_next(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RankDirectory.acquire(base, "rank0")
    (directory.path / "state.bin").write_bytes(bytes(4096))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        with pytest.raises(DirectoryError, match="cannot be removed") as caught:
            directory.release()
    assert (caught.value.path, caught.value.errno) == (directory.path, errno.EIO)
    directory.release()

    with RankDirectory.acquire(base, "rank0") as again:
        assert again.reclaimed_bytes == 4096


# Bases that will not do


def the_error(base: Path) -> DirectoryError:
    with pytest.raises(DirectoryError) as caught:
        RankDirectory.acquire(base, "rank0")
    assert str(base) in str(caught.value)
    assert "--stream-optimizer-state-dir" in str(caught.value)
    return caught.value


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")

    assert the_error(tmp_path / "file").errno == errno.EEXIST
    assert the_error(tmp_path / "file" / "base").errno == errno.ENOTDIR
    assert the_error(tmp_path / "dangling").errno == errno.EEXIST
    assert (tmp_path / "file").exists()


def test_a_read_only_filesystem_is_named(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "ro") as small:
        for base in (small, small / "base"):
            error = the_error(base)
            assert error.errno == errno.EROFS
            assert "mount the filesystem writable" in str(error)


def test_a_base_without_write_permission_is_named(base: Path) -> None:
    base.mkdir(mode=0o500)
    script = (
        "os.setuid(65534) if os.geteuid() == 0 else None\n"
        "from nvme_state_store.errors import DirectoryError\n"
        "try:\n"
        "    RankDirectory.acquire(Path('.'), 'rank0')\n"
        "except DirectoryError as error:\n"
        "    print(error.errno, error)\n"
    )
    with process(f"os.chdir({str(base)!r})\n{script}") as running:
        out, err = running.communicate()
    assert out.startswith(f"{errno.EACCES} .: cannot be used"), out + err
    assert "give this user write permission" in out


def test_a_full_filesystem_is_named_and_nothing_half_made_stays(tmp_path: Path) -> None:
    """Three inodes: the root, the base's lock, the directory's lock, and none for the directory."""
    with small_tmpfs(tmp_path / "small", "size=4m,nr_inodes=3") as small:
        error = the_error(small)
        assert error.errno == errno.ENOSPC
        assert "free some space" in str(error)
        assert not visible(small)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_filesystem_without_locks_is_refused(
    number: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)

    error = the_error(base)

    assert error.errno == number
    assert "lock" in str(error)
    assert not visible(base)
