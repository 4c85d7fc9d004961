"""Run git so that neither the user's nor the machine's configuration can change a result.

Measured reasons: ``apply.whitespace=fix`` and ``core.autocrlf`` change the bytes a patch leaves,
with exit status 0; ``git apply`` inside another repository skips every file, with exit status 0;
``diff.noprefix`` and ``format.signature`` change exported patches.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from buildtools.console import BuildError

_SETTINGS = {
    "advice.detachedHead": "false",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.excludesFile": os.devnull,
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "true",
    "diff.renames": "true",
    "gc.auto": "0",
    "init.defaultBranch": "main",
    "merge.conflictStyle": "diff3",
    "merge.renames": "true",
    "rerere.enabled": "false",
    "safe.directory": "*",
}
_IDENTITY = {"NAME": "megatron-nvme", "EMAIL": "megatron-nvme@localhost", "DATE": "@0 +0000"}


def available() -> bool:
    """Return whether a git executable is on PATH."""
    return shutil.which("git") is not None


def _environment(ceiling: Path) -> dict[str, str]:
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.devnull,
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(ceiling),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }
    for role in ("AUTHOR", "COMMITTER"):
        environment.update({f"GIT_{role}_{key}": value for key, value in _IDENTITY.items()})
    return environment


class Git:
    """A repository of ours, driven hermetically.

    Args:
        worktree: directory of the repository; it need not exist before `init`.
    """

    def __init__(self, worktree: Path) -> None:
        self.worktree = worktree

    def attempt(
        self, *arguments: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run ``git arguments`` and return the finished process, whatever its exit status.

        Args:
            arguments: the command and its arguments.
            stdin: what it reads.
            env: variables on top of the hermetic environment.
        """
        settings = [word for key, value in _SETTINGS.items() for word in ("-c", f"{key}={value}")]
        try:
            return subprocess.run(
                ["git", *settings, *arguments],
                cwd=self.worktree,
                env=_environment(self.worktree.parent) | dict(env or {}),
                input=stdin,
                capture_output=True,
                check=False,
                # Not a chmod afterwards: that changes a file's times behind the index, which then
                # "does not match" for the next patch of the file, if the clock has ticked.
                umask=0o022,
            )
        except FileNotFoundError as error:
            raise BuildError(
                "git was not found: install it, or use --engine python-patch"
            ) from error

    def run(
        self, *arguments: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Run ``git arguments`` and return its output without white space around it.

        Raises:
            BuildError: git failed; the message holds its standard error.
        """
        done = self.output(*arguments, stdin=stdin, env=env)
        return done.decode(errors="surrogateescape").strip()

    def output(
        self, *arguments: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None
    ) -> bytes:
        """Run ``git arguments`` and return the bytes it printed.

        Raises:
            BuildError: git failed; the message holds its standard error.
        """
        done = self.attempt(*arguments, stdin=stdin, env=env)
        if done.returncode != 0:
            raise BuildError(
                f"git {' '.join(arguments)} failed with status {done.returncode}: "
                f"{done.stderr.decode(errors='replace').strip()}"
            )
        return done.stdout

    def init(self) -> None:
        """Make ``worktree`` a repository of its own, whatever repository it lies in."""
        self.worktree.mkdir(parents=True, exist_ok=True)
        self.run("init", "--quiet")

    def commit_all(self, message: str) -> str:
        """Commit the whole worktree, ignored files too, and return the commit id."""
        self.run("add", "--all", "--force", ".")
        self.run(
            "commit", "--quiet", "--allow-empty", "--no-verify", "-F", "-", stdin=message.encode()
        )
        return self.run("rev-parse", "HEAD")

    def commit_tree(
        self, tree: str, parent: str, message: str, author: Mapping[str, str] | None = None
    ) -> str:
        """Make a commit of ``tree`` on ``parent``, move no branch to it, and return its id.

        Args:
            tree: id of the tree.
            parent: the commit before it.
            message: the message, which git takes as it is.
            author: the variables that tell the author, see git-commit-tree(1).
        """
        stdin = message.encode()
        return self.run("commit-tree", tree, "-p", parent, "-F", "-", stdin=stdin, env=author)

    def tree_id(self) -> str:
        """Return the id of the tree in the index."""
        return self.run("write-tree")

    def blob(self, commit: str, path: str) -> bytes | None:
        """Return the content of a file in a commit, or None if it has no such file."""
        done = self.attempt("cat-file", "blob", f"{commit}:{path}")
        return done.stdout if done.returncode == 0 else None

    def files(self, commit: str) -> dict[str, bytes]:
        """Return the content of every file of a commit by path."""
        rows = self.output("ls-tree", "-r", "-z", commit).split(b"\0")
        heads, paths = zip(*(row.split(b"\t", 1) for row in rows if row), strict=True)
        wanted = b"\n".join(head.split()[2] for head in heads) + b"\n"
        stream = io.BytesIO(self.output("cat-file", "--batch", stdin=wanted))
        found = {}
        for path in paths:
            size = int(stream.readline().split()[2])
            found[path.decode(errors="surrogateescape")] = stream.read(size)
            stream.read(1)
        return found


def user_identity(directory: Path) -> dict[str, str]:
    """Return the variables of the user's own identity, empty if git knows none.

    Args:
        directory: where to ask: a repository may have an identity of its own.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    found = {}
    for key in ("name", "email"):
        done = subprocess.run(
            ["git", "config", "--get", f"user.{key}"],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip():
            found[f"GIT_AUTHOR_{key.upper()}"] = done.stdout.strip()
    return found if len(found) == 2 else {}


_NETWORK = ("GIT_ASKPASS", "GIT_CONFIG", "GIT_PROXY", "GIT_SSH", "GIT_SSL", "GIT_TERMINAL")
"""Starts of the variables that decide how git reaches a server, not which repository it is in."""


def fetch_archive(
    url: str, ref: str, patterns: Iterable[str], destination: Path, scratch: Path
) -> str:
    """Write a tar archive of ``ref`` of the repository at ``url``; return the commit it names.

    The user's own git configuration holds here (proxies, credentials, mirrors): what arrives is
    verified by its tree id afterwards.

    Args:
        url: the repository.
        ref: tag, branch or commit.
        patterns: what to take, as in ``[shipped] paths``.
        destination: the archive to write.
        scratch: an empty directory for the repository that receives the fetch.

    Raises:
        BuildError: the repository or the ref could not be fetched.
    """
    # A hook or wrapper may have set GIT_DIR: without this, the user's repository would be ours.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key.startswith(_NETWORK)
    } | {"GIT_DIR": str(scratch)}

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BuildError(f"cannot fetch {ref} from {url}: {done.stderr.strip()}")
        return done.stdout.strip()

    if not available():
        raise BuildError("the source kind 'git' needs git, which was not found")
    if ref.startswith("-") or url.startswith("-"):
        raise BuildError(f"[source.git] of upstream.toml: {url} and {ref} must not start with '-'")
    git("init", "--quiet", "--bare")
    git("fetch", "--quiet", "--depth", "1", "--no-tags", "--", url, ref)
    commit = git("rev-parse", "FETCH_HEAD^{commit}")
    # tar.umask would else follow the user's umask, and export-subst the repository's attributes
    # may change bytes: the tree id check after unpacking sees both.
    wanted = [f":(glob){pattern}" for pattern in patterns]
    archive = ["archive", "--format=tar", "-o", str(destination), commit, "--"]
    git("-c", "tar.umask=0022", *archive, *wanted)
    return commit
