"""A directory's report says whether it can be used, how, and how fast; and nothing is left."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core.optimizer.nvme_state_store import probe as probe_module
from megatron.core.optimizer.nvme_state_store.__main__ import main
from megatron.core.optimizer.nvme_state_store.errors import StateFileError
from megatron.core.optimizer.nvme_state_store.probe import Report, probe
from megatron.core.optimizer.nvme_state_store.state_file import StateFile

from buildtools.paths import WORK
from tests.store.failing_file import small_tmpfs, start_process

MIB = 1 << 20
SMALL = ["--gb", "0.004", "--chunk-mb", "1", "--threads", "2"]


@pytest.fixture
def disk() -> Iterator[Path]:
    WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as scratch:
        yield Path(scratch)


def leftovers(directory: Path) -> list[str]:
    """Return the names of what is there, but the lock that stays for ever."""
    return [path.name for path in directory.iterdir() if not path.name.startswith(".state-store")]


def test_a_good_directory_is_measured_and_left_as_it_was(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (disk / "made").mkdir()

    assert main(["probe", str(disk / "made"), *SMALL]) == 0

    text = capsys.readouterr().out
    assert text.startswith(f"{disk / 'made'}: ")
    assert " GB free\n" in text
    assert "direct I/O: read " in text
    assert "CANNOT BE USED" not in text
    assert leftovers(disk / "made") == []


def test_json_has_the_same_facts(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(disk), str(disk), "--json", *SMALL]) == 0

    reports = json.loads(capsys.readouterr().out)
    assert [report["directory"] for report in reports] == [str(disk)] * 2
    for report in reports:
        assert set(report) == set(Report.__dataclass_fields__)
        assert not report["error"]
        assert (
            min(report[name] for name in ("read_gb_per_s", "write_gb_per_s", "mixed_gb_per_s")) > 0
        )


def test_without_direct_io_the_numbers_are_said_to_include_the_page_cache(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "probe_direct_io", lambda directory: "planted")

    report = probe(disk, 0.004, 2, MIB)

    assert "BUFFERED I/O" in str(report)
    assert any("planted" in text and "page cache" in text for text in report.warnings)
    assert report.read_gb_per_s > 0


def test_buffered_is_measured_if_it_was_asked_for(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", str(disk), "--buffered", *SMALL]) == 0

    text = capsys.readouterr().out
    assert "BUFFERED I/O: read " in text
    assert "--buffered was given" in text


def test_memory_is_warned_of(tmp_path: Path) -> None:
    """On a tmpfs: that it is one, and, where it takes direct I/O, that this changes nothing."""
    with small_tmpfs(tmp_path / "small", "size=64m") as small:
        report = probe(small, 0.004, 2, MIB)

    assert report.filesystem == "tmpfs"
    assert any("is memory, not a disk" in text for text in report.warnings)
    assert report.no_direct_io or any("in memory all the same" in t for t in report.warnings)


def test_a_missing_directory_is_not_made(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below an unmounted disk's place it would be on another disk, whose numbers nobody wants."""
    assert main(["probe", str(disk / "typo"), *SMALL]) == 1

    assert "no such directory; is the disk mounted?" in capsys.readouterr().out
    assert not (disk / "typo").exists()


def test_a_file_in_the_way_is_an_error(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "file").write_text("in the way")

    assert main(["probe", str(disk / "file"), str(disk), *SMALL]) == 1

    text = capsys.readouterr().out
    assert "CANNOT BE USED" in text
    assert "remove the file that is in the way" in text
    assert "direct I/O: read" in text, "the other one is measured all the same"


def test_a_directory_without_the_space_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real blocks: a sparse file would have been made."""
    with small_tmpfs(tmp_path / "small", "size=16m") as small:
        assert main(["probe", str(small), "--gb", "0.1", "--json"]) == 1
        (report,) = json.loads(capsys.readouterr().out)
        assert leftovers(small) == []

    assert "reserve failed" in report["error"]
    assert "bytes free" in report["error"]
    assert report["filesystem"] == "tmpfs"
    assert report["free_gb"] == pytest.approx(16 * MIB / 1e9, rel=0.01)
    assert report["warnings"] == []


def test_a_disk_that_fails_under_load_is_an_error(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StateFile.read_into

    def read_into(file: StateFile, offset: int, buffer: memoryview) -> None:
        if offset == 2 * MIB and file.path.name == "state.bin":
            raise StateFileError(file.path, "read", offset=offset, errno=5)
        real(file, offset, buffer)

    monkeypatch.setattr(StateFile, "read_into", read_into)

    report = probe(disk, 0.004, 2, MIB)

    assert "read failed at offset 2097152" in report.error
    assert leftovers(disk) == []


@pytest.mark.parametrize("argument", ["--gb", "--threads", "--chunk-mb"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "x"])
def test_sizes_must_be_positive(
    argument: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["probe", "/nowhere", argument, value])

    assert caught.value.code == 2
    assert argument in capsys.readouterr().err


def test_it_runs_without_torch_and_megatron(disk: Path) -> None:
    """In a Python without site-packages."""
    script = (
        "from nvme_state_store.__main__ import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    process = start_process(script, "probe", disk, *SMALL)
    out, err = process.communicate()

    assert process.returncode == 0, err
    assert out.startswith(str(disk))
