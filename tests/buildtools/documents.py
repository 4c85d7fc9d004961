"""What stands in the Markdown documents: commands, code spans and rows of tables.

A block that is indented, or fenced as `sh`, `bash` or `console`, holds commands. Whatever else is
to be shown goes into a fence that says what it is (`text`, `python`): so no command can hide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from buildtools.paths import ROOT

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md"))
)
"""All but `docs/benchmarks`, the record of what was run then, on the machines of then."""
SHELL = {"", "sh", "bash", "console"}


def text_of(document: str) -> str:
    """Return the content of a document."""
    return (ROOT / document).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: the language of its fence ("" if it is indented), (number, line) of each."""

    language: str
    lines: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A command line as it is typed, without its comment; with `$ ` if the document has that."""

    document: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text}"


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of code; empty lines between indented ones are part of the block."""
    found: list[tuple[int, str]] = []
    fence: str | None = None
    is_after_empty = True
    for number, line in enumerate((*text.splitlines(), "end"), 1):
        mark = re.fullmatch(r" *```(\w*) *", line)
        if fence is not None and not mark:
            found.append((number, line.strip()))
        elif fence is not None:
            yield Block(fence or "sh", tuple(found))
            fence, found = None, []
        elif line.startswith("    ") and (is_after_empty or found):
            found.append((number, line.strip()))
        elif line.strip():
            if found:
                yield Block("", tuple(found))
            fence, found = mark and mark[1], []
        is_after_empty = not line.strip()


def commands(document: str, text: str) -> list[Command]:
    """Return the command lines of a document; where some have a prompt, the others are output."""
    found = []
    for block in blocks(text):
        if block.language not in SHELL:
            continue
        lines = list(block.lines)
        has_prompt = any(line.startswith("$ ") for _, line in lines)
        while lines:
            number, line = lines.pop(0)
            while line.endswith("\\") and lines:
                line = f"{line[:-1].rstrip()} {lines.pop(0)[1]}"
            line = re.sub(r"(^|\s+)# .*", "", line)
            if line and line.startswith("$ ") == has_prompt:
                found.append(Command(document, number, line))
    return found


def all_commands() -> list[Command]:
    """Return the command lines of all documents."""
    return [each for name in DOCUMENTS for each in commands(name, text_of(name))]


def is_training(command: Command) -> bool:
    """Return whether a line is arguments of Megatron's, behind a training command or alone."""
    return command.text.startswith(("--", "... --"))


def prose(text: str) -> str:
    """Return the text without its blocks of code."""
    lines = text.splitlines()
    for block in blocks(text):
        for number, _ in block.lines:
            lines[number - 1] = ""
    return "\n".join(line for line in lines if not line.lstrip().startswith("```"))


def spans(text: str) -> list[str]:
    """Return what stands between backticks in the prose, in order."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def section(text: str, heading: str) -> str:
    """Return what stands below a heading, up to the next one of its level or above."""
    level = heading.partition(" ")[0]
    rest = text.partition(f"\n{heading}\n")[2]
    assert rest, f"there is no heading {heading!r}"
    return re.split(rf"\n#{{1,{len(level)}}} ", rest)[0]


def rows(text: str, first_header: str) -> list[list[str]]:
    """Return the cells of the rows of the one table whose first column has this header."""
    found: list[list[str]] = []
    is_inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if is_inside and cells:
            found.append(cells)
        is_inside = bool(cells) and (is_inside or cells[0] == first_header)
    assert found, f"there is no table whose first column is {first_header!r}"
    return found[1:]


def has_test(name: str) -> bool:
    """Return whether `path::test` (or a whole file, with or without its directory) exists."""
    path, _, test = name.partition("::")
    files = [ROOT / path] if "/" in path else list((ROOT / "tests").rglob(path))
    return any(f"\ndef {test}(" in file.read_text() or not test for file in files if file.exists())


def relative_links(text: str) -> list[str]:
    """Return the targets of links that lie in this repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [target for target in targets if "://" not in target]


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a document, as they are made from their words."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
