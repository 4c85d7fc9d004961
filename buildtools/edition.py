"""Commits into the files of ``patches/``: names and numbers, the series file, and every refusal."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from buildtools.console import BuildError
from buildtools.dropped import DROPPED, Dropped, appended
from buildtools.git import Git
from buildtools.history import export
from buildtools.objects import blob_id
from buildtools.patchfile import Patch, apply_change, misfit, parse_patch
from buildtools.series import file_name, load_patches, parse_header


@dataclass(frozen=True)
class Edition:
    """A series made of commits, compared with the one it takes the place of.

    Attributes:
        patches: the new series.
        names: old name -> new name, of the patches that are in both.
        removed: names of the old patches that are in it no more.
        added: names of the patches that are new in it.
        changed: new names of the patches in both whose file has other bytes.
    """

    patches: list[Patch]
    names: dict[str, str]
    removed: list[str]
    added: list[str]
    changed: list[str]

    @property
    def renamed(self) -> dict[str, str]:
        """Old name -> new name, where they differ."""
        return {old: new for old, new in self.names.items() if old != new}

    def summary(self) -> list[str]:
        """Return a line for each patch that is not as it was."""
        return [
            *(f"removed  {name}" for name in self.removed),
            *(f"renamed  {old} -> {new}" for old, new in self.renamed.items()),
            *(f"changed  {name}" for name in self.changed),
            *(f"new      {name}" for name in self.added),
        ]


def subject_of(patch: Patch) -> str:
    """Return the subject of a patch, on one line."""
    return parse_header(patch.message).subject


def digest(patches: Iterable[Patch]) -> str:
    """Return a hash of a series: names, order and content."""
    return hashlib.sha256(
        b"\0".join(part for patch in patches for part in (patch.name.encode(), patch.content))
    ).hexdigest()


def number(known: list[int | None], taken: Collection[int] = ()) -> list[int]:
    """Return strictly increasing numbers; as many of the ``known`` ones are kept as can be.

    Args:
        known: for each patch in order the number it has, or None.
        taken: numbers that a patch at the end should not take.
    """
    # The longest run of known numbers that leave room for what stands between them.
    best: list[tuple[int, int | None]] = []
    for index, value in enumerate(known):
        length, before = 0, None
        if value is not None and value > index:
            length = 1
            for earlier in range(index):
                low = known[earlier]
                room = low is not None and value - low >= index - earlier
                if room and best[earlier][0] >= length:
                    length, before = best[earlier][0] + 1, earlier
        best.append((length, before))
    kept: dict[int, int] = {}
    last = max(range(len(known)), key=lambda index: best[index][0], default=None)
    while last is not None and best[last][0]:
        kept[last] = known[last]  # type: ignore[assignment]
        last = best[last][1]
    numbers: list[int] = []
    for index in range(len(known)):
        following = max(numbers[-1:], default=0) + 1
        if index in kept:
            following = kept[index]
        elif index > max(kept, default=-1):
            while following in taken:
                following += 1
        numbers.append(following)
    return numbers


def make_edition(
    git: Git, base: str, commits: list[str], old: list[Patch], gone: Iterable[Dropped] = ()
) -> Edition:
    """Make the series that ``commits`` are.

    Args:
        git: the repository.
        base: the commit of the pristine tree.
        commits: one per patch, in order, the first on ``base``.
        old: the series that is replaced; a patch with the same subject keeps its number.
        gone: the record of dropped patches; their numbers are not given to others if that can be
            avoided.

    Raises:
        BuildError: a commit is not such a patch, or there is none; everything is reported.
    """
    if not commits:
        raise BuildError("the series would be empty: refused")
    contents = export(git, commits)
    problems: list[str] = []
    drafts: list[Patch] = []
    for commit, content in zip(commits, contents, strict=True):
        title = git.run("log", "-1", "--format=%h %s", commit)
        reason = _unfit(git, commit)
        try:
            drafts.append(parse_patch(f"commit {title}", content))
        except BuildError as error:
            reason = reason or str(error).partition(": ")[2]
        if reason:
            problems.append(f"commit {title}: {reason}")
    subjects = [subject_of(draft) for draft in drafts]
    problems += [
        f"subject {subject!r}: more than one commit has it"
        for subject in sorted({each for each in subjects if subjects.count(each) > 1})
    ]
    problems += _misfits(git, base, drafts)
    if problems:
        raise BuildError("\n".join(["these commits are no series:", *problems]))
    known = {subject_of(patch): patch for patch in old}
    matches = [known.get(subject) for subject in subjects]
    numbers = number(
        [int(match.name[:4]) if match else None for match in matches],
        {int(entry.patch[:4]) for entry in gone},
    )
    pairs = zip(numbers, subjects, contents, strict=True)
    patches = [parse_patch(file_name(n, subject), content) for n, subject, content in pairs]
    return _compare(patches, matches, old)


def _unfit(git: Git, commit: str) -> str | None:
    """Return why a commit cannot be a patch; its content alone may not tell."""
    parents = git.run("rev-list", "--parents", "-1", commit).split()[1:]
    if len(parents) != 1:
        return "is a merge" if parents else "has no parent"
    message = git.run("log", "-1", "--format=%B", commit)
    subject, _, rest = message.partition("\n")
    if subject.startswith(("fixup! ", "squash! ", "amend! ")):
        return "is still to be folded in: git rebase -i --autosquash pristine"
    if rest and not rest.startswith("\n"):
        return "the second line of its message must be empty"
    trees = git.run("rev-parse", f"{commit}^{{tree}}", f"{commit}^^{{tree}}").split()
    if trees[0] == trees[1]:
        return "changes nothing"
    return None


def _misfits(git: Git, base: str, patches: list[Patch]) -> list[str]:
    """Return where the patches, as they were written, would not give what the commits hold."""
    contents: dict[str, bytes] = {}
    problems = []
    for patch in patches:
        for change in patch.changes:
            content = contents.get(change.path)
            content = content if content is not None else git.blob(base, change.path) or b""
            reason = misfit(change, content)
            if blob_id(content) != change.before:
                reason = "does not start from what the patch before it leaves"
            if not reason:
                content = apply_change(change, content)
                if blob_id(content) != change.after:
                    reason = f"leaves blob {blob_id(content)} instead of {change.after}"
            contents[change.path] = content
            if reason:
                problems.append(f"{patch.name}: {change.path}: {reason}")
    return problems


def _compare(patches: list[Patch], matches: list[Patch | None], old: list[Patch]) -> Edition:
    names = {match.name: patch.name for match, patch in zip(matches, patches, strict=True) if match}
    # A patch whose subject was reworded takes the number, and is no other patch for that.
    by_number = {patch.name[:4]: patch.name for patch in old if patch.name not in names}
    for patch in patches:
        if patch.name not in names.values() and patch.name[:4] in by_number:
            names[by_number[patch.name[:4]]] = patch.name
    content = {names[patch.name]: patch.content for patch in old if patch.name in names}
    return Edition(
        patches=patches,
        names=names,
        removed=[patch.name for patch in old if patch.name not in names],
        added=[patch.name for patch in patches if patch.name not in content],
        changed=[
            patch.name
            for patch in patches
            if content.get(patch.name, patch.content) != patch.content
        ],
    )


def files_of(
    edition: Edition, directory: Path, dropped: Iterable[Dropped] = ()
) -> dict[Path, bytes | None]:
    """Return what has to be written into ``directory`` so that it holds the edition.

    Args:
        edition: the new series.
        directory: ``patches/`` with the old one.
        dropped: what the record is to say of the removed patches.

    Returns:
        Path -> content, None for a file that goes; only what differs.

    Raises:
        BuildError: `load_patches` would refuse the result.
    """
    entries = list(dropped)
    files: dict[Path, bytes | None] = {
        directory / name: None for name in [*edition.removed, *edition.renamed]
    }
    files |= {directory / patch.name: patch.content for patch in edition.patches}
    old = (directory / "series").read_text(encoding="utf-8")
    order = [patch.name for patch in edition.patches]
    files[directory / "series"] = series_text(old, edition.names, order).encode()
    if entries:
        files[directory / DROPPED] = appended(directory, entries)
    _verify(files, directory)
    return {
        path: content
        for path, content in files.items()
        if content != (path.read_bytes() if path.exists() else None)
    }


def _verify(files: Mapping[Path, bytes | None], directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for path in directory.iterdir():
            if path not in files:
                (copy / path.name).write_bytes(path.read_bytes())
        for path, content in files.items():
            if content is not None:
                (copy / path.name).write_bytes(content)
        load_patches(copy)


def series_text(old: str, names: Mapping[str, str], order: list[str]) -> str:
    """Return the text of the series file for ``order``.

    A comment stays with the patch it stands above; those above the first one, and those after the
    last one, stay where they are.

    Args:
        old: the text it has.
        names: old name -> new name.
        order: the new names.
    """
    above: dict[str, list[str]] = {}
    head: list[str] = []
    pending: list[str] = []
    first = True
    for line in old.splitlines():
        name = line.strip()
        if not name or name.startswith("#"):
            pending.append(line)
            continue
        if first:
            head, first = pending, False
        elif name in names:
            above[names[name]] = pending
        pending = []
    if first:
        head, pending = pending, []
    lines = [*head, *(line for name in order for line in [*above.get(name, []), name]), *pending]
    return "\n".join([*lines, ""])
