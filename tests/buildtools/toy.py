"""A toy upstream and a toy series on it: small enough to break in every way a test can think of."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from buildtools.apply import ENGINES, Engine
from buildtools.archive import sha256_of
from buildtools.git import Git
from buildtools.objects import entries_below, tree_id
from buildtools.pin import Lock, Pin, read_pin
from buildtools.series import file_name, load_patches
from buildtools.tree import Recipe, assemble
from buildtools.upstream import Download, Source
from buildtools.workspace import Workspace

MODEL = "megatron/core/model.py"
OPTIMIZER = "megatron/core/optimizer.py"
PACKAGE_INFO = "megatron/core/package_info.py"

FILES = {
    "pyproject.toml": '[project]\nname = "toy"\n',
    PACKAGE_INFO: (
        'MAJOR = 1\nMINOR = 2\nPATCH = 3\nPRE_RELEASE = ""\n\n\n'
        "__version__ = '.'.join(map(str, (MAJOR, MINOR, PATCH)))\n\nNAME = \"toy\"\n"
    ),
    MODEL: "".join(f"line_{n} = {n}\n" for n in range(1, 41)),
    OPTIMIZER: "".join(f"rate_{n} = {n}\n" for n in range(1, 21)),
    "megatron/core/empty/__init__.py": "",
    "megatron/training/loop.py": "def train():\n    return 1\n",
}
NOT_SHIPPED = {"LICENSE": "terms\n", "tests/test_model.py": "x = 1\n", "megatron/core/K.cu": "k\n"}

MESSAGE = """{subject}

Why a patch: the line is upstream's.

When off: always on.

Reason: hook
Upstream-Status: pending
Drop-When: never
Tripwires: {path}
Guard-Test: tests/test_toy.py::test_toy
"""


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write ``files`` below ``root``, which is made."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def write_archive(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    """Write a gzipped tar archive of exactly these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def sdist_members(files: dict[str, str]) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Return ``files`` as the members of a source distribution."""
    return [(tarfile.TarInfo(f"toy-1.2.3/{path}"), text.encode()) for path, text in files.items()]


@dataclass
class Toy:
    """The toy project; `break` it by writing to ``patches`` or ``overlay``, then `assemble`."""

    root: Path
    pin: Pin

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def overlay(self) -> Path:
        return self.root / "overlay"

    @property
    def tree(self) -> Path:
        return self.root / "work" / "tree"

    @property
    def sdist(self) -> Path:
        return self.root / "index" / "toy-1.2.3.tar.gz"

    def download(self, pin: Pin, directory: Path) -> None:
        """Stand for the package index."""
        (directory / pin.sdist).write_bytes(self.sdist.read_bytes())

    def recipe(
        self, source: Source | None = None, download: Download | None = None, **changes: object
    ) -> Recipe:
        return Recipe(
            pin=replace(self.pin, **changes),  # type: ignore[arg-type]
            patches=load_patches(self.patches),
            overlay=self.overlay,
            source=source or Source("index"),
            cache=self.root / "cache",
            download=download or self.download,
        )

    def assemble(self, engine: str = "git", **kwargs: object) -> Lock:
        """Assemble against the lock."""
        make: Callable[[], Engine] = ENGINES[engine]
        return assemble(self.recipe(**kwargs), make(), self.tree)  # type: ignore[arg-type]

    @property
    def pin_file(self) -> Path:
        return self.root / "upstream.toml"

    def write_pin(self) -> None:
        """Write the pin into a file, as the project has it."""
        pin = self.pin
        rows = "".join(f'"{version}" = "{sha}"\n' for version, sha in pin.releases.items())
        paths = ", ".join(f'"{path}"' for path in pin.shipped)
        self.pin_file.write_text(
            f'# a toy\n[upstream]\nname = "{pin.name}"\nversion = "{pin.version}"\n\n'
            f"[release]\nrevision = {pin.revision}\nepoch = {pin.epoch}\n\n"
            f'[source.index]\nfilename = "{pin.sdist}"\nsha256 = "{pin.sdist_sha256}"\n\n'
            f'[source.git]\nurl = "{pin.git_url}"\nref = "{pin.git_ref}"\n'
            f'commit = "{pin.git_commit}"\n\n[published]\nsha256 = "{pin.published_sha256}"\n\n'
            f"[releases]\n# known\n{rows}\n[shipped]\npaths = [{paths}]\n\n"
            f'[lock]\npristine = "{pin.lock.pristine}"\npatched = "{pin.lock.patched}"\n'
            f'assembled = "{pin.lock.assembled}"\n'
        )

    def workspace(self) -> Workspace:
        """Return the toy as a place of work, as it is on disk now."""
        if not self.pin_file.exists():
            self.write_pin()
        recipe = replace(self.recipe(), pin=read_pin(self.pin_file))
        return Workspace(recipe, self.pin_file, self.patches, self.root, self.root / "work")

    def contents(self) -> dict[str, bytes]:
        """Return every byte that a verb may change in the toy's repository."""
        files = [*self.patches.rglob("*"), *self.overlay.rglob("*"), self.pin_file]
        return {str(path): path.read_bytes() for path in files if path.is_file()}

    def patch_path(self, number: int) -> Path:
        """Return the path of the patch with this number."""
        return next(self.patches.glob(f"{number:04d}-*.patch"))

    def rewrite(self, number: int, old: str, new: str) -> None:
        """Edit a patch file by hand."""
        path = self.patch_path(number)
        text = path.read_text()
        assert old in text, f"{old!r} is not in {path.name}"
        path.write_text(text.replace(old, new, 1))


