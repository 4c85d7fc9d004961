"""Read ``upstream.toml``, the pin, and rewrite its lock."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildtools.console import BuildError


@dataclass(frozen=True)
class Lock:
    """Git tree ids of the shipped files at the three stages of assembly."""

    pristine: str
    patched: str
    assembled: str


@dataclass(frozen=True)
class Pin:
    """What is pinned: one release of upstream, our revision of it, and the resulting trees."""

    name: str
    version: str
    revision: int
    epoch: int
    sdist: str
    sdist_sha256: str
    git_url: str
    git_ref: str
    git_commit: str
    published_sha256: str
    shipped: tuple[str, ...]
    lock: Lock

    @property
    def label(self) -> str:
        """Version of the wheel, e.g. ``0.19.2+nvme.1``."""
        return f"{self.version}+nvme.{self.revision}"


def _get(document: dict[str, Any], dotted: str, kind: type) -> Any:
    value: Any = document
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, kind):
        raise BuildError(f"upstream.toml: {dotted} must be a {kind.__name__}, got {value!r}")
    return value


def read_pin(path: Path) -> Pin:
    """Read the pin.

    Raises:
        BuildError: the file is missing, is not TOML, or lacks a value.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BuildError(f"cannot read the pin {path}: {error}") from error

    def text(dotted: str) -> str:
        return str(_get(document, dotted, str))

    return Pin(
        name=text("upstream.name"),
        version=text("upstream.version"),
        revision=_get(document, "release.revision", int),
        epoch=_get(document, "release.epoch", int),
        sdist=text("source.index.filename"),
        sdist_sha256=text("source.index.sha256"),
        git_url=text("source.git.url"),
        git_ref=text("source.git.ref"),
        git_commit=text("source.git.commit"),
        published_sha256=text("published.sha256"),
        shipped=tuple(_get(document, "shipped.paths", list)),
        lock=Lock(text("lock.pristine"), text("lock.patched"), text("lock.assembled")),
    )


def write_lock(path: Path, lock: Lock) -> None:
    """Rewrite the three values of ``[lock]`` and leave every other byte of the pin alone."""
    text = path.read_text(encoding="utf-8")
    head, marker, tail = text.partition("[lock]\n")
    for key in ("pristine", "patched", "assembled"):
        tail, count = re.subn(
            rf'^{key} = ".*"$', f'{key} = "{getattr(lock, key)}"', tail, flags=re.MULTILINE
        )
        if not marker or count != 1:
            raise BuildError(f'{path}: [lock] must hold exactly one line `{key} = "..."`')
    new = path.with_name(f"{path.name}.new")
    new.write_text(head + marker + tail, encoding="utf-8")
    new.replace(path)
