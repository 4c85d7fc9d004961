"""Read ``upstream.toml``, the pin, and rewrite values of it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
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
    """What is pinned: one release of upstream, our revision of it, and the resulting trees.

    ``releases`` holds the sha256 of the source distribution of other releases, by version.
    """

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
    releases: dict[str, str]

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
        releases={str(key): str(value) for key, value in _get(document, "releases", dict).items()},
    )


def with_values(text: str, values: Mapping[str, str]) -> str:
    """Return the text of the pin with other values and every other byte as it was.

    Args:
        text: the text of ``upstream.toml``.
        values: ``section.key`` -> the new string.

    Raises:
        BuildError: a section or key is not there exactly once.
    """
    for dotted, value in values.items():
        section, _, key = dotted.rpartition(".")
        start, end = _section(text, section)
        lines = list(re.finditer(rf'^{key} = ".*"$', text[start:end], flags=re.MULTILINE))
        if len(lines) != 1:
            raise BuildError(f'upstream.toml: [{section}] needs exactly one line `{key} = "..."`')
        before, after = text[: start + lines[0].start()], text[start + lines[0].end() :]
        text = f"{before}{key} = {json.dumps(value)}{after}"
    return text


def with_release(text: str, version: str, sha256: str) -> str:
    """Return the text of the pin with a release at the end of ``[releases]``, if it lacks it.

    Raises:
        BuildError: there is no such section.
    """
    start, end = _section(text, "releases")
    if re.search(rf'^"{re.escape(version)}" = ', text[start:end], flags=re.MULTILINE):
        return text
    body = text[start:end].rstrip("\n")
    gap = text[start + len(body) : end]
    return f'{text[:start]}{body}\n"{version}" = "{sha256}"{gap}{text[end:]}'


def _section(text: str, name: str) -> tuple[int, int]:
    heads = list(re.finditer(rf"^\[{re.escape(name)}\]\n", text, flags=re.MULTILINE))
    if len(heads) != 1:
        raise BuildError(f"upstream.toml: expected exactly one line [{name}]")
    after = re.search(r"^\[", text[heads[0].end() :], flags=re.MULTILINE)
    return heads[0].end(), heads[0].end() + after.start() if after else len(text)


def write_lock(path: Path, lock: Lock) -> None:
    """Rewrite the three values of ``[lock]`` and leave every other byte of the pin alone."""
    keys = ("pristine", "patched", "assembled")
    values = {f"lock.{key}": getattr(lock, key) for key in keys}
    new = path.with_name(f"{path.name}.new")
    new.write_text(with_values(path.read_text(encoding="utf-8"), values), encoding="utf-8")
    new.replace(path)
