"""One patch file: parse the strict form this series uses, and apply it without git.

A patch here is what ``git format-patch --full-index`` writes and nothing wider: it edits text files
that exist.  Everything that patch tools have been seen to get wrong (creations, deletions, renames,
modes, links, binary hunks, thin context, paths that leave the tree) is refused while parsing, so
that both engines agree on what is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from buildtools.console import BuildError
from buildtools.objects import NULL_BLOB, unsafe_path_reason

CONTEXT = 3
"""Lines of context that each hunk needs on both sides, except at the start or end of a file."""

_DIFF = re.compile(r"^diff --git (.*)$")
_INDEX = re.compile(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)(?: ([0-7]{6}))?$")
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_REFUSED = {
    "new file mode": "creates a file (new files belong into megatron_overlay/)",
    "deleted file mode": "deletes a file",
    "old mode": "changes a file mode",
    "new mode": "changes a file mode",
    "rename ": "renames a file",
    "copy ": "copies a file",
    "similarity index": "renames or copies a file",
    "GIT binary patch": "has a binary hunk",
    "Binary files": "has a binary hunk",
}


@dataclass(frozen=True)
class Hunk:
    """A run of lines: ``old`` becomes ``new`` at line ``start`` (counted from 1) of the old file.

    Lines keep their end; the last line of a file without a final newline has none.
    """

    start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    leading: int
    trailing: int
    added: int
    removed: int


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file: its blob id before and after, and the hunks between."""

    path: str
    before: str
    after: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """A parsed patch file.

    Attributes:
        name: its file name.
        message: the mail before the diff.
        changes: what the diff does.
        diff: the bytes that were parsed as the diff; an engine gets these alone, since git would
            also apply what looks like a diff inside the message.
        content: the whole file.
    """

    name: str
    message: str
    changes: tuple[FileChange, ...]
    diff: bytes
    content: bytes

    @property
    def changed_lines(self) -> int:
        """Lines added plus lines removed."""
        return sum(hunk.added + hunk.removed for change in self.changes for hunk in change.hunks)


def _fail(name: str, reason: str) -> BuildError:
    return BuildError(f"{name}: {reason}")


def parse_patch(name: str, content: bytes) -> Patch:
    """Parse a patch file.

    Raises:
        BuildError: the file is not such a patch; the message names the file, path and reason.
    """
    try:
        return _parse(name, content)
    except (IndexError, ValueError) as error:
        raise _fail(name, f"malformed patch: {error}") from error


def _parse(name: str, content: bytes) -> Patch:
    # Latin-1 maps every byte to one character and back, whatever encoding the patched file has.
    lines = content.decode("latin-1").split("\n")
    first = next((n for n, line in enumerate(lines) if _DIFF.match(line)), len(lines))
    if first == len(lines):
        raise _fail(name, "holds no diff")
    message = "\n".join(lines[:first]).encode("latin-1").decode("utf-8")
    changes: list[FileChange] = []
    position = first
    while position < len(lines) and _DIFF.match(lines[position]):
        change, position = _parse_change(name, lines, position)
        changes.append(change)
    # format-patch closes a file with "-- " and a version; `--no-signature` leaves an empty line.
    if any(line for line in lines[position:]):
        raise _fail(
            name, f"line {position + 1}: text after the last hunk (export with --no-signature)"
        )
    paths = [change.path for change in changes]
    if len(set(paths)) != len(paths):
        raise _fail(name, "touches a file twice")
    diff = "\n".join(lines[first:]).encode("latin-1")
    return Patch(name, message, tuple(changes), diff, content)


def _parse_change(name: str, lines: list[str], position: int) -> tuple[FileChange, int]:
    heading = lines[position]
    position += 1
    before = after = ""
    while position < len(lines) and not lines[position].startswith("--- "):
        line = lines[position]
        for prefix, reason in _REFUSED.items():
            if line.startswith(prefix):
                raise _fail(name, f"{heading!r}: refused: {reason}")
        index = _INDEX.match(line)
        if index is None:
            raise _fail(name, f"{heading!r}: unexpected line {line!r}")
        before, after, mode = index.groups()
        if len(before) != 40 or len(after) != 40:
            raise _fail(name, f"{heading!r}: blob ids are abbreviated (export with --full-index)")
        if mode not in ("100644", "100755"):
            raise _fail(name, f"{heading!r}: refused: file mode {mode} (a link or submodule)")
        position += 1
    if not before or position + 1 >= len(lines):
        raise _fail(name, f"{heading!r}: no index line or no hunks")
    path = _path_of(name, lines[position], lines[position + 1])
    if heading != f"diff --git a/{path} b/{path}":
        raise _fail(name, f"{heading!r} does not name {path!r}")
    if NULL_BLOB in (before, after):
        raise _fail(name, f"{path}: refused: creates or deletes a file")
    position += 2
    hunks: list[Hunk] = []
    while position < len(lines) and lines[position].startswith("@@"):
        hunk, position = _parse_hunk(name, path, lines, position)
        hunks.append(hunk)
    if not hunks:
        raise _fail(name, f"{path}: no hunks")
    return FileChange(path, before, after, tuple(hunks)), position


