"""The patch parser accepts plain edits of text files and refuses everything else by name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from buildtools.console import BuildError
from buildtools.git import Git
from buildtools.objects import blob_id
from buildtools.patchfile import apply_change, misfit, parse_patch

A, B = "a" * 40, "b" * 40
HEAD = "From 0\nSubject: x\n\ntext\n\n"
BODY = "@@ -1,4 +1,4 @@\n-one\n+ONE\n two\n three\n four\n"


def _patch(path: str = "f.py", index: str = f"index {A}..{B} 100644", body: str = BODY) -> bytes:
    return (
        f"{HEAD}diff --git a/{path} b/{path}\n{index}\n--- a/{path}\n+++ b/{path}\n{body}".encode()
    )


def test_a_plain_edit_parses() -> None:
    patch = parse_patch("p", _patch())

    (change,) = patch.changes
    assert (change.path, change.before, change.after) == ("f.py", A, B)
    assert patch.changed_lines == 2
    assert apply_change(change, b"one\ntwo\nthree\nfour\n") == b"ONE\ntwo\nthree\nfour\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"From 0\nSubject: x\n", "holds no diff"),
        (_patch(index=f"new file mode 100644\nindex {'0' * 40}..{B}"), "creates a file"),
        (_patch(index=f"index {'0' * 40}..{B} 100644"), "creates or deletes a file"),
        (_patch(index=f"deleted file mode 100644\nindex {A}..{'0' * 40}"), "deletes a file"),
        (_patch(index=f"old mode 100644\nnew mode 100755\nindex {A}..{B}"), "changes a file mode"),
        (_patch(index=f"similarity index 90%\nrename from f.py\nindex {A}..{B}"), "renames"),
        (_patch(index=f"copy from e.py\nindex {A}..{B}"), "copies a file"),
        (_patch(index=f"index {A}..{B} 120000"), "file mode 120000 (a link or submodule)"),
        (_patch(index=f"index {A}..{B} 160000"), "file mode 160000 (a link or submodule)"),
        (_patch(index="index aaaaaaa..bbbbbbb 100644"), "blob ids are abbreviated"),
        (_patch(index="GIT binary patch"), "has a binary hunk"),
        (_patch(index="Binary files a/f and b/f differ"), "has a binary hunk"),
        (_patch(path="../f.py"), "leaves the tree through '..'"),
        (_patch(path="/etc/passwd"), "is absolute"),
        (_patch(path=".git/hooks/post-checkout"), "lies in a .git directory"),
        (_patch(path="a//b.py"), "is not a plain relative path"),
        (_patch(body="@@ -1,4 +1,4 @@\n one\n two\n three\n four\n"), "changes nothing"),
        (_patch(body="@@ -1,5 +1,4 @@\n-one\n+ONE\n two\n three\n four\n"), "truncated"),
        (_patch(body="@@ -1,3 +1,4 @@\n-one\n+ONE\n two\n three\n four\n"), "counts do not"),
        (_patch(body=BODY + "stray\n"), "text after the last hunk"),
        (_patch(body=""), "no hunks"),
        (_patch(body="@@ -1,4 +1,4 @@"), "malformed patch"),
        (_patch(body="@@ -1,1 +1,1 @@\n\\ No newline at end of file\n"), "malformed patch"),
        (_patch(body=f"@@ -{'9' * 5000} +1,4 @@\n"), "malformed patch"),
        (_patch().replace(b"text", b"\xff"), "malformed patch"),
        (_patch() + _patch()[len(HEAD) :], "touches a file twice"),
        (_patch().replace(b"--- a/f.py", b"--- a/g.py"), "renames 'g.py' to 'f.py'"),
        (_patch().replace(b"diff --git a/f.py", b"diff --git a/g.py"), "does not name 'f.py'"),
    ],
)
def test_anything_but_a_plain_edit_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(BuildError) as caught:
        parse_patch("0001-x.patch", content)

    assert str(caught.value).startswith("0001-x.patch: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "@@ -10,5 +10,5 @@\n l10\n l11\n-l12\n+L12\n l13\n l14\n",
        "@@ -10,1 +10,1 @@\n-l10\n+L10\n",
    ],
)
def test_thin_context_is_refused_inside_a_file(body: str) -> None:
    content = "".join(f"l{n}\n" for n in range(1, 31)).encode()
    (change,) = parse_patch("p", _patch(body=body)).changes

    assert "fewer than 3 context lines" in str(misfit(change, content))


def test_thin_context_is_fine_at_either_end_of_a_file() -> None:
    content = b"one\ntwo\nthree\nfour\n"
    body = "@@ -1,4 +1,4 @@\n-one\n+ONE\n two\n three\n-four\n+FOUR\n"
    (change,) = parse_patch("p", _patch(body=body)).changes

    assert misfit(change, content) is None
    assert apply_change(change, content) == b"ONE\ntwo\nthree\nFOUR\n"


CASES = {
    "no final newline before": (b"a\nb\nc\nd", b"a\nb\nc\nD\n"),
    "no final newline after": (b"a\nb\nc\nd\n", b"a\nb\nc\nD"),
    "no final newline at all": (b"x\nb\nc\nd\ne", b"X\nb\nc\nd\ne"),
    "carriage returns": (b"a\r\nb\r\nc\r\nd\r\n", b"a\r\nB\r\nc\r\nd\r\n"),
    "lone carriage return": (b"a\rb\nc\nd\ne\n", b"a\rb\nc\nD\ne\n"),
    "form feed and separators": (b"a\x0cb\nc\x1c\nd\ne\n", b"a\x0cb\nC\x1c\nd\ne\n"),
    "latin-1": ("é\nb\nc\nd\n".encode("latin-1"), "è\nb\nc\nd\n".encode("latin-1")),
    "empty file": (b"", b"a\nb\n"),
    "emptied file": (b"a\nb\n", b""),
    "two hunks": (
        b"".join(b"l%d\n" % n for n in range(40)),
        b"".join(b"l%d\n" % n for n in range(40) if n not in (3, 30)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_git_exports_is_applied_as_git_applies_it(case: str, tmp_path: Path) -> None:
    """Bytes, line ends and final newlines come out as git's own."""
    old, new = CASES[case]
    git = Git(tmp_path)
    git.init()
    (tmp_path / "f.py").write_bytes(old)
    git.commit_all("old")
    (tmp_path / "f.py").write_bytes(new)
    git.commit_all("new")
    exported = git.attempt("format-patch", "-1", "--stdout", "--full-index", "--text")
    text = exported.stdout.split(b"\n-- \n")[0] + b"\n"

    (change,) = parse_patch("p", text).changes

    assert misfit(change, old) is None
    assert apply_change(change, old) == new
    assert (change.before, change.after) == (blob_id(old), blob_id(new))


def test_blob_ids_are_gits(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1000)
    by_git = subprocess.run(
        ["git", "hash-object", "--no-filters", "f"], cwd=tmp_path, capture_output=True, text=True
    )
    assert by_git.stdout.strip() == blob_id(b"x" * 1000)
