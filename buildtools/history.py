"""The series as commits: one per patch on top of the pristine tree, and back to the same bytes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.errors import MessageError
from email.headerregistry import AddressHeader, DateHeader
from email.parser import Parser
from email.policy import default as email_policy
from pathlib import Path

from buildtools.console import BuildError
from buildtools.git import Git
from buildtools.objects import blob_id
from buildtools.patchfile import Patch

_EXPORT = (
    "format-patch", "--stdout", "-1", "--zero-commit", "--no-signature", "--no-stat",
    "--full-index", "--no-numbered", "--keep-subject",
)  # fmt: skip


@dataclass(frozen=True)
class Mail:
    """The head of a patch file: what becomes of it in a commit.

    Attributes:
        author: name of the author.
        email: address of the author.
        date: when it was written, as git takes it: ``@<seconds> <zone>``.
        message: subject, an empty line, and the body with its trailers.
    """

    author: str
    email: str
    date: str
    message: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make git write this author into a commit."""
        return {
            "GIT_AUTHOR_NAME": self.author,
            "GIT_AUTHOR_EMAIL": self.email,
            "GIT_AUTHOR_DATE": self.date,
        }


def parse_mail(patch: Patch) -> Mail:
    """Read the head of a patch file.

    Raises:
        BuildError: it names no author, date or subject that can be read.
    """
    head, _, body = patch.message.partition("\n\n")
    try:
        mail = Parser(policy=email_policy).parsestr(head.partition("\n")[2] + "\n\n")
        sender, date = mail["From"], mail["Date"]
        if not isinstance(sender, AddressHeader) or not isinstance(date, DateHeader):
            raise ValueError("no From or no Date")
        (address,) = sender.addresses
        when = date.datetime
        zone = re.search(r"[+-]\d{4}$", str(date).strip())
        if when is None or zone is None:
            raise ValueError(f"date {str(date)!r}")
        subject = str(mail["Subject"] or "")
    except (ValueError, IndexError, AttributeError, MessageError) as error:
        raise BuildError(f"{patch.name}: its From, Date or Subject cannot be read: {error}") from (
            error
        )
    text = body.rstrip("\n")
    message = f"{subject}\n\n{text}\n" if text else f"{subject}\n"
    return Mail(
        address.display_name, address.addr_spec, f"@{int(when.timestamp())} {zone[0]}", message
    )


def export(repository: Git, commits: Iterable[str]) -> list[bytes]:
    """Return the patch files of ``commits``, byte for byte as they belong into ``patches/``.

    A scratch repository that borrows the objects does the work: what somebody has set in the
    configuration of ``repository`` (context lines, prefixes, mail headers) cannot reach the bytes.
    """
    objects = repository.run("rev-parse", "--path-format=absolute", "--git-path", "objects")
    with tempfile.TemporaryDirectory() as scratch:
        git = Git(Path(scratch) / "export")
        git.init()
        alternates = git.worktree / ".git" / "objects" / "info" / "alternates"
        alternates.write_text(objects + "\n", encoding="utf-8", errors="surrogateescape")
        return [git.output(*_EXPORT, commit) for commit in commits]


class History:
    """A repository that holds the pristine tree and one commit per patch.

    Args:
        tree: directory with the pristine files; it becomes the repository's worktree.
        patches: the series.

    Attributes:
        git: the repository; its HEAD is the whole series.
        patches: the series.
        base: the commit of the pristine tree.
        commits: patch name -> its commit.

    Raises:
        BuildError: a patch does not apply, or leaves another blob than its index line promises.
    """

    def __init__(self, tree: Path, patches: list[Patch]) -> None:
        self.git = Git(tree)
        self.patches = patches
        self.git.init()
        self.base = self.git.commit_all("pristine")
        self.commits: dict[str, str] = {}
        parent = self.base
        for patch in patches:
            mail = parse_mail(patch)
            self.git.run("apply", "--index", "-", stdin=patch.diff)
            self._verify(patch)
            parent = self.git.commit_tree(
                self.git.tree_id(), parent, mail.message, mail.environment
            )
            self.commits[patch.name] = parent
        self.git.run("reset", "--quiet", "--soft", parent)

    def _verify(self, patch: Patch) -> None:
        """Compare what git left with the promise: git alone accepts an offset without a word."""
        for change in patch.changes:
            blob = blob_id((self.git.worktree / change.path).read_bytes())
            if blob != change.after:
                raise BuildError(
                    f"{patch.name}: {change.path}: git left blob {blob}, the patch promises "
                    f"{change.after}"
                )

    @property
    def tip(self) -> str:
        """The commit of the whole series."""
        return self.commits[self.patches[-1].name] if self.patches else self.base

    def non_canonical(self) -> list[str]:
        """Return the names of the patches whose file is not what `export` writes."""
        exported = export(self.git, self.commits.values())
        return [
            patch.name
            for patch, content in zip(self.patches, exported, strict=True)
            if patch.content != content
        ]

    def without(self, name: str) -> list[str]:
        """Leave the whole series but patch ``name`` in the worktree.

        Later patches of the same files stay if git can merge around the gap; otherwise they
        depend on it and are reverted too.

        Returns:
            The names of the patches that were reverted, latest first.
        """
        self.git.run("reset", "--quiet", "--hard", self.tip)
        if self._revert([name]):
            return [name]
        position = [patch.name for patch in self.patches].index(name)
        paths = {change.path for change in self.patches[position].changes}
        dependents = [
            patch.name
            for patch in reversed(self.patches[position + 1 :])
            if paths.intersection(change.path for change in patch.changes)
        ]
        if not dependents or not self._revert([*dependents, name]):
            raise BuildError(f"{name} cannot be reverted, nor with {dependents}")
        return [*dependents, name]

    def _revert(self, names: list[str]) -> bool:
        commits = [self.commits[name] for name in names]
        if self.git.attempt("revert", "--no-edit", *commits).returncode == 0:
            return True
        self.git.run("revert", "--abort")
        return False
