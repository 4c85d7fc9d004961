"""What the documents say of modules, tests, log lines, messages and formats is so."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.optimizer.nvme_state_store import formats
from megatron.core.optimizer.nvme_state_store.checkpoint import FORMAT, Manifest
from megatron.core.optimizer.nvme_state_store.metrics import PREFIX, metrics_of
from megatron.core.optimizer.nvme_state_store.report import StepReport

from buildtools.doctor import Verdict
from buildtools.paths import OVERLAY, PATCHES, ROOT
from buildtools.series import read_series
from tests.buildtools.documents import (
    DOCUMENTS,
    anchors,
    has_test,
    prose,
    relative_links,
    rows,
    section,
    spans,
    text_of,
)
from tests.test_style import BUILDTOOLS

STORE = OVERLAY / "megatron" / "core" / "optimizer" / "nvme_state_store"
ARCHITECTURE = "docs/ARCHITECTURE.md"
RUNNING = "docs/running.md"


# --------------------------------------------------------------------------------------- modules


def modules_below(package: Path) -> set[str]:
    """Return the modules of a package, and the packages in it, which speak for their own."""
    inner = {path.parent.name for path in package.glob("*/__init__.py")}
    return {path.stem for path in package.glob("*.py")} - {"__init__"} | inner


def table_faults(listed: list[list[str]], order: list[str]) -> list[str]:
    """Return what is wrong with a table of modules.

    Args:
        listed: the modules of each row, lower ones first.
        order: all of them, lower ones first.
    """
    names = [name for row in listed for name in row]
    return [
        *(f"{name}: not in the table" for name in order if name not in names),
        *(f"{name}: no such module" for name in names if name not in order),
        *(f"{name}: twice in the table" for name in {*names} if names.count(name) > 1),
        *(
            f"{lower} stands before {upper}, which it may import"
            for row in listed
            for lower, upper in pairwise(row)
            if {lower, upper} <= {*order} and order.index(lower) > order.index(upper)
        ),
    ]


def modules_of_table(heading: str) -> list[list[str]]:
    table = rows(section(text_of(ARCHITECTURE), heading), "what for")
    return [re.findall(r"`(\w+)`", cells[1]) for cells in table]


def test_the_table_of_the_overlay_lists_its_modules_in_the_order_of_the_package() -> None:
    """The docstring's order is that of the ranks: tests/store/test_import_direction.py."""
    docstring = ast.get_docstring(ast.parse((STORE / "__init__.py").read_text())) or ""
    modules = modules_below(STORE)
    order = [word for word in dict.fromkeys(re.findall(r"\w+", ranked(docstring)))]

    listed = modules_of_table("## Modules of the overlay")

    assert table_faults(listed, [word for word in order if word in modules]) == []
    assert modules <= {*order}


def ranked(docstring: str) -> str:
    """Return the first column of a docstring's table, and all that follows it."""
    table, _, below = docstring.partition("\n\nBeside them")
    return "\n".join(re.findall(r"^    (\w.*?)(?:  |$)", table, re.MULTILINE)) + below


def test_the_table_of_the_build_tools_lists_their_modules_by_rank() -> None:
    listed = modules_of_table("## Modules of `buildtools/`")
    rank = {name: number for number, names in enumerate(BUILDTOOLS) for name in names}
    known = [name for row in listed for name in row if name in rank]
    # Those of a rank may stand in any order: they are taken as they stand.
    order = sorted([*known, *({*rank} - {*known})], key=rank.__getitem__)

    assert table_faults(listed, list(dict.fromkeys(order))) == []


def test_a_fault_of_a_table_is_named() -> None:
    found = table_faults([["c", "a"], ["a", "x"]], ["a", "b", "c"])

    assert found == [
        "b: not in the table",
        "x: no such module",
        "a: twice in the table",
        "c stands before a, which it may import",
    ]


# ----------------------------------------------------------------------------------- names, links


