"""The pin is read whole or not at all, and only its lock is ever rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildtools.console import BuildError
from buildtools.paths import UPSTREAM_TOML
from buildtools.pin import Lock, read_pin, write_lock
from buildtools.tree import verify_label
from tests.buildtools.toy import PACKAGE_INFO, Toy, write_files


def test_the_label_joins_version_and_revision() -> None:
    assert read_pin(UPSTREAM_TOML).label == "0.19.2+nvme.1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("revision = 1", 'revision = "1"', "release.revision must be a int, got '1'"),
        ('version = "0.19.2"', "", "upstream.version must be a str, got None"),
        ("\n[lock]\n", "\n[locked]\n", "lock.pristine must be a str, got None"),
        ("\n[lock]\n", "\n[lock\n", "cannot read the pin"),
    ],
)
def test_a_wrong_pin_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    pin = tmp_path / "upstream.toml"
    pin.write_text(UPSTREAM_TOML.read_text().replace(old, new, 1))

    with pytest.raises(BuildError) as caught:
        read_pin(pin)

    assert message in str(caught.value)


def test_the_lock_is_rewritten_and_nothing_else(tmp_path: Path) -> None:
    pin = tmp_path / "upstream.toml"
    before = UPSTREAM_TOML.read_text()
    pin.write_text(before)
    lock = Lock("1" * 40, "2" * 40, "3" * 40)

    write_lock(pin, lock)

    assert read_pin(pin).lock == lock
    write_lock(pin, read_pin(UPSTREAM_TOML).lock)
    assert pin.read_text() == before
    pin.write_text(before.replace("patched = ", "patcht = "))
    with pytest.raises(BuildError, match="exactly one line"):
        write_lock(pin, lock)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ('__version__ = "1.2.3"\n', r"says 1\.2\.3\+nvme\.1, the patched .* 1\.2\.3:"),
        ("MAJOR = 1\n", r"says 1\.2\.3\+nvme\.1, the patched .* None:"),
        ('import os\n__version__ = "1.2.3+nvme.1"\n', "line 1 imports a module"),
        ('__version__ = open("/etc/hostname").read()\n', "does not run: NameError"),
        ("MAJOR = \n", "cannot read"),
    ],
)
def test_a_wrong_label_is_refused(toy: Toy, tmp_path: Path, info: str, message: str) -> None:
    write_files(tmp_path, {PACKAGE_INFO: info})

    with pytest.raises(BuildError, match=message):
        verify_label(tmp_path, toy.pin)
