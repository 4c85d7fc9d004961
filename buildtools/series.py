"""The patch series: its order, the header every patch carries, and the lint of both."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from email.parser import Parser
from email.policy import default as email_policy
from pathlib import Path

from buildtools.console import BuildError
from buildtools.dropped import DROPPED, Dropped
from buildtools.patchfile import Patch, parse_patch

BUDGET = 40
"""Most changed lines a patch may have: beyond it, the code belongs into the overlay."""

REASONS = {
    "hook": "upstream must call the overlay",
    "upstream-bug": "upstream is wrong",
    "packaging": "the distribution is wrong",
}
TRAILERS = ("Reason", "Upstream-Status", "Drop-When", "Tripwires", "Guard-Test")
PARAGRAPHS = ("Why a patch:", "When off:")
PLACEHOLDER = "FILL-IN"
"""Stands in the header of a new patch wherever its author has something to say."""

_NAME = re.compile(r"^(\d{4})-[a-z0-9-]+\.patch$")
_STATUS = re.compile(r"^(pending|submitted https://\S+|backport [0-9a-f]{40}|inappropriate \S.*)$")
SUBJECT = re.compile(r"^[a-z0-9-]+: [a-z].*[^.]$")
_TRAILER = re.compile(r"^([A-Z][A-Za-z-]+): (.*)$")


@dataclass(frozen=True)
class Header:
    """What a patch says of itself."""

    subject: str
    body: str
    trailers: dict[str, str]

    @property
    def area(self) -> str:
        """Part of upstream that is touched: the subject up to the colon."""
        return self.subject.partition(":")[0]


def parse_header(message: str) -> Header:
    """Parse the mail that precedes the diff of a patch."""
    mail = Parser(policy=email_policy).parsestr(message.partition("\n")[2])
    subject = re.sub(r"^\[PATCH[^]]*\] ", "", str(mail["Subject"] or ""))
    text = str(mail.get_payload()).rstrip().removesuffix("---").rstrip()
    body, _, last = text.rpartition("\n\n")
    trailers: dict[str, str] = {}
    key = ""
    for line in last.splitlines():
        match = _TRAILER.match(line)
        if match:
            key = match[1]
            trailers[key] = match[2].strip()
        elif key and line.startswith(" "):
            trailers[key] += " " + line.strip()
        else:
            return Header(subject, text, {})
    return Header(subject, body, trailers)


def file_name(number: int, subject: str) -> str:
    """Return the file name a patch of this subject must have."""
    return f"{number:04d}-{re.sub(r'[^a-z0-9]+', '-', subject.lower()).strip('-')}.patch"


def read_series(directory: Path) -> list[str]:
    """Return the patch names in ``directory/series``, in order, without comments."""
    try:
        lines = (directory / "series").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"cannot read the series: {error}") from error
    names = [line.strip() for line in lines]
    return [name for name in names if name and not name.startswith("#")]


def load_patches(directory: Path) -> list[Patch]:
    """Parse every patch of the series.

    Raises:
        BuildError: patches are missing, unlisted, out of order or malformed; all are reported.
    """
    names = read_series(directory)
    problems = list(_order_problems(names, directory))
    patches = []
    for name in names:
        try:
            patches.append(parse_patch(name, (directory / name).read_bytes()))
        except BuildError as error:
            problems.append(str(error))
        except FileNotFoundError:
            continue  # reported as missing above
        except OSError as error:
            problems.append(f"{name}: cannot be read: {error.strerror}")
    problems += _chain_problems(patches)
    if problems:
        raise BuildError("\n".join(["the patch series is not sound:", *problems]))
    return patches


def _order_problems(names: list[str], directory: Path) -> Iterator[str]:
    present = {path.name for path in directory.iterdir()} - {"series", "README.md"}
    present -= {"tripwires.toml", DROPPED}
    for name in sorted(set(names) - present):
        yield f"{name}: missing: the series lists it, but there is no such file"
    for name in sorted(present - set(names)):
        yield f"{name}: unlisted: the file is there, but the series does not list it"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name}: listed twice"
    last = 0
    for name in names:
        match = _NAME.match(name)
        if match is None:
            yield f"{name}: not named NNNN-<area>-<imperative>.patch"
            continue
        number = int(match[1])
        if number <= last:
            yield f"{name}: out of order: number {number} follows {last}"
        last = number


def _chain_problems(patches: list[Patch]) -> Iterator[str]:
    """Two patches of one file must join: the blob one leaves is the blob the next one expects."""
    left: dict[str, tuple[str, str]] = {}
    for patch in patches:
        for change in patch.changes:
            by, blob = left.get(change.path, ("", change.before))
            if blob != change.before:
                yield (
                    f"{patch.name}: {change.path}: expects blob {change.before}, but {by} leaves "
                    f"{blob} (order swapped, one of them edited, or a later patch of the file not "
                    "exported again)"
                )
            left[change.path] = (patch.name, change.after)


def lint(patches: list[Patch], root: Path, overlay_paths: Collection[str]) -> list[str]:
    """Return every breach of the rules for headers, names, budget and overlap.

    Args:
        patches: the loaded series.
        root: the repository, in which guard tests are looked up.
        overlay_paths: paths that the overlay adds; no patch may touch them.
    """
    problems = []
    for patch in patches:
        header = parse_header(patch.message)
        found = list(_header_problems(header, root))
        number = int(patch.name[:4])
        if patch.name != file_name(number, header.subject):
            found.append(f"must be named {file_name(number, header.subject)} after its subject")
        if patch.changed_lines > BUDGET:
            found.append(f"{patch.changed_lines} changed lines, at most {BUDGET} are allowed")
        for change in patch.changes:
            if change.path in overlay_paths:
                found.append(f"touches {change.path}, which is the overlay's")
        problems += [f"{patch.name}: {problem}" for problem in found]
    return problems


def _header_problems(header: Header, root: Path) -> Iterator[str]:
    if not SUBJECT.match(header.subject):
        yield f"subject {header.subject!r} is not '<area>: <imperative>'"
    for start in PARAGRAPHS:
        if not any(part.startswith(start) for part in header.body.split("\n\n")):
            yield f"no paragraph starts with {start!r}"
    for key in TRAILERS:
        if not header.trailers.get(key):
            yield f"trailer {key} is missing"
    reason = header.trailers.get("Reason", "hook")
    if reason not in REASONS:
        yield f"Reason {reason!r} is none of {', '.join(REASONS)}"
    status = header.trailers.get("Upstream-Status", "pending")
    if not _STATUS.match(status):
        yield (
            f"Upstream-Status {status!r} is none of: pending, submitted <URL>, backport <SHA>, "
            "inappropriate <why>"
        )
    for line in [header.subject, *header.body.splitlines()]:
        if PLACEHOLDER in line:
            yield f"{PLACEHOLDER} is still in its header: {line.strip()!r}"
    for key, value in header.trailers.items():
        if PLACEHOLDER in value:
            yield f"trailer {key} is still to be filled in: {value!r}"
    guard = header.trailers.get("Guard-Test", "")
    if guard and not _has_test(root, guard):
        yield f"Guard-Test {guard!r} does not exist"


def _has_test(root: Path, node: str) -> bool:
    path, _, name = node.partition("::")
    try:
        module = ast.parse((root / path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return False
    return any(isinstance(item, ast.FunctionDef) and item.name == name for item in module.body)


def render_readme(patches: list[Patch], dropped: Iterable[Dropped] = ()) -> str:
    """Return the text of ``patches/README.md``: the series, its size, and what was dropped."""
    rows = [
        "<!-- Made by `build.py pin` from the headers of the patches; do not edit. -->",
        "# The series",
        "",
        "| patch | what | why it is a patch | upstream | dropped when | files | lines |",
        "|---|---|---|---|---|---|---|",
    ]
    for patch in patches:
        header = parse_header(patch.message)
        files = ", ".join(f"`{change.path}`" for change in patch.changes)
        rows.append(
            f"| [{patch.name[:4]}]({patch.name}) | {header.subject} | {header.trailers['Reason']}"
            f" | {header.trailers['Upstream-Status']} | {header.trailers['Drop-When']} | {files}"
            f" | {patch.changed_lines} |"
        )
    touched = {change.path for patch in patches for change in patch.changes}
    hunks = sum(len(change.hunks) for patch in patches for change in patch.changes)
    total = sum(patch.changed_lines for patch in patches)
    rows += [
        "",
        f"Total: {len(patches)} patches, {len(touched)} files, {hunks} hunks, {total} changed "
        "lines.",
        "",
    ]
    gone = [
        f"| {entry.patch[:4]} | {entry.subject} | {entry.upstream} | "
        + entry.reason.replace("|", "\\|")
        + " |"
        for entry in dropped
    ]
    if gone:
        rows += ["## Dropped", "", "| patch | what | gone since | because |", "|---|---|---|---|"]
        rows += [*gone, ""]
    return "\n".join(rows)