def test_the_invariants_name_modules_patches_and_tests_that_exist() -> None:
    numbers = {name[:4] for name in read_series(PATCHES)}
    table = rows(section(text_of(ARCHITECTURE), "## How a step flows"), "")
    known = {*modules_below(STORE), "step"}
    for number, _, kept, shown in table:
        names = {span.partition(".")[0] for span in re.findall(r"`([^`]+)`", kept)}
        assert names <= known, f"invariant {number}: {names - known}"
        assert {*re.findall(r"\b\d{4}\b", kept)} <= numbers
        assert "`" in shown and all(map(has_test, re.findall(r"`([^`]+)`", shown))), number


def test_an_invariant_that_the_code_names_is_in_the_table() -> None:
    table = rows(section(text_of(ARCHITECTURE), "## How a step flows"), "")
    files = [*STORE.rglob("*.py"), *(ROOT / "tests").rglob("test_*.py")]
    named = {
        number for file in files for number in re.findall(r"\(invariant (\d+)", file.read_text())
    }

    assert named and named <= {cells[0] for cells in table}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_a_document_names_exists(document: str) -> None:
    found = [
        span for span in spans(text_of(document)) if re.match(r"(tests/.*)?test_\w+\.py", span)
    ]
    assert [name for name in found if not has_test(name)] == []


def test_a_test_that_does_not_exist_is_noticed() -> None:
    assert has_test("test_pipeline.py")
    assert not has_test("test_pipelines.py")
    assert not has_test("tests/store/test_pipeline.py::test_it_is_not_there")


PLACEHOLDERS = {"file.py"}
"""Names that stand for a reader's own."""


@functools.cache
def _file_names() -> frozenset[str]:
    """The names of the files of this repository, and of the patched Megatron."""
    site = Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron")))
    ours = [
        path
        for part in ROOT.iterdir()
        if part.name != ".work"
        for path in [part, *part.rglob("*.py")]
    ]
    return frozenset(path.name for path in (*ours, *site.rglob("*.py")))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_module_that_a_document_names_exists(document: str) -> None:
    named = re.findall(r"[\w/]*?(\w+\.py)\b", text_of(document))
    assert {*named} <= _file_names() | PLACEHOLDERS


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    here = ROOT / document
    for target in relative_links(text_of(document)):
        path, _, anchor = target.partition("#")
        file = (here.parent / path).resolve() if path else here
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


# --------------------------------------------------------------------------------------- glossary


def unlinked(text: str, words: Iterable[str]) -> list[str]:
    """Return the words whose first use in the sentences of a document is no link to the glossary.

    Headings, tables and code are passed over: there a link cannot stand or would disturb.
    """
    kept = [line for line in prose(text).splitlines() if not line.startswith(("#", "|"))]
    linked = re.sub(r"\[`([^`]+)`\]", r"[\1]", "\n".join(kept))
    sentences = re.sub(r"`[^`]*`", "", linked)
    target = "ARCHITECTURE.md#words"
    marked = re.sub(rf"\[([^\]]+)\]\({target}\)", "\0\\1\0", sentences)
    plain = re.sub(r"\]\([^)]*\)", "]", marked)
    found = []
    for word in words:
        use = re.search(rf"(\0\W*)?\b{word}(s|ed)?\b", plain, re.IGNORECASE)
        if use and not use[1]:
            found.append(word)
    return found


def glossary() -> list[str]:
    table = rows(section(text_of(ARCHITECTURE), "## Words"), "word")
    return [word for cells in table for word in cells[0].split(", ")]


def test_the_first_use_of_a_word_in_the_rebasing_guide_links_to_the_glossary() -> None:
    assert unlinked(text_of("docs/rebasing.md"), glossary()) == []


def test_a_word_that_is_used_before_it_is_linked_is_noticed() -> None:
    text = "# A lock\n\nThe `lock`, two locks and a [pin](ARCHITECTURE.md#words); pins.\n"

    assert unlinked(text, ["lock", "pin", "tier"]) == ["lock"]


def test_the_glossary_is_in_order() -> None:
    table = rows(section(text_of(ARCHITECTURE), "## Words"), "word")
    words = [cells[0] for cells in table]
    assert words == sorted(words)


# ----------------------------------------------------------------------- what programs print


@functools.cache
def texts(*directories: Path) -> tuple[str, ...]:
    """Return all strings of the sources below; what is put in when it runs is one character."""
    found = []
    for directory in directories:
        for path in directory.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        part.value if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    ]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(found)


