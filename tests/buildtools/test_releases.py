"""Where a rebase may go: a path, a known or a new version, a ref; and never something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from buildtools.archive import sha256_of
from buildtools.console import BuildError
from buildtools.git import Git
from buildtools.objects import entries_below, tree_id
from buildtools.pin import Pin, read_pin, with_release, with_values
from buildtools.releases import Shop, Target, fetch_target
from tests.buildtools.toy import (
    FILES,
    MODEL,
    PACKAGE_INFO,
    Toy,
    sdist_members,
    write_archive,
    write_files,
)

NEXT = FILES | {PACKAGE_INFO: FILES[PACKAGE_INFO].replace("PATCH = 3", "PATCH = 4")}


class Index:
    """Stands for the package index, with release 1.2.4 in it."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.asked: list[str] = []
        self.archive = write_archive(toy.root / "toy-1.2.4.tar.gz", sdist_members(NEXT))
        self.shop = Shop(toy.root / "cache", self.known, self.new)

    def known(self, pin: Pin, directory: Path) -> None:
        self.asked.append(f"{pin.version} {pin.sdist_sha256}")
        (directory / pin.sdist).write_bytes(self.archive.read_bytes())

    def new(self, name: str, version: str, directory: Path) -> None:
        self.asked.append(f"{name} {version}")
        if version != "1.2.4":
            raise BuildError(f"No matching distribution found for {name}=={version}")
        (directory / self.archive.name).write_bytes(self.archive.read_bytes())

    def fetch(self, text: str, pin: Pin | None = None) -> Target:
        return fetch_target(text, pin or self.toy.pin, self.shop, self.toy.root / "fetched")


@pytest.fixture
def index(toy: Toy) -> Index:
    return Index(toy)


def test_a_new_version_is_downloaded_and_its_hash_recorded(index: Index) -> None:
    target = index.fetch("1.2.4")

    assert index.asked == ["toy 1.2.4"]
    assert target.sha256 == sha256_of(index.archive)
    assert (target.version, target.sdist, target.git_ref) == ("1.2.4", "toy-1.2.4.tar.gz", "v1.2.4")
    fetched = index.toy.root / "fetched"
    assert target.pristine == tree_id(entries_below(fetched))
    assert not (fetched / "LICENSE").exists(), "only what is shipped"
    cached = index.toy.root / "cache" / "sdist" / target.sha256 / target.sdist
    assert cached.exists(), "`build.py pin` takes it from there"


def test_a_known_version_must_have_its_hash(index: Index) -> None:
    good = replace(index.toy.pin, releases={"1.2.4": sha256_of(index.archive)})
    bad = replace(index.toy.pin, releases={"1.2.4": "0" * 64})

    with pytest.raises(BuildError, match=f"wrong sha256: expected {'0' * 64}"):
        index.fetch("1.2.4", bad)
    assert index.fetch("1.2.4", good).sha256 == sha256_of(index.archive)
    assert index.asked == [f"1.2.4 {'0' * 64}", f"1.2.4 {sha256_of(index.archive)}"]


def test_an_archive_that_says_a_known_version_must_have_its_hash(index: Index) -> None:
    bad = replace(index.toy.pin, releases={"1.2.4": "0" * 64})

    with pytest.raises(BuildError, match=r"wrong sha256: the release 1\.2\.4 has 0000"):
        index.fetch(str(index.archive), bad)


def test_an_archive_of_another_version_than_asked_for_is_refused(index: Index) -> None:
    index.archive.write_bytes(index.toy.sdist.read_bytes())

    with pytest.raises(BuildError, match=r"expected version 1\.2\.4, the source says 1\.2\.3"):
        index.fetch("1.2.4")


def test_an_unknown_version_is_the_indexs_to_refuse(index: Index) -> None:
    with pytest.raises(BuildError, match="No matching distribution found"):
        index.fetch("9.9")


def test_offline_takes_what_the_cache_vouches_for(index: Index) -> None:
    index.fetch("1.2.4")
    known = replace(index.toy.pin, releases={"1.2.4": sha256_of(index.archive)})
    shop = Shop(index.toy.root / "cache", None, None)

    with pytest.raises(BuildError, match=r"--offline: toy 1\.2\.4 is not in \[releases\]"):
        fetch_target("1.2.4", index.toy.pin, shop, index.toy.root / "again")
    assert fetch_target("1.2.4", known, shop, index.toy.root / "again").version == "1.2.4"
    with pytest.raises(BuildError, match="--offline: main of"):
        fetch_target("git:main", known, shop, index.toy.root / "more")


def test_a_path_that_exists_wins_over_a_version(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "cwd" / "1.2.4", NEXT | {MODEL: "x = 1\n"})
    monkeypatch.chdir(tmp_path / "cwd")

    target = index.fetch("1.2.4")

    assert index.asked == []
    assert target.sha256 == "", "nobody vouches for a directory of an unknown release"
    assert (index.toy.root / "fetched" / MODEL).read_text() == "x = 1\n"


def test_a_ref_gives_the_commit(index: Index) -> None:
    git = Git(write_files(index.toy.root / "upstream.git", NEXT | {"LICENSE": "terms\n"}))
    git.init()
    commit = git.commit_all("release")
    git.run("branch", "core_r1")

    target = index.fetch("git:core_r1")

    assert (target.git_ref, target.git_commit, target.sha256) == ("core_r1", commit, "")
    assert target.version == "1.2.4"
    with pytest.raises(BuildError, match="cannot fetch nowhere"):
        fetch_target("git:nowhere", index.toy.pin, index.shop, index.toy.root / "again")


@pytest.mark.parametrize("text", ["", "git:", "core_v0.20.0", "v1.2", "1", "no/such/path", "main"])
def test_anything_else_is_an_error(index: Index, text: str) -> None:
    with pytest.raises(BuildError, match="expected a version like"):
        index.fetch(text)


def test_a_directory_that_is_no_megatron_is_refused(index: Index, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="not a Megatron-core source tree"):
        index.fetch(str(write_files(tmp_path / "other", {"setup.py": "x\n"})))


def test_values_of_the_pin_are_replaced_one_by_one(toy: Toy) -> None:
    toy.write_pin()
    text = toy.pin_file.read_text()

    new = with_values(text, {"source.index.sha256": "abc", "source.git.ref": 'x"y\\z'})
    toy.pin_file.write_text(with_release(with_release(new, "9.9", "f" * 64), "9.9", "0" * 64))

    pin = read_pin(toy.pin_file)
    assert (pin.sdist_sha256, pin.git_ref) == ("abc", 'x"y\\z')
    assert pin.published_sha256 == "", "the other sha256 is another one"
    assert pin.releases == {"9.9": "f" * 64}
    assert "# known\n" in toy.pin_file.read_text()
    assert with_values(text, {"upstream.version": "1.2.3"}) == text
    with pytest.raises(BuildError, match=r"exactly one line \[nowhere\]"):
        with_values(text, {"nowhere.key": "x"})
    with pytest.raises(BuildError, match=r"\[upstream\] needs exactly one line `key"):
        with_values(text, {"upstream.key": "x"})
    with pytest.raises(BuildError, match=r"exactly one line \[releases\]"):
        with_release(text.replace("[releases]", "[other]"), "1", "2")
