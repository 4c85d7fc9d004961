"""Every command in the documents is run: here, in a copy of this repository, or by a named test.

A new command that is neither fails with document and line, and so does a table that has gone stale.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import venv
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from buildtools.paths import ROOT
from buildtools.project import project_recipe
from buildtools.upstream import fetch
from tests.buildtools.command import run
from tests.buildtools.documents import (
    DOCUMENTS,
    SHELL,
    Command,
    all_commands,
    blocks,
    commands,
    has_test,
    is_training,
    text_of,
)

_REBASE = "tests/buildtools/test_series_verbs.py"
TESTED = {
    "docs/planning.md: $ cat *": (
        "tests/store/test_plan_docs.py::test_every_command_prints_what_the_page_shows"
    ),
    "docs/planning.md: $ python -m megatron.core.optimizer.nvme_state_store plan *": (
        "tests/store/test_plan_docs.py::test_every_command_prints_what_the_page_shows"
    ),
    "docs/planning.md: python -m megatron.core.optimizer.nvme_state_store plan --help": (
        "tests/store/test_plan_docs.py::test_the_help_that_the_page_names_is_there"
    ),
    "docs/image.md: python3 build.py image *": (
        "tests/buildtools/test_image.py::test_every_build_command_of_the_documentation_runs"
    ),
    "docs/image.md: docker run --rm *": (
        "tests/image/test_baked.py::test_every_run_command_of_the_documentation_runs"
    ),
    "*: python3 build.py check": (
        "tests/buildtools/test_cli.py::test_check_passes_on_this_repository"
    ),
    "*: python3 build.py train-example": (
        "tests/test_train_example.py::test_the_example_trains_saves_and_resumes_bit_for_bit"
    ),
    "*: python3 build.py wheel --source git": (  # of a repository of its own, not upstream's
        "tests/buildtools/test_wheel.py::test_every_source_kind_and_engine_has_the_locked_tree"
    ),
    "*: python3 build.py drift --latest*": (
        "tests/buildtools/test_drift.py::test_the_newest_release_is_found_and_needs_no_work"
    ),
    "*: python3 build.py rebase --to *": f"{_REBASE}::test_a_rebase_from_the_command_line",
    "*: python3 build.py rebase --continue *": (
        "tests/buildtools/test_rebase.py::test_a_resolution_is_taken_and_the_rest_follows"
    ),
    "*: python3 build.py rebase --abort": (
        f"{_REBASE}::test_a_conflict_is_status_1_and_an_abort_leaves_all_as_it_was"
    ),
}
"""Commands that are run elsewhere: document and command as a pattern, and the test that does it.

With a document, that test looks for such commands in it."""

RUN_HERE = (
    *("python3 build.py ", "python3 ../../build.py ", ".ci/run", "pip install "),
    *("git ", "cd ", "tar ", "QUILT_PATCHES=", "megatron=$(python ", "python ${megatron"),
)
"""How commands begin that are run here. Nothing else is: a document could say `rm`."""

SUBSTITUTIONS = {
    # What `build.py test` does in the environment that it makes, up to running what it found.
    r"python3 build\.py test(?![\w-])": "{python} -m pytest -q --collect-only",
    r"^\.ci/run": "sh -n .ci/run",
    r"\bCOMMIT\b": "HEAD",
    r"--accept NAME": "--accept README.md",
    r"reader:path::function": "reader:{reader}",
    r"(?<= )/tmp\b": "{scratch}",
    r"/path/to/this/repository": "{clone}",
}
"""What stands for something of the reader's own, and what is so slow that a part must do."""

BEFORE = {
    "megatron=$(python": "pip install {wheel}",
    "pip install megatron_core-": "cp {wheel} {wheel}.sha256 .",
    "pip install --no-deps --require-hashes": (
        "sed -n 's,^file:///path/,file://{wheel_dir}/,p' docs/running.md >requirement.txt\n"
        "sed -i \"s/<64 digits>/$(cut -d' ' -f1 {wheel}.sha256)/\" requirement.txt"
    ),
    "git commit -a --fixup": (
        "sed -i 's/^ *from .*nvme_state_store.metrics import/            # Why.\\n&/' "
        "megatron/training/training.py"
    ),
    'python3 ../../build.py new "optimizer:': "echo A line. >>README.md",
    "python3 build.py pin --accept NAME": "{forget} symbol README.md",
    "python3 build.py pin --accept reader:": "{forget} reader {reader}",
}
"""What a reader has done before such a command, without which it has nothing to do."""

