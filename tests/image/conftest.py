"""Images are built here with buildah, in a storage of their own and without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from buildtools.bake import STORE
from buildtools.containers import Build, Engine
from buildtools.image import context_directory
from buildtools.paths import ROOT
from tests.buildtools.command import build_py
from tests.buildtools.toy import write_files
from tests.image.rootfs import MOUNTED, SITE, STOCK, make_rootfs, packages

BASE = "localhost/base:1"
VOLUME = ["--volume", f"{packages()}:{MOUNTED}:ro"]


def _why_not() -> str | None:
    """Return why no image can be built here."""
    if shutil.which("buildah") is None:
        return "buildah is not installed (Debian: apt-get install buildah runc)"
    if os.getuid() != 0:
        return "buildah's chroot isolation needs root"
    return None


class Bakery:
    """buildah, and what it has made."""

    engine = Engine("buildah")

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    def buildah(self, *arguments: str) -> str:
        done = subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def base(self, name: str, files: dict[str, str], *settings: str, without: str = "") -> str:
        """Make a base image: the plain one, more files and other settings, less one package."""
        container = self.buildah("from", "--pull-never", BASE)
        if files:
            root = write_files(self.scratch / name, files)
            self.buildah("add", "--quiet", container, str(root), "/")
        if settings:
            self.buildah("config", *settings, container)
        if without:
            self.buildah("run", container, "--", "bash", "-c", f"rm {without}")
        self.buildah("commit", "--quiet", "--rm", container, f"localhost/{name}:1")
        return f"localhost/{name}:1"

    def build(self, build: Build) -> tuple[int, str]:
        """Build without a network; return the exit status and what was printed."""
        command = ["unshare", "--net", *self.engine.command(build)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.returncode, done.stdout

    def image(self, *arguments: str, options: Sequence[str] = ()) -> str:
        """Run `build.py image` without a network; return what it printed."""
        done = subprocess.run(
            [
                "unshare", "--net", sys.executable, str(ROOT / "build.py"), "image",
                "--engine", "buildah", "--offline", *arguments, "--", *VOLUME, *options,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def run(self, image: str, *command: str, user: str = "0") -> tuple[int, str]:
        """Run a command in an image; return the exit status and what was printed."""
        container = self.buildah("from", "--pull-never", image)
        done = subprocess.run(
            ["buildah", "run", "--user", user, *VOLUME, container, "--", *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        self.buildah("rm", container)
        return done.returncode, done.stdout


@pytest.fixture(scope="session")
def bakery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bakery]:
    """A storage with the plain base in it."""
    reason = _why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"no image can be built: {reason}")
    if reason:
        pytest.skip(f"no image can be built: {reason}")
    scratch = tmp_path_factory.mktemp("image")
    settings = f'[storage]\ndriver="overlay"\ngraphroot="{scratch}/storage"\n'
    write_files(scratch, {"storage.conf": f'{settings}runroot="{scratch}/run"\n'})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(scratch / "storage.conf"))
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        made = Bakery(scratch)
        # Compile the modules of torch once, here: the images see them read-only.
        compiling = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-c", f"import {STORE}"]
        subprocess.run(command, env=compiling, capture_output=True, check=True)
        make_rootfs(scratch / "rootfs")
        container = made.buildah("from", "scratch")
        made.buildah("add", "--quiet", container, str(scratch / "rootfs"), "/")
        made.buildah("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", container)
        made.buildah("commit", "--quiet", "--rm", container, BASE)
        yield made
        made.buildah("rm", "--all")
        made.buildah("rmi", "--all", "--force")
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="session")
def lived_in(bakery: Bakery) -> str:
    """A base with a stock megatron-core, pip settings against us, and a conflict of its own."""
    unrelated = "Metadata-Version: 2.1\nName: unrelated\nVersion: 1\nRequires-Dist: nowhere\n"
    files = {f"{SITE}/{name}": text for name, text in STOCK.items()} | {
        f"{SITE}/unrelated-1.dist-info/METADATA": unrelated,
        "etc/pip/constraint.txt": "megatron-core==0.19.2\ntorch==2.11.0a0\n",
    }
    return bakery.base("lived-in", files, "--env", "PIP_CONSTRAINT=/etc/pip/constraint.txt")


@pytest.fixture(scope="session")
def wheel(bakery: Bakery) -> Path:
    """The wheel of this repository, as `build.py image` puts it into the context."""
    done = build_py("image", "--engine", "buildah", "--base", BASE, "--dry-run")
    assert done.returncode == 0, done.stderr
    made = next(context_directory(inside=False).glob("*.whl"))
    return Path(shutil.copy(made, bakery.scratch))


@pytest.fixture(scope="session")
def baked(bakery: Bakery, lived_in: str, wheel: Path) -> str:
    """What the build of the image of the wheel on the lived-in base printed."""
    return bakery.image("--base", lived_in, "--wheel", str(wheel))
