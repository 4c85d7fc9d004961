"""The doctor tells patched and intact from damaged, shadowed, stock and missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from buildtools.doctor import Verdict, inspect_installed, inspect_wheel
from buildtools.manifest import NAME
from buildtools.paths import ROOT
from tests.buildtools.installation import Installation, rewritten
from tests.buildtools.toy import write_files

HELPERS = "megatron/core/datasets/utils.py"


def test_the_wheel_is_verified_and_says_what_is_in_it(wheel: Path) -> None:
    report = inspect_wheel(wheel)

    assert report.verdict is Verdict.VERIFIED
    text = "\n".join(report.lines)
    for name in (ROOT / "patches" / "series").read_text().splitlines()[1:]:
        assert name in text
    assert report.lines[-1].startswith("VERIFIED: all ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda name, data: data + b"#" if name == HELPERS else data,
            f"{HELPERS}: patched file differs from what was built",
        ),
        (
            lambda name, data: None if name == "megatron/core/__init__.py" else data,
            "megatron/core/__init__.py: missing (shipped file)",
        ),
        (
            lambda name, data: None if "helpers_cpp" in name else data,
            "the compiled dataset helper is missing",
        ),
        (
            lambda name, data: data + b" " if "helpers_cpp" in name else data,
            "differs from its hash in RECORD",
        ),
        (
            lambda name, data: None if name.endswith("RECORD") else data,
            "RECORD is missing",
        ),
        (
            lambda name, data: b"{" if name.endswith(NAME) else data,
            f"{NAME} is damaged",
        ),
        (
            lambda name, data: data.replace(b'"format": 1', b'"format": 2'),
            "format 2, this build.py reads 1",
        ),
        (
            lambda name, data: data.replace(b"\nVersion: 0.19.2+nvme.1", b"\nVersion: 0.19.2"),
            "METADATA says 0.19.2, the manifest 0.19.2+nvme.1",
        ),
    ],
)
def test_a_damaged_wheel_is_not_verified(
    wheel: Path, tmp_path: Path, change: Callable[[str, bytes], bytes | None], message: str
) -> None:
    report = inspect_wheel(rewritten(wheel, tmp_path / "out", change))

    assert report.verdict is Verdict.DAMAGED
    assert message in "\n".join(report.lines)


def test_a_renamed_wheel_is_not_verified(wheel: Path, tmp_path: Path) -> None:
    renamed = tmp_path / wheel.name.replace("nvme.1", "nvme.2")
    shutil.copyfile(wheel, renamed)

    assert inspect_wheel(renamed).verdict is Verdict.DAMAGED


def test_a_stock_wheel_is_not_patched(wheel: Path, tmp_path: Path) -> None:
    stock = rewritten(
        wheel, tmp_path / "out", lambda name, data: None if name.endswith(NAME) else data
    )

    report = inspect_wheel(stock)

    assert report.verdict is Verdict.NOT_PATCHED
    assert "NOT PATCHED" in report.lines[-1]


def test_what_is_no_wheel_is_damaged_and_no_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_text("not a zip")

    assert inspect_wheel(tmp_path / "x.whl").verdict is Verdict.DAMAGED
    assert inspect_wheel(tmp_path / "none.whl").verdict is Verdict.NOT_FOUND


def test_an_installation_is_verified(installation: Installation) -> None:
    assert installation.verdict()[0] is Verdict.VERIFIED


def test_an_edited_installation_is_damaged(installation: Installation) -> None:
    with (installation.site / HELPERS).open("a") as stream:
        stream.write("# edited\n")

    verdict, text = installation.verdict()

    assert verdict is Verdict.DAMAGED
    assert f"{HELPERS}: patched file differs from what was built" in text


def test_a_stray_module_in_an_installation_is_named(installation: Installation) -> None:
    write_files(installation.site, {"megatron/core/left_over.py": ""})

    verdict, text = installation.verdict()

    assert verdict is Verdict.DAMAGED
    assert "megatron/core/left_over.py: not part of what was built" in text


def test_a_checkout_that_shadows_the_installation_is_named(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "checkout", {"megatron/core/__init__.py": ""})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "checkout"))

    verdict, text = installation.verdict()

    assert verdict is Verdict.DAMAGED
    assert f"SHADOWED: `import megatron.core` takes {tmp_path / 'checkout'}" in text


def test_a_stock_installation_is_not_patched(installation: Installation) -> None:
    next(installation.site.glob(f"*.dist-info/{NAME}")).unlink()

    verdict, text = installation.verdict()

    assert verdict is Verdict.NOT_PATCHED
    assert "NOT PATCHED" in text


def test_a_bare_checkout_is_not_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "checkout", {"megatron/core/__init__.py": ""})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "checkout"))

    assert Installation(tmp_path / "env").verdict()[0] is Verdict.NOT_PATCHED


def test_an_environment_without_megatron_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)

    assert Installation(tmp_path / "env").verdict()[0] is Verdict.NOT_FOUND
    assert inspect_installed(str(tmp_path / "none")).verdict is Verdict.NOT_FOUND


def test_the_verdict_is_the_exit_status(installation: Installation, wheel: Path) -> None:
    def status(*arguments: str) -> int:
        command = [sys.executable, str(ROOT / "build.py"), "doctor", *arguments]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert status(str(wheel)) == 0
    assert status("--installed", "--python", installation.python) == 0
    next(installation.site.glob(f"*.dist-info/{NAME}")).unlink()
    assert status("--installed", "--python", installation.python) == 3
    (installation.site / HELPERS).unlink()
    assert status(str(wheel) + ".none") == 4
    assert status() == 2


def _added(wheel: Path, out: Path, members: dict[str, bytes]) -> Path:
    """Copy a wheel, with members added behind RECORD's back."""
    copy = rewritten(wheel, out, lambda name, data: data)
    with zipfile.ZipFile(copy, "a") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return copy


