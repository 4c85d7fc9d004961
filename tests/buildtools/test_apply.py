"""The series applies exactly, or not at all: each way to break it is refused in its own words."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from buildtools.apply import ENGINES, GitEngine, PythonEngine
from buildtools.archive import sha256_of
from buildtools.console import BuildError
from buildtools.git import Git
from buildtools.objects import entries_below
from buildtools.patchfile import Patch
from buildtools.tree import assemble
from buildtools.upstream import Source
from tests.buildtools.toy import FILES, MODEL, OPTIMIZER, Toy, write_files

BOTH_ENGINES = pytest.mark.parametrize("engine", sorted(ENGINES))


@BOTH_ENGINES
def test_a_sound_series_gives_the_locked_tree(toy: Toy, engine: str) -> None:
    assert toy.assemble(engine) == toy.pin.lock
    assert "added = True" in (toy.tree / MODEL).read_text()
    assert sorted(path.name for path in toy.tree.iterdir()) == ["megatron", "pyproject.toml"]


def _edit_added_line(toy: Toy) -> None:
    toy.rewrite(2, "+line_5 = 55", "+line_5 = 56")


def _edit_line_numbers(toy: Toy) -> None:
    toy.rewrite(2, "@@ -2,7 +2,7 @@", "@@ -3,7 +3,7 @@")


def _swap_blob_before(toy: Toy) -> None:
    text = toy.patch_path(1).read_text()
    before = text.split("index ")[1][:40]
    toy.rewrite(1, before, "1" * 40)


def _swap_blob_after(toy: Toy) -> None:
    text = toy.patch_path(3).read_text()
    after = text.split("index ")[1][42:82]
    toy.rewrite(3, after, "2" * 40)


def _missing_patch(toy: Toy) -> None:
    toy.patch_path(2).unlink()


def _unlisted_patch(toy: Toy) -> None:
    (toy.patches / "series").write_text("".join(f"{toy.patch_path(n).name}\n" for n in (1, 3)))


def _swapped_order(toy: Toy) -> None:
    (toy.patches / "series").write_text("".join(f"{toy.patch_path(n).name}\n" for n in (1, 3, 2)))


def _swapped_numbers(toy: Toy) -> None:
    second, third = toy.patch_path(2), toy.patch_path(3)
    late, early = second.read_text(), third.read_text()
    second.write_text(early)
    third.write_text(late)


def _truncated_patch(toy: Toy) -> None:
    path = toy.patch_path(3)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))


def _overlay_collision(toy: Toy) -> None:
    write_files(toy.overlay, {OPTIMIZER: "rate = 0\n"})


def _edited_overlay(toy: Toy) -> None:
    write_files(toy.overlay, {"megatron/core/extra/store.py": "x = 2\n"})


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("sabotage", "message"),
    [
        (_edit_added_line, "0002-model-change-an-early-line.patch: .*edited by hand: leaves blob"),
        (_edit_line_numbers, "edited by hand: line 3: expected 'line_2 = 2', got 'line_3 = 3'"),
        (_swap_blob_before, r"0001.*context changed \(blob .*, expected 1{40}\): the hunks still"),
        (_swap_blob_after, "0003.*edited by hand: leaves blob .*, its index line promises 2{40}"),
        (_missing_patch, "0002-model-change-an-early-line.patch: missing"),
        (_unlisted_patch, "0002-model-change-an-early-line.patch: unlisted"),
        (_swapped_order, "0002.*out of order: number 2 follows 3"),
        (_swapped_numbers, r"expects blob .*, but 0002.* leaves .*\(order swapped"),
        (_truncated_patch, "0003.*hunk at line 28 is truncated or its counts are wrong"),
        (_overlay_collision, "collides with upstream:\nmegatron/core/optimizer.py: upstream has"),
        (_edited_overlay, r"tree after megatron_overlay/: expected .*, got .*build.py pin"),
    ],
)
def test_sabotage_is_refused_and_the_tree_stays_untouched(
    toy: Toy, engine: str, sabotage: Callable[[Toy], None], message: str
) -> None:
    toy.assemble(engine)
    before = entries_below(toy.tree)
    sabotage(toy)

    with pytest.raises(BuildError, match=message):
        toy.assemble(engine)

    assert entries_below(toy.tree) == before
    assert [path.name for path in toy.tree.parent.iterdir()] == ["tree"]


def _drifted(toy: Toy, changes: dict[str, str | None], root: Path) -> Source:
    """Return a source directory that holds upstream with ``changes`` (None deletes)."""
    write_files(root, FILES | {path: text for path, text in changes.items() if text is not None})
    for path, text in changes.items():
        if text is None:
            (root / path).unlink()
    return Source("path", root)


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {MODEL: FILES[MODEL].replace("line_5 = 5\n", "line_5 = 55\n")},
            "0002.*already applied",
        ),
        (
            {MODEL: FILES[MODEL].replace("line_6 = 6\n", "line_6 = 66\n")},
            "0002.*context changed .*: line 6: expected 'line_6 = 6', got 'line_6 = 66'",
        ),
        ({MODEL: "first = 0\n" + FILES[MODEL]}, "0002.*line 2: expected 'line_2 = 2'"),
        ({MODEL: None}, "0002.*file gone"),
        (
            {MODEL: None, "megatron/core/models/gpt.py": FILES[MODEL]},
            "0002.*file renamed to megatron/core/models/gpt.py",
        ),
        (
            {MODEL: None, "megatron/core/models/model.py": "rewritten = 1\n"},
            r"0002.*file gone \(a file of that name is at megatron/core/models/model.py\)",
        ),
    ],
)
def test_drift_of_upstream_is_named(
    toy: Toy, tmp_path: Path, engine: str, changes: dict[str, str | None], message: str
) -> None:
    recipe = toy.recipe(source=_drifted(toy, changes, tmp_path / "drifted"))

    with pytest.raises(BuildError, match=message):
        assemble(recipe, ENGINES[engine](), toy.tree, locked=False)

    assert not toy.tree.exists()


@BOTH_ENGINES
def test_all_failures_are_reported_at_once(toy: Toy, tmp_path: Path, engine: str) -> None:
    changes: dict[str, str | None] = {
        "megatron/core/package_info.py": FILES["megatron/core/package_info.py"] + "MORE = 1\n",
        MODEL: None,
    }
    recipe = toy.recipe(source=_drifted(toy, changes, tmp_path / "drifted"))

    with pytest.raises(BuildError) as caught:
        assemble(recipe, ENGINES[engine](), toy.tree, locked=False)

    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("0001-info-label-the-build.patch: megatron/core/package_info.py: ")
    assert "file gone" in lines[2]
    assert "not tried, because 0002-model-change-an-early-line.patch before it failed" in lines[3]


def test_hostile_git_configuration_changes_nothing(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "home" / ".gitconfig"
    write_files(
        config.parent,
        {
            ".gitconfig": "[core]\nautocrlf = true\nattributesFile = ~/attributes\n"
            "hooksPath = ~/hooks\n[apply]\nwhitespace = error\nignoreWhitespace = change\n"
            "[commit]\ngpgSign = true\n[diff]\nnoprefix = true\n",
            "attributes": "*.py text eol=crlf\n",
        },
    )
    monkeypatch.setenv("HOME", str(config.parent))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))

    assert toy.assemble("git") == toy.pin.lock


def test_the_tree_may_lie_inside_another_repository_that_ignores_it(toy: Toy) -> None:
    outer = Git(toy.root)
    outer.init()
    (toy.root / ".gitignore").write_text("*\n")

    assert toy.assemble("git") == toy.pin.lock


def test_no_file_changes_behind_the_index(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the clock ticked meanwhile, the next patch of the file would not match it."""

    def chmod(self: Path, mode: int) -> None:
        raise AssertionError(f"{self} changes after git has looked at it")

    class Watched(GitEngine):
        def apply(self, patch: Patch) -> None:
            with monkeypatch.context() as during:
                during.setattr(Path, "chmod", chmod)
                super().apply(patch)

    monkeypatch.setitem(ENGINES, "git", Watched)
    assert toy.assemble("git") == toy.pin.lock


