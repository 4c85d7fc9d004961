"""The verbs that change the series, as a user types them, in a clone of this repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from buildtools.paths import PATCHES, ROOT
from buildtools.project import project_recipe
from buildtools.transaction import exclusive
from buildtools.upstream import PACKAGE_INFO, fetch
from tests.buildtools.toy import MESSAGE

GUARD = "test_a_patch_is_made_exported_and_dropped_from_the_command_line"
PARTS = ("build.py", "buildtools", "megatron_overlay", "patches", "requirements", "tests")


class Clone:
    """A copy of this repository's working tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignored = shutil.ignore_patterns("__pycache__")
        for part in (*PARTS, "upstream.toml"):
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, root / part, ignore=ignored)
            else:
                root.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / part, root / part)

    def build(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.root / "build.py"), *arguments],
            cwd=self.root,
            env=os.environ | {"HOME": str(self.root)} | _CACHE,
            capture_output=True,
            text=True,
            check=False,
        )

    def contents(self) -> dict[str, bytes]:
        files = [*(self.root / "patches").iterdir(), self.root / "upstream.toml"]
        return {path.name: path.read_bytes() for path in files}


_HOME = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
_CACHE = {"XDG_CACHE_HOME": _HOME}


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


@pytest.fixture
def next_release(tmp_path: Path) -> Path:
    """The pinned upstream as if its next release had changed nothing but the version."""
    recipe = project_recipe("index", offline=False)
    tree = tmp_path / "next"
    fetch(recipe.pin, recipe.source, tree, recipe.cache, recipe.download)
    info = tree / PACKAGE_INFO
    major, minor, patch = recipe.pin.version.split(".")
    text = info.read_text()
    assert f"PATCH = {patch}\n" in text, (major, minor)
    info.write_text(text.replace(f"PATCH = {patch}\n", f"PATCH = {int(patch) + 90}\n"))
    return tree


def test_the_series_is_opened_and_written_back_byte_for_byte(clone: Clone) -> None:
    before = clone.contents()

    opened = clone.build("edit", "--offline")
    assert opened.returncode == 0, opened.stderr
    assert "git rebase -i --autosquash pristine" in opened.stdout
    written = clone.build("export", "--offline")
    assert (written.returncode, written.stdout) == (0, "nothing has changed\n"), written.stderr

    assert clone.contents() == before
    assert {name: before[name] for name in before if name.endswith(".patch")} == {
        path.name: path.read_bytes() for path in PATCHES.glob("*.patch")
    }
    status = clone.build("status", "--offline")
    assert status.returncode == 0, status.stderr
    assert "all is exported" in status.stdout


def test_a_patch_is_made_exported_and_dropped_from_the_command_line(clone: Clone) -> None:
    clone.build("edit", "--offline")
    readme = clone.root / ".work" / "edit" / "README.md"
    readme.write_text("# Ours\n" + readme.read_text())

    made = clone.build("new", "readme: say whose it is", "--reason", "packaging", "--offline")
    assert made.returncode == 0, made.stderr
    assert "commit --amend" in made.stdout
    status = clone.build("status", "--offline")
    assert status.returncode == 1
    assert "-readme-say-whose-it-is.patch" in status.stdout
    refused = clone.build("clean")
    assert refused.returncode == 1 and "holds work that is not exported" in refused.stderr
    assert readme.exists()

    written = clone.build("export", "--offline")
    (name,) = [name for name in clone.contents() if name.endswith("say-whose-it-is.patch")]
    assert written.returncode == 1
    assert written.stdout == f"new      {name}\n", "it is written, so that no work is lost"
    again, pin, check = (clone.build(verb, "--offline") for verb in ("export", "pin", "check"))
    for refused in (written, again, pin, check):
        assert refused.returncode == 1
        assert f"{name}: FILL-IN is still in its header: 'Why a patch: FILL-IN" in refused.stderr
        assert f"{name}: trailer Guard-Test is still to be filled in" in refused.stderr
    for refused in (written, again):
        assert "patches/ holds your work, but `pin` and `check` refuse it so far" in refused.stderr
        assert "git commit --amend" in refused.stderr
    unfinished = clone.build("status", "--offline")
    assert f"{name}: FILL-IN is still" in unfinished.stdout
    assert "generated files: current" not in unfinished.stdout

    git = ["git", "-C", str(readme.parent)]
    message = MESSAGE.format(subject="readme: say whose it is", path="README.md").replace(
        "tests/test_toy.py::test_toy", f"tests/buildtools/{Path(__file__).name}::{GUARD}"
    )
    subprocess.run([*git, "commit", "--quiet", "--amend", "-m", message], check=True)
    finished = clone.build("export", "--offline")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"changed  {name}\nnext: build.py pin && build.py check\n"

    dropped = clone.build("drop", name[:4], "--because", "an exercise", "--offline")
    assert dropped.returncode == 0, dropped.stderr
    assert f"removed  {name}" in dropped.stdout
    assert b'reason = "an exercise"' in clone.contents()["dropped.toml"]
    assert clone.build("clean").returncode == 0


def test_a_rebase_of_a_series_with_an_unfinished_header_says_so(
    clone: Clone, next_release: Path
) -> None:
    (name, *_) = sorted(path.name for path in (clone.root / "patches").glob("*.patch"))
    path = clone.root / "patches" / name
    path.write_text(path.read_text().replace("\nDrop-When: ", "\nDrop-When: FILL-IN ", 1))

    done = clone.build("rebase", "--to", str(next_release), "--offline")

    assert done.returncode == 1
    assert "written: upstream.toml" in done.stdout
    assert f"{name}: trailer Drop-When is still to be filled in" in done.stderr


