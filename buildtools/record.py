"""``patches/tripwires.toml``: what of upstream was looked at, and what was found to hold.

Two kinds of entries. A *symbol* is something that a patch or the overlay leans on; a *reader* is a
place of the census. Each has a fingerprint of what was seen when somebody accepted it and said why
it is fine.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from buildtools.console import BuildError

CLASSES = {
    "served": "the overlay or a patch gives it what it needs",
    "refused": "it cannot run while streaming: what leads to it is refused by name",
    "harmless": "it touches nothing that is without storage",
}


@dataclass(frozen=True)
class Entry:
    """One record.

    Attributes:
        kind: ``symbol`` or ``reader``.
        name: ``path::qualname``, of a symbol perhaps with ``@...``.
        fingerprint: of what was accepted.
        because: why it is fine, in the words of who accepted it.
        release: version of upstream in which it was looked at last.
        by: who leans on it, of a symbol.
        touches: what it names, of a reader.
        classed: one of `CLASSES`, of a reader.
    """

    kind: str
    name: str
    fingerprint: str
    because: str
    release: str
    by: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()
    classed: str = ""


Record = Mapping[tuple[str, str], Entry]
"""Entries by kind and name."""

_HEAD = """\
# Made by `build.py pin`: what of upstream is leaned on or reads optimizer state, as it was accepted
# with `build.py pin --accept NAME --because TEXT`. See docs/rebasing.md; do not edit fingerprints.
"""


def read_record(path: Path) -> dict[tuple[str, str], Entry]:
    """Read the record; a missing file is an empty one.

    Raises:
        BuildError: the file is not what `write_record` writes.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        entries = []
        for kind in ("symbol", "reader"):
            for row in document.pop(kind, []):
                by, touches = (tuple(row.pop(key, ())) for key in ("by", "touches"))
                classed = row.pop("class", "")
                entries.append(Entry(kind=kind, classed=classed, by=by, touches=touches, **row))
        for entry in entries:
            _check_types(entry)
        if document:
            raise ValueError(f"unknown table {', '.join(document)}")
    except (
        OSError,
        UnicodeDecodeError,
        tomllib.TOMLDecodeError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise BuildError(f"cannot read {path}: {error}") from error
    problems = [problem for entry in entries for problem in _unsound(entry)]
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        if (entry.kind, entry.name) in seen:
            problems.append(f"{entry.kind} {entry.name} stands twice")
        seen.add((entry.kind, entry.name))
    if problems:
        raise BuildError("\n".join([f"{path} is not sound:", *problems]))
    return {(entry.kind, entry.name): entry for entry in entries}


def _check_types(entry: Entry) -> None:
    for key, value in asdict(entry).items():
        many = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(each, str) for each in many):
            raise ValueError(f"{entry.kind} {entry.name}: {key} is {value!r}")


def _unsound(entry: Entry) -> Iterator[str]:
    if not entry.because.strip():
        yield f"{entry.name}: because is empty"
    if entry.kind == "reader" and entry.classed not in CLASSES:
        yield f"{entry.name}: class {entry.classed!r} is none of {', '.join(CLASSES)}"


def render_record(entries: Iterable[Entry]) -> str:
    """Return the text of the record."""
    lines = [_HEAD]
    for entry in sorted(entries, key=lambda entry: (entry.kind != "symbol", entry.name)):
        lines += [f"[[{entry.kind}]]", f"name = {_quoted(entry.name)}"]
        if entry.kind == "symbol":
            lines.append(f"by = {_array(entry.by)}")
        else:
            lines.append(f"touches = {_array(entry.touches)}")
            lines.append(f"class = {_quoted(entry.classed)}")
        lines.append(f"because = {_quoted(entry.because)}")
        lines.append(f'fingerprint = "{entry.fingerprint}"')
        lines.append(f'release = "{entry.release}"')
        lines.append("")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    # A JSON string of printable text is a TOML basic string.
    return json.dumps(text, ensure_ascii=False)


def _array(values: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, values))}]"
