"""The series as commits, and back: the same bytes, the same authors, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildtools.check import canonical
from buildtools.console import BuildError
from buildtools.git import Git
from buildtools.history import History, export, parse_mail
from buildtools.patchfile import parse_patch
from buildtools.paths import PATCHES
from buildtools.project import project_recipe
from buildtools.series import load_patches, parse_header
from buildtools.upstream import fetch
from tests.buildtools.toy import FILES, MODEL, Toy, write_files

AUTHORS = [
    ("Ada Lovelace", "ada@example.org", "@1700000000 +0530"),
    ("Jürgen Groß", "j.gross@example.org", "@86400 -0800"),
    ('Doe, "Jack" John', "jd@example.org", "@1700000000 +0000"),
    ("山田 太郎", "taro@example.jp", "@4000000000 +0900"),
    ("O'Neil-Smith (they)", "x+y@example.org", "@1700000001 +0000"),
]
MESSAGES = [
    "model: change a line\n\nWhy a patch: é\n\nReason: hook\n",
    "model: " + "a very long subject that has to be folded " * 4 + "by the mail format\n\nbody\n",
    "model: änderte öfter Umlaute in einem Betreff, der länger ist als eine Zeile ü ß\n\nbody\n",
    "model: change a line\n\n  indented\n# a comment\n\n\nthree newlines before\n---\nafter\n",
    "model: no body\n",
    "model: [brackets] stay\n\nFrom: somebody <else@example.org>\n\n>From here\n",
]


def _pristine(tmp_path: Path) -> Path:
    return write_files(tmp_path / "tree", FILES)


def _authored(tmp_path: Path, message: str, author: tuple[str, str, str]) -> bytes:
    """Return the patch file of a commit with this message and author."""
    git = Git(write_files(tmp_path / "author", FILES))
    git.init()
    base = git.commit_all("pristine")
    model = git.worktree / MODEL
    model.write_text(model.read_text().replace("line_5 = 5\n", "line_5 = 55\n"))
    git.run("add", "--all")
    keys = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE")
    env = dict(zip(keys, author, strict=True))
    return export(git, [git.commit_tree(git.tree_id(), base, message, env)])[0]


@pytest.mark.parametrize("author", AUTHORS, ids=[name for name, _, _ in AUTHORS])
@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_a_patch_survives_import_and_export(
    tmp_path: Path, number: int, author: tuple[str, str, str]
) -> None:
    content = _authored(tmp_path, MESSAGES[number], author)
    patch = parse_patch("0001-x.patch", content)

    history = History(_pristine(tmp_path), [patch])

    assert export(history.git, [history.tip]) == [content]
    assert history.non_canonical() == []
    shown = history.git.run("log", "-1", "--format=%an%n%ae%n@%ad", "--date=raw")
    assert shown.splitlines() == list(author)
    assert parse_mail(patch).message == MESSAGES[number]


def test_the_series_of_this_repository_is_what_export_writes(tmp_path: Path) -> None:
    recipe = project_recipe("index", offline=False)
    tree = tmp_path / "tree"
    fetch(recipe.pin, recipe.source, tree, recipe.cache, recipe.download)
    history = History(tree, load_patches(PATCHES))

    contents = export(history.git, history.commits.values())

    assert dict(zip(history.commits, contents, strict=True)) == {
        name: (PATCHES / name).read_bytes() for name in history.commits
    }


def test_there_is_one_commit_for_each_patch_on_the_pristine_tree(toy: Toy, tmp_path: Path) -> None:
    history = History(_pristine(tmp_path), load_patches(toy.patches))

    log = history.git.run("log", "--reverse", "--format=%s").splitlines()
    assert log == ["pristine", *(parse_header(p.message).subject for p in history.patches)]
    assert history.git.run("rev-parse", f"{history.base}^{{tree}}") == toy.pin.lock.pristine
    assert history.git.run("rev-parse", "HEAD^{tree}") == toy.pin.lock.patched
    assert history.git.run("status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Subject: model: change", "Subject: model:\n change"),
        ("Why a patch", "trailing space \nWhy a patch"),
        ("Subject: ", "X-Mine: yes\nSubject: "),
        ("@@ -2,7 +2,7 @@", "@@ -2,7 +2,7 @@ a heading of one's own"),
        ("Date: Thu, 1 Jan 1970", "Date: Thu,  1 Jan 1970"),
        ("From 0000", "From 1000"),
        ("\n\ndiff --git", "\n\n\ndiff --git"),
    ],
)
def test_a_patch_in_another_form_is_named(toy: Toy, tmp_path: Path, old: str, new: str) -> None:
    toy.rewrite(2, old, new)
    history = History(_pristine(tmp_path), load_patches(toy.patches))

    assert history.non_canonical() == ["0002-model-change-an-early-line.patch"]
    with pytest.raises(BuildError, match=r"not what `build\.py export` writes: 0002-model-change"):
        canonical(toy.recipe())


def test_an_offset_that_git_would_accept_is_refused(toy: Toy, tmp_path: Path) -> None:
    files = FILES | {MODEL: "first = 0\n" + FILES[MODEL]}

    with pytest.raises(BuildError, match=r"0002.*model\.py: git left blob .*, the patch promises"):
        History(write_files(tmp_path / "tree", files), load_patches(toy.patches))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("From: megatron-nvme <megatron-nvme@localhost>\n", ""),
        ("Date: Thu, 1 Jan 1970 00:00:00 +0000\n", ""),
        ("Date: Thu, 1 Jan 1970 00:00:00 +0000\n", "Date: yesterday\n"),
        ("From: megatron-nvme <megatron-nvme@localhost>", "From: a <a@b.c>, d <d@e.f>"),
    ],
)
def test_a_patch_of_nobody_or_of_no_time_is_refused(
    toy: Toy, tmp_path: Path, old: str, new: str
) -> None:
    toy.rewrite(2, old, new)

    with pytest.raises(BuildError, match=r"0002.*: its From, Date or Subject cannot be read"):
        History(_pristine(tmp_path), load_patches(toy.patches))


def test_the_repositorys_own_configuration_does_not_reach_the_bytes(
    toy: Toy, tmp_path: Path
) -> None:
    history = History(_pristine(tmp_path), load_patches(toy.patches))
    for key, value in {
        "diff.noprefix": "true",
        "diff.context": "1",
        "diff.algorithm": "patience",
        "format.signature": "me",
        "format.signOff": "true",
        "format.to": "list@example.org",
        "format.headers": "X-Mine: yes\n",
        "format.attach": "true",
        "core.quotePath": "false",
    }.items():
        history.git.run("config", key, value)
    (history.git.worktree / ".git" / "info" / "attributes").write_text("*.py diff=python -text\n")

    assert history.non_canonical() == []


def test_a_patch_can_be_left_out_with_those_that_need_it(toy: Toy, tmp_path: Path) -> None:
    names = [patch.name for patch in load_patches(toy.patches)]
    history = History(_pristine(tmp_path), load_patches(toy.patches))

    assert history.without(names[1]) == [names[1]]
    model = (history.git.worktree / MODEL).read_text()
    assert "line_5 = 5\n" in model and "added = True" in model
    assert history.without(names[2]) == [names[2]]
    assert "line_5 = 55\n" in (history.git.worktree / MODEL).read_text()