EDITS = [
    ("info: label the build", PACKAGE_INFO, "PATCH)))\n", "PATCH))) + '+nvme.1'\n"),
    ("model: change an early line", MODEL, "line_5 = 5\n", "line_5 = 55\n"),
    ("model: change a late line", MODEL, "line_30 = 30\n", "line_30 = 30\nadded = True\n"),
]
"""Subject, file, what is there and what takes its place."""


def make_toy(
    root: Path,
    files: Mapping[str, str] = FILES,
    edits: Sequence[tuple[str, str, str, str]] = EDITS,
) -> Toy:
    """Make the toy project: three patches (two of them of one file) and one overlay file."""
    work = write_files(root / "author", dict(files))
    git = Git(work)
    git.init()
    git.commit_all("pristine")
    pristine = tree_id(entries_below(root / "author", files))
    patches = root / "patches"
    patches.mkdir()
    names = []
    for number, (subject, path, old, new) in enumerate(edits, start=1):
        text = (work / path).read_text()
        (work / path).write_text(text.replace(old, new))
        git.commit_all(MESSAGE.format(subject=subject, path=path))
        names.append(file_name(number, subject))
        patch = git.output(
            "format-patch", "-1", "--stdout", "--zero-commit", "--no-signature", "--no-stat",
            "--full-index", "--keep-subject",
        )  # fmt: skip
        (patches / names[-1]).write_bytes(patch)
    (patches / "series").write_text("# toy\n" + "".join(f"{name}\n" for name in names))
    patched = tree_id(entries_below(work, files))
    write_files(root / "overlay", {"megatron/core/extra/store.py": "x = 1\n"})
    write_files(work, {"megatron/core/extra/store.py": "x = 1\n"})
    assembled = tree_id(entries_below(work, [*files, "megatron/core/extra/store.py"]))
    sdist = write_archive(
        root / "index" / "toy-1.2.3.tar.gz", sdist_members({**files, **NOT_SHIPPED})
    )
    pin = Pin(
        name="toy",
        version="1.2.3",
        revision=1,
        epoch=0,
        sdist="toy-1.2.3.tar.gz",
        sdist_sha256=sha256_of(sdist),
        git_url=str(root / "upstream.git"),
        git_ref="v1.2.3",
        git_commit="",
        published_sha256="",
        shipped=("pyproject.toml", "megatron/core/**/*.py", "megatron/training/**/*.py"),
        lock=Lock(pristine, patched, assembled),
        releases={},
    )
    return Toy(root, pin)
