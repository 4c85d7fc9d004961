"""Tripwires: upstream as it is, against what was accepted of it.

Upstream that differs from the record (``patches/tripwires.toml``) is a finding, until somebody
looks again and accepts it.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from buildtools.census import readers
from buildtools.console import BuildError
from buildtools.evidence import Evidence, evidence_of_lean, evidence_of_reader
from buildtools.leans import Lean
from buildtools.record import CLASSES, Entry, Record
from buildtools.symbols import Sources


@dataclass(frozen=True)
class Survey:
    """Everything a tree has of what is to be recorded.

    Attributes:
        symbols: what is leaned on; None if the tree does not have it.
        readers: the census.
        by: who leans on each symbol.
        touches: what each reader names.
        lost: symbols of the record that nobody leans on by name any more, and that the tree does
            not have: upstream may have renamed what the overlay overrides.
    """

    symbols: Mapping[str, Evidence | None]
    readers: Mapping[str, Evidence]
    by: Mapping[str, tuple[str, ...]]
    touches: Mapping[str, tuple[str, ...]]
    lost: frozenset[str]

    def get(self, kind: str, name: str) -> Evidence | None:
        """Return the evidence for one entry, or None if the tree has none."""
        return self.symbols.get(name) if kind == "symbol" else self.readers.get(name)

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, name) of all that should be recorded."""
        yield from (("symbol", name) for name in sorted(self.symbols))
        yield from (("reader", name) for name in sorted(self.readers))


def survey(leans: Mapping[str, Lean], sources: Sources, record: Record) -> Survey:
    """Look at a tree for what is leaned on or recorded."""
    found = readers(sources)
    others = {name for kind, name in record if kind == "symbol" and name not in leans}
    return Survey(
        symbols={name: evidence_of_lean(lean, sources) for name, lean in leans.items()},
        readers={name: evidence_of_reader(reader) for name, reader in found.items()},
        by={name: tuple(sorted(lean.by)) for name, lean in leans.items()},
        touches={name: reader.touches for name, reader in found.items()},
        lost=frozenset(
            name for name in others if sources.fingerprint(name.partition("@")[0]) is None
        ),
    )


@dataclass(frozen=True)
class Finding:
    """A tripwire that a tree has tripped.

    Attributes:
        kind: ``symbol`` or ``reader``.
        name: which one.
        what: ``new``, ``changed`` or ``gone``.
        where: ``path:line`` in the tree that was looked at.
        by: who leans on it.
        old: what was accepted, as source; empty if it is new, or could not be had.
        new: what is there now; empty if it is gone.
        hint: what else is known, e.g. where it went.
    """

    kind: str
    name: str
    what: str
    where: str
    by: tuple[str, ...]
    old: str
    new: str
    hint: str


def compare(record: Record, now: Survey) -> list[tuple[str, str, str]]:
    """Return (kind, name, what) for everything that is not as recorded, in the record's order."""
    found = []
    for kind, name in now.names():
        entry, evidence = record.get((kind, name)), now.get(kind, name)
        if entry is None:
            found.append((kind, name, "new"))
        elif evidence is None:
            found.append((kind, name, "gone"))
        elif evidence.fingerprint != entry.fingerprint:
            found.append((kind, name, "changed"))
    found += [
        (kind, name, "gone")
        for kind, name in record
        if (name in now.lost if kind == "symbol" else name not in now.readers)
    ]
    return found


def findings(
    record: Record,
    before: Callable[[str], Survey | None],
    now: Survey,
    sources: Sources,
) -> list[Finding]:
    """Return what is not as recorded, with what it was before.

    Args:
        record: what was accepted.
        before: returns a look at a release in which entries were accepted, if it can be had.
        now: a look at the tree in question.
        sources: that tree.
    """
    return [
        _finding(kind, name, what, record.get((kind, name)), before, now, sources)
        for kind, name, what in compare(record, now)
    ]


def _finding(
    kind: str,
    name: str,
    what: str,
    entry: Entry | None,
    before: Callable[[str], Survey | None],
    now: Survey,
    sources: Sources,
) -> Finding:
    evidence = now.get(kind, name)
    accepted = before(entry.release) if entry and what == "changed" else None
    old = accepted.get(kind, name) if accepted else None
    path = name.partition("::")[0]
    if evidence:
        where = f"{evidence.path}:{evidence.line}"
    else:
        where = path if path in sources else f"{path} (no such file)"
    hint = ""
    if what == "gone":
        moved = sources.moved(name.partition("@")[0])
        hint = f"there is {' and '.join(moved)}" if moved else ""
    by = now.by.get(name, entry.by if entry else ())
    if kind == "reader":
        touches = now.touches.get(name, entry.touches if entry else ())
        was = f"{entry.classed}: {entry.because}" if entry else "not in the census"
        hint = "; ".join(filter(None, [f"touches {', '.join(touches)}", was, hint]))
    elif entry:
        hint = "; ".join(filter(None, [f"accepted because {entry.because}", hint]))
    return Finding(
        kind,
        name,
        what,
        where,
        by,
        old.shown if old else "",
        evidence.shown if evidence else "",
        hint,
    )