def is_printed(message: str, sources: Iterable[str]) -> bool:
    """Return whether a string of the sources has the fixed words of a message, in their order."""
    words = [re.escape(part.strip()) for part in re.split(r"\.{2,3}", message) if part.strip()]
    return any(re.search(r"[^\n]*".join(words), source) for source in sources)


def test_every_failure_of_the_build_in_the_table_is_one() -> None:
    """In the sources, or where a test expects it."""
    sources = texts(ROOT / "buildtools", ROOT / "tests" / "buildtools")
    for says, _, _ in rows(text_of(RUNNING), "it says"):
        for message in re.findall(r"`([^`]+)`", says):
            assert is_printed(message, sources), message


def test_every_failure_of_a_run_in_the_table_is_one() -> None:
    sources = texts(STORE)
    found = [says for says, _, _ in rows(text_of(RUNNING), "the run says")]
    assert len(found) > 10
    for says in found:
        for message in re.findall(r"`([^`]+)`", says):
            if operation := re.match(r"(\w+) failed", message):  # made of the operation's name
                assert operation[1] in sources, message
                message = message.replace(operation[1], "", 1).strip()
            assert is_printed(message, sources), message


def test_a_message_that_nobody_prints_is_noticed() -> None:
    sources = texts(ROOT / "buildtools")

    assert is_printed("wrong sha256: expected .., got ..", sources)
    assert not is_printed("wrong sha512: expected .., got ..", sources)
    assert not is_printed("got .., expected .. wrong sha256", sources)


def test_every_log_line_that_is_named_is_logged_and_the_other_way_round() -> None:
    starts = {
        span.removesuffix(": ...") for span in spans(text_of(RUNNING)) if span.startswith("NVMe ")
    }
    sources = texts(STORE)

    assert starts
    assert [start for start in starts if not is_printed(f"{start}: ", sources)] == []
    logged = {
        source.partition(": ")[0] for source in sources if re.match(r"NVMe [\w -]+: ", source)
    }
    assert logged <= starts


def test_the_metrics_that_are_named_are_those_that_are_reported() -> None:
    """In the text a name may leave its last part to the next one: `read-`, `written-gb`."""
    placement = SimpleNamespace(disk_nbytes=0, host_nbytes=0, device_nbytes=0)
    store = SimpleNamespace(last_step=StepReport(), placement=placement)
    (paragraph,) = (part for part in text_of(RUNNING).split("\n\n") if f"`{PREFIX}`" in part)
    named, last = set(), ""
    for span in reversed(re.findall(r"`([a-z][a-z-]+)`", paragraph.partition("`metrics()`")[0])):
        last = last if span.endswith("-") else span.rpartition("-")[2]
        named.add(PREFIX + (span + last if span.endswith("-") else span))

    assert named == metrics_of([store]).keys()


def test_the_exit_statuses_of_the_doctor_are_its_verdicts() -> None:
    table = rows(text_of(RUNNING), "exit status")

    assert {int(cells[0]) for cells in table} == {*map(int, Verdict), 2}


# --------------------------------------------------------------------------------------- formats


def test_the_manifest_of_a_checkpoint_has_the_keys_of_the_table() -> None:
    text = text_of("docs/on-disk-format.md")
    keys = {key for cells in rows(text, "key") for key in re.findall(r"`(\w+)`", cells[0])}

    assert keys == {*(field.name for field in fields(Manifest)), "checksum"}
    assert f"`Manifest`), format {FORMAT}:" in text


def test_the_formats_of_segments_are_those_of_the_table() -> None:
    """And so are their bytes."""
    table = {
        cells[0].strip("`"): cells for cells in rows(text_of("docs/on-disk-format.md"), "format")
    }
    kinds = {name for name in formats.FORMATS if not name.endswith("-sqrt")}

    assert set(table) == {*kinds, "...-sqrt"}
    for name in kinds:
        numel = 1 << 20
        nbytes = formats.FORMATS[name].nbytes(numel) / numel
        assert float(table[name][3]) == pytest.approx(nbytes, abs=0.0051), name
