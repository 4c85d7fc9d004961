"""The wheel is the tree: reproducible, complete, labelled, and upstream's own where unpatched."""

from __future__ import annotations

import platform
import runpy
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from buildtools.apply import PythonEngine
from buildtools.archive import sha256_of
from buildtools.console import BuildError
from buildtools.environments import require_compiler
from buildtools.git import Git
from buildtools.objects import entries_below, tree_id
from buildtools.paths import cache_dir, scratch_dir
from buildtools.pin import Pin
from buildtools.project import make_wheel, project_recipe
from buildtools.tree import assemble
from buildtools.upstream import Source, fetch
from buildtools.wheel import build_wheel, metadata_of
from tests.buildtools.toy import write_files


def _pristine(destination: Path) -> Path:
    recipe = project_recipe("index", offline=False)
    fetch(recipe.pin, recipe.source, destination, recipe.cache, recipe.download)
    return destination


def _members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


def test_two_builds_are_byte_identical(
    wheel: Path, build_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine, source kind, directory, time zone, locale and set of flags change nothing."""
    source = _pristine(tmp_path / "some" / "other" / "place")
    monkeypatch.setenv("CFLAGS", "-g -O0")
    monkeypatch.setenv("CXXFLAGS", "-g")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    monkeypatch.setenv("SETUPTOOLS_SCM_PRETEND_VERSION", "9")

    recipe = replace(project_recipe("index", offline=False), source=Source("path", source))
    again, digest = make_wheel(recipe, PythonEngine(), build_python, tmp_path / "again")

    assert digest == sha256_of(wheel) == sha256_of(again)
    assert (tmp_path / "again" / f"{again.name}.sha256").read_text() == f"{digest}  {again.name}\n"


def _published(pin: Pin, python: Path) -> Path:
    """Return upstream's own wheel, from the cache or the package index."""
    assert pin.published_sha256, (
        f"upstream.toml: [published] sha256 is empty: nobody has said which wheel upstream "
        f"published as {pin.name} {pin.version}; fill its hash in (a rebase leaves it empty)"
    )
    cached = cache_dir() / "published" / pin.published_sha256
    if not list(cached.glob("*.whl")):
        with scratch_dir(cached.parent) as scratch:
            requirement = scratch / "requirement.txt"
            hashed = f"{pin.name}=={pin.version} --hash=sha256:{pin.published_sha256}\n"
            requirement.write_text(hashed)
            subprocess.run(
                [
                    str(python), "-m", "pip", "download", "--quiet", "--no-deps",
                    "--only-binary=:all:", "--require-hashes", "--dest", str(scratch / "new"),
                    "--requirement", str(requirement),
                ],
                check=True,
            )  # fmt: skip
            (scratch / "new").rename(cached)
    return next(cached.glob("*.whl"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the pinned wheel is for x86_64")
def test_an_unpatched_build_is_the_published_wheel(build_python: Path, tmp_path: Path) -> None:
    """Only the compiled helper, WHEEL and RECORD differ, so the build adds nothing of its own."""
    pin = project_recipe("index", offline=False).pin
    built = build_wheel(_pristine(tmp_path / "tree"), tmp_path / "out", build_python, pin.epoch)
    ours, theirs = _members(built), _members(_published(pin, build_python))
    for members in (ours, theirs):
        (helper,) = [name for name in members if name.endswith(".so")]
        del members[helper]
        for name in ("WHEEL", "RECORD"):
            del members[f"megatron_core-{pin.version}.dist-info/{name}"]

    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_filename_metadata_and_runtime_say_the_same_version(wheel: Path, tmp_path: Path) -> None:
    pin = project_recipe("index", offline=False).pin
    package_info = tmp_path / "package_info.py"
    package_info.write_bytes(_members(wheel)["megatron/core/package_info.py"])

    assert wheel.name.split("-")[1] == pin.label
    assert metadata_of(wheel) == (f"megatron_core-{pin.label}.dist-info", pin.label)
    assert runpy.run_path(str(package_info))["__version__"] == pin.label


def test_without_a_compiler_the_build_stops_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")

    with pytest.raises(BuildError, match="no C\\+\\+ compiler: '/nonexistent/g\\+\\+' does not"):
        require_compiler()


def test_with_a_broken_compiler_the_build_fails(
    build_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream marks the helper optional: its build succeeds and leaves it out."""
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.setenv("CXX", "/bin/false")

    with pytest.raises(BuildError, match=r"the compiled dataset helper .* is not in it"):
        build_wheel(_pristine(tmp_path / "tree"), tmp_path / "out", build_python, 0)


def test_a_stale_tree_ships_nothing_stale(
    wheel: Path, build_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leftovers of an earlier build, in the tree or in setuptools' build/, reach no wheel."""
    stale = {"megatron/core/removed.py": "", "build/lib/megatron/core/removed.py": ""}
    monkeypatch.setattr("buildtools.project.WORK", tmp_path)
    write_files(tmp_path / "tree", stale)
    recipe = project_recipe("index", offline=False)

    fresh, digest = make_wheel(recipe, PythonEngine(), build_python, tmp_path / "out")

    assert digest == sha256_of(wheel)
    assert not [name for name in _members(fresh) if "removed" in name]
    dirty = _pristine(tmp_path / "dirty")
    write_files(dirty, {"build/lib.linux-x86_64-cpython-312/megatron/core/removed.py": ""})
    with pytest.raises(BuildError, match=r"not of the tree: megatron/core/removed.py"):
        build_wheel(dirty, tmp_path / "dirty-out", build_python, 0)


def test_every_source_kind_and_engine_has_the_locked_tree(tmp_path: Path) -> None:
    """The lock holds for the index, an archive, a directory and a git repository alike."""
    recipe = project_recipe("index", offline=False)
    sdist = next((cache_dir() / "sdist" / recipe.pin.sdist_sha256).iterdir())
    directory = _pristine(tmp_path / "pristine")
    write_files(directory, {"LICENSE": "x", "megatron/core/datasets/Makefile": "x", "a.md": "x"})
    url = tmp_path / "upstream.git"
    git = Git(directory)
    git.init()
    git.commit_all("release")
    git.run("tag", recipe.pin.git_ref)
    directory.rename(url)
    pin = replace(recipe.pin, git_url=str(url))
    sources = [Source("index"), Source("path", sdist), Source("path", url), Source("git")]

    for source in sources:
        changed = replace(recipe, pin=pin, source=source, cache=tmp_path / "cache")
        if source.kind == "index":
            changed = replace(changed, cache=recipe.cache)
        lock = assemble(changed, PythonEngine(), tmp_path / "tree")
        assert lock == recipe.pin.lock
        assert tree_id(entries_below(tmp_path / "tree")) == lock.assembled


def test_the_build_runs_on_the_pinned_tools(build_python: Path) -> None:
    listed = subprocess.run(
        [str(build_python), "-m", "pip", "list", "--format=freeze"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pinned = (Path(__file__).parents[2] / "requirements" / "build.txt").read_text()

    for line in pinned.splitlines():
        if "==" in line:
            assert line.split()[0] in listed
    assert sys.version_info[:2] == (3, 12)


def test_a_compiler_that_leaves_rubbish_fails_the_build(
    build_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo rubbish > "$2"; shift; done\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("CXX", str(compiler))

    with pytest.raises(BuildError, match="loading the compiled dataset helper failed"):
        build_wheel(_pristine(tmp_path / "tree"), tmp_path / "out", build_python, 0)


def test_modules_of_the_users_directory_and_path_play_no_part(
    wheel: Path, build_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traps = {name: "raise SystemExit('trap')\n" for name in ("wheel.py", "zipfile.py", "pip.py")}
    write_files(tmp_path / "here", traps | {"setuptools-1.0.dist-info/METADATA": "Version: 1.0\n"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "here"))
    monkeypatch.chdir(tmp_path / "here")

    recipe = project_recipe("index", offline=False)
    _, digest = make_wheel(recipe, PythonEngine(), build_python, tmp_path / "out")

    assert digest == sha256_of(wheel)
