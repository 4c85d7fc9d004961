"""Fixtures of the build tool's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildtools.apply import GitEngine
from buildtools.environments import build_environment
from buildtools.project import make_wheel, project_recipe
from tests.buildtools.author import Author
from tests.buildtools.installation import Installation
from tests.buildtools.mover import Mover
from tests.buildtools.toy import Toy, make_toy, write_files


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A toy upstream with a sound series and overlay."""
    return make_toy(tmp_path / "toy")


@pytest.fixture(scope="session")
def build_python() -> Path:
    """Python of the build environment."""
    return build_environment(offline=False)


@pytest.fixture(scope="session")
def wheel(build_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository, built here and now."""
    recipe = project_recipe("index", offline=False)
    return make_wheel(recipe, GitEngine(), build_python, tmp_path_factory.mktemp("wheel"))[0]


@pytest.fixture
def author(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Author:
    """An author with a configuration of their own and the series open."""
    home = write_files(
        tmp_path / "home",
        {".gitconfig": "[user]\nname = Zoë Q\nemail = zoe@example.org\n[core]\nautocrlf = true\n"},
    )
    monkeypatch.setenv("HOME", str(home))
    write_files(toy.root, {"tests/test_toy.py": "def test_toy():\n    pass\n"})
    one = Author(toy)
    one.open()
    return one


@pytest.fixture
def installation(
    tmp_path: Path, wheel: Path, build_python: Path, monkeypatch: pytest.MonkeyPatch
) -> Installation:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    made = Installation(tmp_path / "env")
    made.install(wheel, build_python)
    return made


@pytest.fixture
def mover(toy: Toy, tmp_path: Path) -> Mover:
    toy.write_pin()
    return Mover(toy, tmp_path / "mover")
