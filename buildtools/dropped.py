"""The record of patches that are gone: ``patches/dropped.toml``, which only ever grows."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from buildtools.console import BuildError

DROPPED = "dropped.toml"
_HEAD = """# Patches that are gone, and why. `build.py drop`, `export --because` and `rebase` append
# to it; nothing is ever taken out.
"""


@dataclass(frozen=True)
class Dropped:
    """A patch that has been taken out of the series.

    Attributes:
        patch: the name its file had.
        subject: its subject.
        upstream: the version of upstream from which on it is gone.
        reason: why.
    """

    patch: str
    subject: str
    upstream: str
    reason: str


def read_dropped(directory: Path) -> list[Dropped]:
    """Return what the record in ``directory`` holds, oldest first; nothing if there is none.

    Raises:
        BuildError: the record cannot be read.
    """
    path = directory / DROPPED
    if not path.exists():
        return []
    keys = {field.name for field in fields(Dropped)}
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("dropped", [])
        if not all(
            set(row) == keys and all(isinstance(value, str) for value in row.values())
            for row in rows
        ):
            raise ValueError(f"each [[dropped]] has the texts {', '.join(sorted(keys))}")
    except (OSError, ValueError, AttributeError) as error:
        raise BuildError(f"cannot read {path}: {error}") from error
    return [Dropped(**row) for row in rows]


def appended(directory: Path, entries: Iterable[Dropped]) -> bytes:
    """Return the bytes of the record in ``directory`` with ``entries`` at its end.

    Raises:
        BuildError: the record cannot be read, or an entry gives no reason.
    """
    read_dropped(directory)
    path = directory / DROPPED
    text = path.read_text(encoding="utf-8") if path.exists() else _HEAD
    for entry in entries:
        if not entry.reason.strip():
            raise BuildError(f"{entry.patch}: no reason is given for dropping it")
        rows = [f"{key} = {_quoted(value)}" for key, value in asdict(entry).items()]
        text = "\n".join([text.rstrip("\n"), "", "[[dropped]]", *rows, ""])
    return text.encode()


def _quoted(value: str) -> str:
    """Return a TOML string on one line: JSON's, whose escapes TOML has too."""
    return json.dumps(" ".join(value.split()), ensure_ascii=False).replace("\x7f", "\\u007f")
