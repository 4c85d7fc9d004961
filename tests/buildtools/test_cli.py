"""The command line: statuses, refusals, and verbs that leave nothing they should not."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildtools.paths import cache_dir, scratch_dir, swap_in
from tests.buildtools.command import build_py


def test_check_passes_on_this_repository() -> None:
    done = build_py("check")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OK: 0.19.2+nvme.1: ")


def test_check_needs_no_git(tmp_path: Path) -> None:
    done = build_py("check", PATH=str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert "warning: git was not found" in done.stderr


def test_tree_needs_git_or_the_other_engine(tmp_path: Path) -> None:
    done = build_py("tree", "--output", str(tmp_path / "tree"), PATH=str(tmp_path))

    assert done.returncode == 1
    assert "git was not found: install it, or use --engine python-patch" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_tree_does_not_replace_a_directory_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")

    done = build_py("tree", "--output", str(tmp_path))

    assert done.returncode == 1
    assert "exists; name a directory that does not" in done.stderr
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("arguments", [["frobnicate"], [], ["tree", "--engine", "sed"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert build_py(*arguments).returncode == 2


def test_offline_without_a_cache_says_what_to_do(tmp_path: Path) -> None:
    done = build_py("fetch", "--offline", MEGATRON_NVME_CACHE=str(tmp_path))

    assert done.returncode == 1
    assert "not in the cache" in done.stderr and "run `build.py fetch` online" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_cache_can_be_put_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGATRON_NVME_CACHE", str(tmp_path / "a"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("MEGATRON_NVME_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "b" / "megatron-nvme"


def test_scratch_is_gone_after_an_error_and_swap_leaves_no_trash(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), scratch_dir(tmp_path) as scratch:
        (scratch / "x").write_text("x")
        raise RuntimeError
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "x").write_text("x")
    swap_in(tmp_path / "new", tmp_path / "old")

    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "x").exists()


def test_a_swap_that_fails_restores_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "precious").write_text("x")

    with pytest.raises(OSError):
        swap_in(tmp_path / "never-made", tmp_path / "old")

    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "precious").exists()


@pytest.mark.parametrize("arguments", [["tree", "--output", ""], ["wheel", "--output", ""]])
def test_an_empty_output_is_refused(arguments: list[str]) -> None:
    done = build_py(*arguments)

    assert done.returncode == 1
    assert "--output is empty" in done.stderr


def test_an_os_error_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    done = build_py("fetch", MEGATRON_NVME_CACHE=str(tmp_path / "file"))

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