@pytest.mark.parametrize(
    "name",
    [
        "megatron_core-0.19.2+nvme.1.data/purelib/megatron/core/package_info.py",
        "evil.pth",
        "../evil.py",
        "other/__init__.py",
        "megatron/core/__pycache__/package_info.cpython-312.pyc",
        "megatron/core/left_over.py",
    ],
)
def test_a_member_that_was_added_is_named(wheel: Path, tmp_path: Path, name: str) -> None:
    report = inspect_wheel(_added(wheel, tmp_path / "out", {name: b"x"}))

    assert report.verdict is Verdict.DAMAGED
    assert f"DAMAGED: {name}: " in "\n".join(report.lines)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_comes_twice_is_named(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(HELPERS)

    report = inspect_wheel(_added(wheel, tmp_path / "out", {HELPERS: content}))

    assert report.verdict is Verdict.DAMAGED
    assert f"{HELPERS}: comes twice" in "\n".join(report.lines)


def test_a_second_record_in_one_place_is_damage(installation: Installation) -> None:
    stale = installation.site / "megatron_core-0.19.2.dist-info"
    write_files(
        stale, {"METADATA": "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.2\n"}
    )

    verdict, text = installation.verdict()

    assert verdict is Verdict.DAMAGED
    assert "a second installation is recorded" in text


@pytest.mark.parametrize("package", ["core", "training"])
def test_either_package_can_be_shadowed_also_by_a_relative_path(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    write_files(tmp_path / "checkout", {f"megatron/{package}/__init__.py": ""})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "checkout")

    verdict, text = installation.verdict()

    assert verdict is Verdict.DAMAGED
    assert f"SHADOWED: `import megatron.{package}` takes" in text


def test_the_current_directory_alone_shadows_nothing(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "checkout", {"megatron/core/__init__.py": ""})
    monkeypatch.chdir(tmp_path / "checkout")

    assert installation.verdict()[0] is Verdict.VERIFIED


@pytest.mark.parametrize(
    "name", ["megatron/core/package_info.abi3.so", "megatron/core/package_info.pyc"]
)
def test_a_binary_that_python_would_prefer_is_named(installation: Installation, name: str) -> None:
    (installation.site / name).write_bytes(b"x")

    verdict, text = installation.verdict()

    assert verdict is Verdict.DAMAGED
    assert f"{name}: not part of what was built" in text


def test_noise_of_the_environment_does_not_confuse(installation: Installation) -> None:
    (installation.site / "noise.pth").write_text("import sys; print('noise')\n")

    assert installation.verdict()[0] is Verdict.VERIFIED


def _doctor(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "build.py"), "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_directory_is_told_from_the_wheel_in_it(tmp_path: Path) -> None:
    write_files(tmp_path, {"dist/m.whl": "", "dist/m.whl.sha256": "", "empty/x": ""})

    full, empty, none = (_doctor(str(tmp_path / name)) for name in ("dist", "empty", "none"))

    assert full[0] == empty[0] == none[0] == 4
    assert f"dist: a directory, expected a wheel file; it holds {tmp_path}/dist/m.whl\n" in full[1]
    assert "empty: a directory without a wheel" in empty[1]
    assert "`build.py wheel` makes one in dist/" in empty[1] and "--installed" in empty[1]
    assert "none: no such file; `build.py wheel` makes" in none[1]


def test_a_directory_is_told_from_the_interpreter_in_it(tmp_path: Path) -> None:
    status, text = _doctor("--installed", "--python", str(tmp_path))

    assert status == 4
    assert f"a directory, expected an interpreter, such as {tmp_path}/bin/python" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.whl", "--python", "py"], "x.whl is a wheel file, --python is about what is installed"),
        (["x.whl", "--installed"], "x.whl is a wheel file, --installed is about what is installed"),
        (["--python", "py"], "nothing is named that could be examined"),
        ([], "nothing is named that could be examined"),
        ([""], "WHEEL is empty"),
        (["--installed", "--python", ""], "--python is empty"),
    ],
)
def test_what_does_not_say_what_to_examine_is_wrong_usage(
    arguments: list[str], message: str
) -> None:
    status, text = _doctor(*arguments)

    assert status == 2
    assert message in text
    assert "expected `doctor WHEEL`, or `doctor --installed [--python PYTHON]`" in text