EDITOR = " ".join(
    [
        "sed -i",
        "-e 's/^Upstream-Status: FILL-IN.*/Upstream-Status: pending/'",
        "-e 's/^Tripwires: FILL-IN.*/Tripwires: README.md/'",
        "-e 's,^Guard-Test: FILL-IN.*,Guard-Test: tests/patched/test_guards.py::{guard},'",
        "-e 's/FILL-IN //'",
    ]
).replace("{guard}", "test_every_patch_names_a_guard_of_its_own")
"""Fills in the header of a new patch."""

FORGET = """
import pathlib, re, sys
kind, name = sys.argv[1:]
path = pathlib.Path("patches/tripwires.toml")
entry = rf'\\[\\[{kind}\\]\\]\\nname = "{re.escape(name)}"\\n(?:.+\\n)+\\n?'
path.write_text(re.sub(entry, "", path.read_text()))
"""
"""Removes what was accepted of upstream from the record, so that it can be accepted again."""

STATUS = {"cd ../.. && python3 build.py export && python3 build.py pin": 1}
"""What a command ends with if not with 0: a new patch lays a tripwire that is to be accepted."""

READER = "megatron/core/dist_checkpointing/optimizer.py::optim_state_to_sharding_state"


def rows_of(command: Command) -> list[str]:
    """Return the patterns of `TESTED` that match."""
    shown = f"{command.document}: {command.text}"
    return [pattern for pattern in TESTED if fnmatchcase(shown, pattern)]


def is_run_here(command: Command) -> bool:
    return command.text.startswith(RUN_HERE) and not rows_of(command)


def unaccounted(found: Iterable[Command]) -> list[str]:
    """Return the commands that no test runs; arguments of Megatron's: test_document_flags.py."""
    return [
        f"{each}: no test runs it"
        for each in found
        if not (is_training(each) or rows_of(each) or is_run_here(each))
    ]


def stale(found: list[Command]) -> list[str]:
    """Return the entries of the tables that match no command, and tests that are not there."""
    here = [each.text for each in found if is_run_here(each)]
    return [
        *(name for name in TESTED if not any(name in rows_of(each) for each in found)),
        *(name for name in TESTED.values() if not has_test(name)),
        *(name for name in SUBSTITUTIONS if not any(re.search(name, text) for text in here)),
        *(name for name in (*BEFORE, *STATUS) if not any(name in text for text in here)),
    ]


def test_every_command_is_run_by_a_test() -> None:
    assert unaccounted(all_commands()) == []


def test_what_the_tables_name_is_there() -> None:
    assert stale(all_commands()) == []


@pytest.mark.parametrize(
    "text",
    [
        "Do:\n\n    rm -rf it   # gone\n\nx",
        "1. Do:\n\n       rm -rf it\n",
        "```sh\nrm -rf it\n```\n",
        "```console\n$ rm -rf \\\n    it\nremoved\n```\n",
        "    model  8 B\n\n    $ rm -rf it\n    removed\n",
    ],
)
def test_a_new_command_is_found_wherever_it_stands(text: str) -> None:
    (message,) = unaccounted(commands("x.md", f"# X\n\n{text}"))

    assert re.fullmatch(r"x\.md:\d+: (\$ )?rm -rf it: no test runs it", message)


def test_output_and_other_languages_are_no_commands() -> None:
    text = "# X\n\n```python\nrm()\n```\n\n```text\nrm -rf it\n```\n\nand\n    rm -rf it\n"

    assert commands("x.md", text) == []


def test_a_command_that_leaves_the_documents_leaves_a_stale_entry() -> None:
    found = [each for each in all_commands() if "--abort" not in each.text]

    assert stale(found) == ["*: python3 build.py rebase --abort"]


