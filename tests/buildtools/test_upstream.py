"""Every kind of source gives the pinned tree, or an error that says what was expected and got."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from buildtools.archive import sha256_of
from buildtools.console import BuildError
from buildtools.git import Git
from buildtools.objects import entries_below
from buildtools.pin import Pin
from buildtools.upstream import Download, Source, cached_sdist, fetch
from tests.buildtools.toy import (
    FILES,
    MODEL,
    NOT_SHIPPED,
    PACKAGE_INFO,
    Toy,
    sdist_members,
    write_archive,
    write_files,
)


def _fetch(
    toy: Toy, source: Source, *, pin: Pin | None = None, download: Download | None = None
) -> Path:
    destination = toy.root / "fetched" / "pristine"
    fetch(pin or toy.pin, source, destination, toy.root / "cache", download)
    return destination


def _repository(toy: Toy, files: dict[str, str]) -> str:
    """Make the upstream git repository, tagged, and return the tagged commit."""
    git = Git(write_files(Path(toy.pin.git_url), files))
    git.init()
    commit = git.commit_all("release")
    git.run("tag", toy.pin.git_ref)
    (git.worktree / MODEL).write_text("later = 1\n")
    git.commit_all("later")
    return commit


def _from_index(toy: Toy, scratch: Path) -> tuple[Source, Pin]:
    return Source("index"), toy.pin


def _from_archive(toy: Toy, scratch: Path) -> tuple[Source, Pin]:
    return Source("path", toy.sdist), toy.pin


def _from_directory(toy: Toy, scratch: Path) -> tuple[Source, Pin]:
    return Source("path", write_files(scratch / "src", FILES | NOT_SHIPPED)), toy.pin


def _from_checkout(toy: Toy, scratch: Path) -> tuple[Source, Pin]:
    root = write_files(scratch / "src", FILES | NOT_SHIPPED)
    Git(root).init()
    (root / "link").symlink_to("LICENSE")
    return Source("path", root), toy.pin


def _from_git_tag(toy: Toy, scratch: Path) -> tuple[Source, Pin]:
    _repository(toy, FILES | NOT_SHIPPED)
    return Source("git"), toy.pin


def _from_git_commit(toy: Toy, scratch: Path) -> tuple[Source, Pin]:
    commit = _repository(toy, FILES | NOT_SHIPPED)
    return Source("git"), replace(toy.pin, git_commit=commit)


@pytest.mark.parametrize(
    "kind",
    [
        _from_index,
        _from_archive,
        _from_directory,
        _from_checkout,
        _from_git_tag,
        _from_git_commit,
    ],
)
def test_every_kind_of_source_gives_the_pinned_tree(
    toy: Toy, tmp_path: Path, kind: Callable[[Toy, Path], tuple[Source, Pin]]
) -> None:
    source, pin = kind(toy, tmp_path)

    pristine = _fetch(toy, source, pin=pin, download=toy.download)

    assert sorted(entries_below(pristine)) == sorted(FILES)


def test_a_commit_that_is_not_recorded_yet_is_said(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = _repository(toy, FILES)
    said = f"warning: v1.2.3 is commit {commit}: record it as `commit` in [source.git]"

    _fetch(toy, Source("git"), download=toy.download)
    assert said in capsys.readouterr().err
    shutil.rmtree(toy.root / "fetched")
    _fetch(toy, Source("git"), pin=replace(toy.pin, git_commit=commit), download=toy.download)
    assert "record it" not in capsys.readouterr().err


def test_a_tag_that_was_moved_is_refused(toy: Toy) -> None:
    _repository(toy, FILES | {MODEL: "moved = 1\n"})

    with pytest.raises(BuildError, match=f"expected tree {toy.pin.lock.pristine}, got "):
        _fetch(toy, Source("git"), download=toy.download)

    assert not list((toy.root / "cache").rglob("*.tar"))


def test_a_commit_that_is_not_there_is_refused(toy: Toy) -> None:
    _repository(toy, FILES)
    pin = replace(toy.pin, git_commit="1" * 40)

    with pytest.raises(BuildError, match=r"cannot fetch 1{40} from "):
        _fetch(toy, Source("git"), pin=pin, download=toy.download)


def test_the_id_of_a_tag_is_no_commit(toy: Toy) -> None:
    commit = _repository(toy, FILES)
    git = Git(Path(toy.pin.git_url))
    git.run("tag", "-a", "-m", "annotated", "annotated", commit)
    tag = git.run("rev-parse", "annotated")

    with pytest.raises(BuildError, match=f"expected commit {tag}, got {commit}"):
        _fetch(toy, Source("git"), pin=replace(toy.pin, git_commit=tag), download=toy.download)


def test_a_directory_of_other_content_is_refused(toy: Toy, tmp_path: Path) -> None:
    root = write_files(tmp_path / "src", FILES | {MODEL: "edited = 1\n"})

    with pytest.raises(BuildError, match=f"expected tree {toy.pin.lock.pristine}, got "):
        _fetch(toy, Source("path", root))


def test_a_directory_of_another_version_says_which(toy: Toy, tmp_path: Path) -> None:
    info = FILES[PACKAGE_INFO].replace("PATCH = 3", "PATCH = 4")
    root = write_files(tmp_path / "src", FILES | {PACKAGE_INFO: info})

    with pytest.raises(BuildError, match=r"expected 1\.2\.3, got 1\.2\.4"):
        _fetch(toy, Source("path", root))


def test_a_directory_without_megatron_is_no_source(toy: Toy, tmp_path: Path) -> None:
    root = write_files(tmp_path / "src", {"setup.py": "x = 1\n"})

    with pytest.raises(BuildError, match="no file matches megatron/core"):
        _fetch(toy, Source("path", root))


def test_a_link_among_the_sources_is_refused(toy: Toy, tmp_path: Path) -> None:
    root = write_files(tmp_path / "src", FILES)
    (root / "megatron/core/linked.py").symlink_to("model.py")

    with pytest.raises(BuildError, match=r"linked\.py: refused: a link or a device"):
        _fetch(toy, Source("path", root))


def test_an_archive_of_another_version_inside_is_refused(toy: Toy) -> None:
    info = FILES[PACKAGE_INFO].replace("MINOR = 2", "MINOR = 3")
    write_archive(toy.sdist, sdist_members(FILES | {PACKAGE_INFO: info}))
    pin = replace(toy.pin, sdist_sha256=sha256_of(toy.sdist))

    with pytest.raises(BuildError, match=r"wrong version inside .* expected 1\.2\.3, got 1\.3\.3"):
        _fetch(toy, Source("path", toy.sdist), pin=pin)


def test_a_wrong_hash_is_refused_and_does_not_stay_in_the_cache(toy: Toy) -> None:
    write_archive(toy.sdist, sdist_members(FILES))

    with pytest.raises(
        BuildError, match=f"wrong sha256: expected {toy.pin.sdist_sha256}, got [0-9a-f]{{64}}"
    ):
        _fetch(toy, Source("index"), download=toy.download)

    assert [path for path in (toy.root / "cache").rglob("*") if path.is_file()] == []
    assert not (toy.root / "fetched" / "pristine").exists()


def test_a_truncated_archive_with_a_matching_hash_is_refused(toy: Toy) -> None:
    toy.sdist.write_bytes(toy.sdist.read_bytes()[:-60])
    pin = replace(toy.pin, sdist_sha256=sha256_of(toy.sdist))

    with pytest.raises(BuildError, match="damaged or truncated archive"):
        _fetch(toy, Source("path", toy.sdist), pin=pin)

    assert list((toy.root / "fetched").iterdir()) == []


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (_member("/etc/passwd"), "'/etc/passwd' is absolute"),
        (_member("toy-1.2.3/../../escape.py"), "leaves the tree through '..'"),
        (_member("toy-1.2.3/a.py", tarfile.SYMTYPE, "/etc/passwd"), "is a symbolic link"),
        (_member("toy-1.2.3/a.py", tarfile.LNKTYPE, "toy-1.2.3/setup.py"), "is a hard link"),
        (_member("toy-1.2.3/null", tarfile.CHRTYPE), "is a device, pipe or unknown member"),
        (_member("toy-1.2.3/pipe", tarfile.FIFOTYPE), "is a device, pipe or unknown member"),
        (_member("toy-1.2.3/.git/config"), "lies in a .git directory"),
        (_member("toy-1.2.3/./a.py"), "is not a plain relative path"),
        (_member("other/a.py"), "is not below 'toy-1.2.3'"),
        (_member(f"toy-1.2.3/{MODEL}"), "comes twice"),
    ],
)
def test_an_unsafe_member_is_refused_and_nothing_is_left_behind(
    toy: Toy, member: tarfile.TarInfo, reason: str
) -> None:
    write_archive(toy.sdist, [*sdist_members(FILES), (member, b"")])
    pin = replace(toy.pin, sdist_sha256=sha256_of(toy.sdist))

    with pytest.raises(BuildError) as caught:
        _fetch(toy, Source("path", toy.sdist), pin=pin)

    assert reason in str(caught.value)
    assert list((toy.root / "fetched").iterdir()) == []
    assert not list(toy.root.parent.rglob("escape.py"))


def test_the_cache_serves_offline(toy: Toy) -> None:
    with pytest.raises(BuildError, match=r"--offline: toy-1\.2\.3\.tar\.gz is not in the cache"):
        _fetch(toy, Source("index"))
    cached_sdist(toy.pin, toy.root / "cache", toy.download)

    assert sorted(entries_below(_fetch(toy, Source("index")))) == sorted(FILES)


def test_git_sources_serve_offline_once_fetched(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="--offline"):
        _fetch(toy, Source("git"))
    _repository(toy, FILES)
    _fetch(toy, Source("git"), download=toy.download).rename(tmp_path / "first")
    Path(toy.pin.git_url).rename(tmp_path / "gone")

    assert sorted(entries_below(_fetch(toy, Source("git")))) == sorted(FILES)


def test_a_damaged_cache_is_noticed_and_emptied(toy: Toy) -> None:
    cached = cached_sdist(toy.pin, toy.root / "cache", toy.download)
    cached.write_bytes(b"damaged")

    with pytest.raises(BuildError, match=r"wrong sha256: .*removed from the cache"):
        _fetch(toy, Source("index"))

    assert sorted(entries_below(_fetch(toy, Source("index"), download=toy.download))) == sorted(
        FILES
    )


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(BuildError, match="--source nowhere: expected index, git, or an archive or"):
        Source.parse("nowhere")


def test_a_git_source_leaves_the_users_repository_alone(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks and wrappers set GIT_DIR; the fetch must not go there."""
    _repository(toy, FILES)
    mine = Git(write_files(tmp_path / "mine", {"a": "a"}))
    mine.init()
    head = mine.commit_all("mine")
    before = entries_below(tmp_path / "mine")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "mine" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "mine"))

    _fetch(toy, Source("git"), download=toy.download)

    assert entries_below(tmp_path / "mine") == before
    assert mine.run("rev-parse", "HEAD") == head