def render_finding(finding: Finding, *, width: int | None = None) -> str:
    """Return a finding as text: what tripped, who leans on it, and both sources side by side.

    Args:
        finding: what is not as it was.
        width: characters of a column; by default half of the terminal.
    """
    width = width or max(40, (shutil.get_terminal_size((160, 24)).columns - 7) // 2)
    title = {"symbol": "symbol", "reader": "reader of main params or optimizer state"}[finding.kind]
    lines = [f"{finding.where}: {title} {finding.what}: {finding.name}"]
    if finding.by:
        lines.append(f"  leaned on by: {', '.join(finding.by)}")
    if finding.hint:
        lines.append(f"  {finding.hint}")
    if finding.what == "changed" and not finding.old:
        lines.append("  (the source that was accepted is not at hand)")
    old, new = finding.old.splitlines(), finding.new.splitlines()
    if finding.what == "changed" and old:
        lines += [f"  {line}" for line in side_by_side(old, new, width)]
    elif finding.what == "new":
        lines += [f"  + {line}" for line in new[:40]]
    return "\n".join(lines)


def side_by_side(old: list[str], new: list[str], width: int, context: int = 3) -> list[str]:
    """Return two texts in columns, changed lines and a few around them.

    The mark between the columns is that of ``sdiff``: ``|`` changed, ``<`` only left, ``>`` only
    right.
    """
    rows: list[tuple[str, str, str]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        left, right = old[a:b], new[c:d]
        if kind == "equal":
            rows += [(line, " ", line) for line in left]
            continue
        for n in range(max(len(left), len(right))):
            one = left[n] if n < len(left) else ""
            two = right[n] if n < len(right) else ""
            rows.append(
                (one, "|" if n < len(left) and n < len(right) else "<" if one else ">", two)
            )
    near = {
        near
        for n, row in enumerate(rows)
        if row[1] != " "
        for near in range(n - context, n + context + 1)
    }
    lines, last = [], -1
    for n in sorted(near & set(range(len(rows)))):
        if n != last + 1:
            lines.append("...")
        last = n
        one, mark, two = rows[n]
        left, right = _wrapped(one, width), _wrapped(two, width)
        for part in range(max(len(left), len(right))):
            cells = [side[part] if part < len(side) else "" for side in (left, right)]
            lines.append(f"{cells[0]:{width}} {mark} {cells[1]}".rstrip())
    return lines


def _wrapped(line: str, width: int) -> list[str]:
    return [line[start : start + width] for start in range(0, len(line), width)] or [""]


def update_record(
    record: Record,
    now: Survey,
    release: str,
    accepted: Iterable[str],
    because: str,
    classed: str = "",
) -> tuple[dict[tuple[str, str], Entry], list[tuple[str, str, str]]]:
    """Return the record with the named entries accepted, and what is still not as recorded.

    Entries that nobody leans on any more, and readers that are gone and accepted as such, leave
    the record. Who leans on a symbol is brought up to date without asking.

    Raises:
        BuildError: a name is neither in the record nor in the tree, has nothing to accept, or a
            new reader comes without a class.
    """
    still_open = compare(record, now)
    updated = {
        key: replace(entry, by=now.by.get(entry.name, ()))
        for key, entry in record.items()
        if key[0] == "reader" or entry.name in now.symbols or entry.name in now.lost
    }
    for text in accepted:
        kind, name = _named(text, still_open)
        entry = _accept(kind, name, record.get((kind, name)), now, classed)
        if entry is None:
            del updated[kind, name]
        else:
            updated[kind, name] = replace(entry, because=because, release=release)
    return updated, compare(updated, now)


def _named(text: str, still_open: list[tuple[str, str, str]]) -> tuple[str, str]:
    """Return the kind and name of the one open entry that ``text`` names."""
    found = [(kind, name) for kind, name, _ in still_open if text in (name, f"{kind}:{name}")]
    if not found:
        raise BuildError(f"--accept {text}: nothing of it is open; see `build.py check`")
    if len(found) > 1:
        choices = " or ".join(f"{kind}:{name}" for kind, name in found)
        raise BuildError(f"--accept {text}: two things to look at: {choices}")
    return found[0]


def _accept(kind: str, name: str, known: Entry | None, now: Survey, classed: str) -> Entry | None:
    """Return the entry for what is there now, or None for one that is to leave the record."""
    evidence = now.get(kind, name)
    by = now.by.get(name, ())
    if evidence is None and name in now.symbols:
        raise BuildError(
            f"--accept {name}: upstream has it no more; change what leans on it: {', '.join(by)}"
        )
    if evidence is None:
        return None
    if kind == "symbol" and classed:
        raise BuildError(f"--accept {name}: --as is for readers")
    if kind == "symbol":
        return Entry(kind, name, evidence.fingerprint, "", "", by=by)
    chosen = classed or (known.classed if known else "")
    if chosen not in CLASSES:
        raise BuildError(f"--accept {name}: a reader needs a class: --as {' or '.join(CLASSES)}")
    touches = now.touches[name]
    return Entry(kind, name, evidence.fingerprint, "", "", touches=touches, classed=chosen)