def _path_of(name: str, old: str, new: str) -> str:
    if not old.startswith("--- a/") or not new.startswith("+++ b/"):
        raise _fail(name, f"expected '--- a/PATH' and '+++ b/PATH', got {old!r} and {new!r}")
    path = new[len("+++ b/") :]
    if old[len("--- a/") :] != path:
        raise _fail(name, f"refused: renames {old[6:]!r} to {path!r}")
    reason = unsafe_path_reason(path)
    if reason:
        raise _fail(name, f"refused: path {path!r} {reason}")
    return path


def _parse_hunk(name: str, path: str, lines: list[str], position: int) -> tuple[Hunk, int]:
    header = _HUNK.match(lines[position])
    if header is None:
        raise _fail(name, f"{path}: malformed hunk header {lines[position]!r}")
    start, old_count, new_start, new_count = (int(g) if g else 1 for g in header.groups())
    # An empty side is numbered by the line before it.
    start += old_count == 0
    new_start += new_count == 0
    position += 1
    tags: list[str] = []
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count or lines[position].startswith("\\"):
        # The last element follows the final newline, so it is never a line of a hunk.
        if position == len(lines) - 1 or lines[position][:1] not in (" ", "+", "-", "\\"):
            raise _fail(name, f"{path}: hunk at line {start} is truncated or its counts are wrong")
        tag, text = lines[position][0], lines[position][1:].encode("latin-1") + b"\n"
        position += 1
        if tag == "\\":
            # "\ No newline at end of file" speaks of the line before it.
            if tags[-1] in " -":
                old[-1] = old[-1].removesuffix(b"\n")
            if tags[-1] in " +":
                new[-1] = new[-1].removesuffix(b"\n")
            continue
        tags.append(tag)
        if tag in " -":
            old.append(text)
        if tag in " +":
            new.append(text)
    if len(old) != old_count or len(new) != new_count:
        raise _fail(name, f"{path}: hunk at line {start}: counts do not match its lines")
    changed = [n for n, tag in enumerate(tags) if tag != " "]
    if not changed:
        raise _fail(name, f"{path}: hunk at line {start} changes nothing")
    return (
        Hunk(
            start,
            new_start,
            tuple(old),
            tuple(new),
            leading=changed[0],
            trailing=len(tags) - 1 - changed[-1],
            added=tags.count("+"),
            removed=tags.count("-"),
        ),
        position,
    )


def misfit(change: FileChange, content: bytes) -> str | None:
    """Return why ``change`` does not fit ``content`` at exactly the stated lines, or None.

    No offset and no fuzz: a hunk that would fit elsewhere does not fit.
    """
    lines = _lines(content)
    shift = 0
    floor = 0
    for hunk in change.hunks:
        begin, end = hunk.start - 1, hunk.start - 1 + len(hunk.old)
        if begin < floor or hunk.new_start != hunk.start + shift:
            return f"hunk at line {hunk.start}: its position contradicts the hunk before it"
        for number, expected in enumerate(hunk.old, start=hunk.start):
            actual = lines[number - 1] if number <= len(lines) else None
            if actual != expected:
                found = "the end of the file" if actual is None else repr(_text(actual))
                return f"line {number}: expected {_text(expected)!r}, got {found}"
        thin_start = hunk.leading < CONTEXT and begin != 0
        thin_end = hunk.trailing < CONTEXT and end != len(lines)
        if thin_start or thin_end:
            return f"hunk at line {hunk.start} has fewer than {CONTEXT} context lines"
        shift += len(hunk.new) - len(hunk.old)
        floor = end
    return None


def apply_change(change: FileChange, content: bytes) -> bytes:
    """Return ``content`` with ``change`` applied; `misfit` must have returned None for it."""
    lines = _lines(content)
    for hunk in reversed(change.hunks):
        lines[hunk.start - 1 : hunk.start - 1 + len(hunk.old)] = hunk.new
    return b"".join(lines)


def _lines(content: bytes) -> list[bytes]:
    """Split at newlines only: `bytes.splitlines` also splits at a lone carriage return."""
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", content)


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\n")