@pytest.mark.parametrize("changes", [{"git_ref": "--upload-pack=x"}, {"git_url": "--exec=x"}])
def test_a_ref_or_url_is_never_an_option(toy: Toy, changes: dict[str, str]) -> None:
    with pytest.raises(BuildError, match="must not start with '-'"):
        _fetch(toy, Source("git"), pin=replace(toy.pin, **changes), download=toy.download)  # type: ignore[arg-type]


def test_links_outside_the_shipped_files_do_not_matter_to_a_git_source(toy: Toy) -> None:
    write_files(Path(toy.pin.git_url), {"README.md": "x"})
    (Path(toy.pin.git_url) / "AGENTS.md").symlink_to("README.md")
    _repository(toy, FILES)

    assert sorted(entries_below(_fetch(toy, Source("git"), download=toy.download))) == sorted(FILES)


def test_a_damaged_git_cache_is_noticed_and_emptied(toy: Toy, tmp_path: Path) -> None:
    _repository(toy, FILES)
    _fetch(toy, Source("git"), download=toy.download).rename(tmp_path / "first")
    (cached,) = (toy.root / "cache").rglob("*.tar")
    cached.write_bytes(cached.read_bytes()[:700])

    with pytest.raises(BuildError, match="removed from the cache"):
        _fetch(toy, Source("git"))

    assert not cached.exists()