def hidden(document: str, text: str) -> list[str]:
    """Return the lines that look like commands in fences that say they are something else."""
    starts = (*RUN_HERE, "$ ", "python", "docker ", "./")
    return [
        f"{document}:{number}: {line}"
        for block in blocks(text)
        if block.language not in SHELL
        for number, line in block.lines
        if line.startswith(starts)
    ]


def test_no_command_hides_as_a_figure() -> None:
    assert [line for name in DOCUMENTS for line in hidden(name, text_of(name))] == []
    assert hidden("x.md", "```text\npip install x\n```\n") == ["x.md:2: pip install x"]


class Session:
    """A reader with a copy of this repository, in an activated environment of their own.

    Packages come from the caches alone, and the dependencies of Megatron are not installed.
    """

    def __init__(self, root: Path, wheel: Path) -> None:
        self.clone, self.cwd = root / "clone", root / "clone"
        ignored = shutil.ignore_patterns(".git", ".work", "dist", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, self.clone, ignore=ignored)
        (root / "scratch").mkdir()
        venv.create(root / "venv", with_pip=True)
        recipe = project_recipe("index", offline=False)
        fetch(
            recipe.pin,
            recipe.source,
            root / "home" / "Megatron-LM",
            recipe.cache,
            recipe.download,
        )
        (root / "forget.py").write_text(FORGET)
        self.root = root
        self.values = {
            "clone": str(self.clone),
            "scratch": str(root / "scratch"),
            "state": str(root / "state"),
            "wheel": str(wheel),
            "wheel_dir": str(wheel.parent),
            "reader": READER,
            "python": sys.executable,
            "forget": f"{sys.executable} {root / 'forget.py'}",
        }
        self.environment = {
            "PATH": f"{root / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(root / "home"),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "GIT_AUTHOR_NAME": "A Reader",
            "GIT_AUTHOR_EMAIL": "reader@example.org",
            "GIT_COMMITTER_NAME": "A Reader",
            "GIT_COMMITTER_EMAIL": "reader@example.org",
            "GIT_EDITOR": EDITOR,
            "GIT_SEQUENCE_EDITOR": "true",
        }

    def script(self, command: Command) -> str:
        """Return what is run for a command: what must be done before it, and what it leaves."""
        text = command.text
        for pattern, replacement in SUBSTITUTIONS.items():
            text = re.sub(pattern, replacement, text)
        before = [script for start, script in BEFORE.items() if start in command.text]
        lines = [
            *("touch {state}; . {state}; cd {cwd}", *before, "set -a +e", text, "status=$?"),
            "pwd >{state}.cwd; export -p >{state}; exit $status",
        ]
        for name, value in {**self.values, "cwd": str(self.cwd)}.items():
            lines = [line.replace(f"{{{name}}}", value) for line in lines]
        return "\n".join(lines)

    def type(self, command: Command) -> None:
        """Run a command where, and with the variables with which, the one before has ended."""
        script = self.script(command)
        done = run("bash", "-euc", script, **self.environment)
        said = f"{command}\n{script}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == STATUS.get(command.text, 0), said
        self.cwd = Path((self.root / "state.cwd").read_text().strip())


RUN_IN = sorted({each.document for each in all_commands() if is_run_here(each)})


@pytest.mark.parametrize("document", RUN_IN)
def test_the_commands_of_a_document_run_in_their_order(
    document: str, wheel: Path, tmp_path: Path
) -> None:
    session = Session(tmp_path, wheel)
    for command in commands(document, text_of(document)):
        if "quilt" in command.text and not shutil.which("quilt"):
            assert not os.environ.get("CI"), "quilt is not installed; .ci/run must install it"
        elif is_run_here(command):
            session.type(command)


def test_a_command_that_fails_is_named(wheel: Path, tmp_path: Path) -> None:
    command = Command("x.md", 7, "python3 build.py check --tree /no/such/tree")

    with pytest.raises(AssertionError, match=r"x.md:7: python3 build.py check --tree /no"):
        Session(tmp_path, wheel).type(command)