def test_a_strict_umask_does_not_reach_the_tree(toy: Toy) -> None:
    previous = os.umask(0o077)
    try:
        toy.assemble("git")
    finally:
        os.umask(previous)

    modes = {stat.S_IMODE((toy.tree / path).stat().st_mode) for path in entries_below(toy.tree)}
    assert modes == {0o644}


def test_a_failing_engine_is_caught_by_the_blob_it_leaves(toy: Toy) -> None:
    class Sloppy(PythonEngine):
        def apply(self, patch: Patch) -> None:
            super().apply(patch)
            path = self._tree / patch.changes[0].path
            path.write_bytes(path.read_bytes() + b"# litter\n")

    with pytest.raises(BuildError, match="the engine left blob"):
        assemble(toy.recipe(), Sloppy(), toy.tree)


def test_a_tampered_archive_never_reaches_the_series(toy: Toy) -> None:
    content = bytearray(toy.sdist.read_bytes())
    content[-20] ^= 1
    toy.sdist.write_bytes(content)

    with pytest.raises(BuildError) as caught:
        toy.assemble()

    assert f"expected {toy.pin.sdist_sha256}, got {sha256_of(toy.sdist)}" in str(caught.value)
    assert not toy.tree.exists()


@BOTH_ENGINES
def test_a_diff_hidden_in_the_message_is_not_applied(toy: Toy, engine: str) -> None:
    """Git apply takes whatever looks like a diff, wherever it stands in its input."""
    hidden = (
        f"--- a/{OPTIMIZER}\n+++ b/{OPTIMIZER}\n@@ -1,3 +1,4 @@\n rate_1 = 1\n+evil = 1\n"
        " rate_2 = 2\n rate_3 = 3\n\nWhen off:"
    )
    toy.rewrite(2, "When off:", hidden)

    assert toy.assemble(engine) == toy.pin.lock
