"""Each patch's guard test fails, on its own assertion, when the patch is left out."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

from buildtools.history import History
from buildtools.overlay import lay_over
from buildtools.paths import PATCHES
from buildtools.project import project_recipe
from buildtools.series import load_patches, parse_header, read_series
from buildtools.upstream import fetch
from tests.megatron_site import Session, make_site, run_pytest

# Patches that cannot be reverted without later ones, which are reverted with them.
DEPENDENTS = {
    "0002-pyproject-ship-the-licence-texts.patch": ["0003-pyproject-declare-psutil.patch"],
}


@dataclass(frozen=True)
class Outcome:
    """How a guard test ended: ``passed``, ``assertion`` or ``other``, and what it printed."""

    kind: str
    detail: str


def judge(session: Session, node: str) -> Outcome:
    """Tell a failed assertion in the test's own file from every other way not to pass.

    Of a test with parameters every case has to fail by its assertion.
    """
    outcomes = [_judge_case(case, node) for case in session.cases]
    worst = [outcome for outcome in outcomes if outcome.kind != "assertion"] + outcomes
    return worst[0] if worst else Outcome("other", f"no test was run: {session.output}")


def _judge_case(case: ElementTree.Element, node: str) -> Outcome:
    problems = list(case)
    if not problems:
        return Outcome("passed", "")
    text = problems[0].text or ""
    path = node.partition("::")[0]
    last = text.strip().splitlines()[-1] if text.strip() else ""
    own = problems[0].tag == "failure" and last.startswith(f"{path}:")
    return Outcome("assertion" if own and last.endswith(": AssertionError") else "other", text)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """The real series as commits on the pinned upstream."""
    recipe = project_recipe("index", offline=False)
    tree = tmp_path_factory.mktemp("history") / "tree"
    fetch(recipe.pin, recipe.source, tree, recipe.cache, recipe.download)
    return History(tree, recipe.patches)


@pytest.mark.parametrize("name", read_series(PATCHES))
def test_the_guard_fails_without_its_patch(name: str, history: History, tmp_path: Path) -> None:
    recipe = project_recipe("index", offline=False)
    patch = next(patch for patch in recipe.patches if patch.name == name)
    reverted = history.without(name)
    assert reverted == [*DEPENDENTS.get(name, []), name], (
        f"{name} cannot be left out alone: name the others in DEPENDENTS"
    )
    tree = tmp_path / "tree"
    history.git.run("checkout-index", "--all", f"--prefix={tree}/")
    lay_over(recipe.overlay, tree)
    site = make_site(tree, tmp_path, recipe.pin.epoch)

    guard = parse_header(patch.message).trailers["Guard-Test"]
    outcome = judge(run_pytest([guard], tmp_path, site=site), guard)

    ends = "passes" if outcome.kind == "passed" else "ends otherwise than by its assertion"
    assert outcome.kind == "assertion", f"{guard} {ends} without {name}: {outcome.detail}"


def test_a_guard_that_fails_by_an_import_error_is_no_proof(tmp_path: Path) -> None:
    """The judge of the test above is not fooled by the wrong kind of failure."""

    def outcome(body: str) -> str:
        fixture = "import pytest\n\n@pytest.fixture\ndef broken():\n    assert False\n\n"
        (tmp_path / "test_guard.py").write_text(fixture + body)
        node = "test_guard.py::test_guard"
        return judge(run_pytest([node], tmp_path, cwd=tmp_path), node).kind

    assert outcome("def test_guard():\n    assert 1 == 2\n") == "assertion"
    assert outcome("def test_guard():\n    assert 1 == 1\n") == "passed"
    assert outcome("def test_guard():\n    import megatron_that_is_not_there\n") == "other"
    assert outcome("def test_guard():\n    object().gone\n") == "other"
    assert outcome("def test_guard(broken):\n    pass\n") == "other"
    some = '@pytest.mark.parametrize("n", [1, 2])\ndef test_guard(n):\n    assert n == '
    assert outcome(some + "3\n") == "assertion"
    assert outcome(some + "2\n") == "passed"
    assert outcome("def helper():\n    raise SystemExit(1)\ndef test_guard():\n    helper()\n") == (
        "other"
    )


def test_every_patch_names_a_guard_of_its_own() -> None:
    guards = [parse_header(patch.message).trailers["Guard-Test"] for patch in load_patches(PATCHES)]
    assert len(set(guards)) == len(guards)