def test_of_two_verbs_that_write_the_series_one_is_refused(clone: Clone) -> None:
    before = clone.contents()
    series = clone.root / ".work" / "series"
    with exclusive(series, "rebase"):
        for arguments in (
            ["rebase", "--to", "1.0"],
            ["rebase", "--abort"],
            ["edit"],
            ["new", "x: y z"],
            ["export"],
            ["drop", "1", "--because", "x"],
            ["clean"],
        ):
            done = clone.build(*arguments)

            assert done.returncode == 1, arguments
            assert done.stderr == (
                f"error: build.py rebase (process {os.getpid()}) is at work here: let it end "
                "(`build.py status` says what it leaves), then try again; nothing was changed\n"
            )
    assert clone.contents() == before
    assert series.with_name("series.lock").exists()
    assert "no rebase is open" in clone.build("rebase", "--abort").stderr


def test_two_rebases_at_once_are_one_rebase(clone: Clone, next_release: Path) -> None:
    command = [sys.executable, str(clone.root / "build.py"), "rebase", "--offline", "--to"]
    runs = [
        subprocess.Popen(
            [*command, str(next_release)],
            env=os.environ | {"HOME": str(clone.root)} | _CACHE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    errors = [run.communicate()[1] for run in runs]

    assert sorted(run.returncode for run in runs) == [0, 1], errors
    refused = errors[[run.returncode for run in runs].index(1)]
    assert refused.startswith("error: ") and "is at work here: let it end" in refused


def test_pin_waits_for_a_rebase(clone: Clone) -> None:
    with exclusive(clone.root / ".work" / "series", "rebase"):
        pin = subprocess.Popen(
            [sys.executable, str(clone.root / "build.py"), "pin", "--offline"],
            env=os.environ | _CACHE, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert pin.stderr is not None
        assert pin.stderr.readline() == (
            f"warning: waiting for build.py rebase (process {os.getpid()}) to end\n"
        )
        assert pin.poll() is None
    output, errors = pin.communicate()
    assert pin.returncode == 0, errors
    assert "assembled " in output


def test_a_rebase_from_the_command_line(clone: Clone, next_release: Path) -> None:
    before = clone.contents()

    done = clone.build("rebase", "--to", str(next_release), "--report", "report.json", "--offline")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "written: upstream.toml" in done.stdout and "next: build.py pin" in done.stdout
    report = json.loads((clone.root / "report.json").read_text())
    assert set(report["counts"]) <= {"unchanged", "re-placed"}
    after = clone.contents()
    assert after["upstream.toml"] != before["upstream.toml"]
    assert after["series"] == before["series"]


def test_a_conflict_is_status_1_and_an_abort_leaves_all_as_it_was(
    clone: Clone, next_release: Path
) -> None:
    before = clone.contents()
    (next_release / PACKAGE_INFO).write_text(
        (next_release / PACKAGE_INFO)
        .read_text()
        .replace("import subprocess as _sub", "import subprocess as sub")
    )

    stopped = clone.build("rebase", "--to", str(next_release), "--offline")
    assert stopped.returncode == 1, stopped.stderr
    assert stopped.stdout.startswith("conflict: 0001-package-info-label-the-nvme-build.patch\n")
    for part in (PACKAGE_INFO, ".work/rebase/tree", "rebase --continue", "rebase --abort"):
        assert part in stopped.stdout
    assert clone.build("status", "--offline").returncode == 1
    again = clone.build("rebase", "--to", str(next_release), "--offline")
    assert again.returncode == 1 and "a rebase is open" in again.stderr
    early = clone.build("rebase", "--continue", "--offline")
    assert early.returncode == 1 and "not resolved" in early.stderr
    refused = clone.build("clean")
    assert refused.returncode == 1 and "a rebase is open" in refused.stderr

    assert clone.build("rebase", "--abort", "--offline").returncode == 0
    assert clone.contents() == before
    assert clone.build("status", "--offline").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["rebase"], 2, "one of the arguments --to --continue --abort is required"),
        (["rebase", "--to", "1.0", "--abort"], 2, "not allowed with argument"),
        (["rebase", "--continue", "--abort"], 2, "not allowed with argument"),
        (["rebase", "--continue"], 1, "no rebase is open"),
        (["rebase", "--abort"], 1, "no rebase is open"),
        (["rebase", "--to", "99.99", "--offline"], 1, "is not in [releases]"),
        (["rebase", "--to", "nonsense", "--offline"], 1, "expected a version like"),
        (["rebase", "--to", "", "--offline"], 1, "expected a version like"),
        (["rebase", "--to", "1.0", "--because", "x"], 1, "--because belongs to --continue"),
        (["rebase", "--abort", "--report", "x.md"], 1, "--abort takes neither"),
        (["rebase", "--to", "1.0", "--report", "x.txt"], 1, "expected a name that ends in"),
        (["export"], 1, "no edit tree; open one"),
        (["new", "x: y z"], 1, "no edit tree; open one"),
        (["new"], 2, "required: subject"),
        (["drop", "1"], 2, "required: --because"),
        (["drop", "1", "--because", ""], 1, "say why"),
        (["drop", "77", "--because", "x"], 1, "must name one patch"),
        (["edit", "--output", ""], 1, "--output is empty"),
        (["edit", "--output", "patches"], 1, "is no edit tree"),
    ],
)
def test_a_wrong_command_is_refused_and_changes_nothing(
    clone: Clone, arguments: list[str], status: int, message: str
) -> None:
    before = clone.contents()

    done = clone.build(*arguments)

    assert done.returncode == status, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert clone.contents() == before
