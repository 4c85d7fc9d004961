"""The state of an open rebase, in one file that is replaced as a whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from buildtools.console import BuildError
from buildtools.releases import Target

FORMAT = 1
PENDING = "pending"
DONE = "done"


@dataclass
class Step:
    """One patch on its way.

    Attributes:
        name: the patch.
        commit: its commit on the old pristine tree.
        state: `PENDING` or `DONE`.
        picked: its commit on the new tree, which may change nothing.
        by_hand: whether somebody resolved a conflict in it.
        because: why it is dropped, if somebody decided that.
    """

    name: str
    commit: str
    state: str = PENDING
    picked: str = ""
    by_hand: bool = False
    because: str = ""


@dataclass
class State:
    """How far the rebase is.

    Attributes:
        base: commit of the old pristine tree.
        new: commit of the new one.
        tip: the last commit that is done.
        target: the new upstream.
        series: digest of the series when the rebase began.
        pin: hash of ``upstream.toml`` then.
        report: where the report goes; empty for nowhere.
        steps: one for each patch, in order.
        waiting: name of the patch whose conflict waits for somebody; empty if none does.
        written: whether the result is in ``patches/``.
    """

    base: str
    new: str
    tip: str
    target: Target
    series: str
    pin: str
    report: str
    steps: list[Step] = field(default_factory=list)
    waiting: str = ""
    written: bool = False

    def to_json(self) -> str:
        """Return the text of the state file."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"


def path_of(directory: Path) -> Path:
    """Return the state file of the rebase in ``directory``."""
    return directory / "state.json"


def save(state: State, path: Path) -> None:
    """Write the state: a reader sees the one before or this one."""
    arriving = path.with_name(f"{path.name}.new")
    arriving.write_text(state.to_json(), encoding="utf-8")
    arriving.replace(path)


def load(path: Path) -> State:
    """Read the state.

    Raises:
        BuildError: it is damaged, or of a format this code does not know.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("format") != FORMAT:
            raise ValueError("another format")
        target = Target(**document.pop("target"))
        steps = [Step(**row) for row in document.pop("steps")]
        return State(target=target, steps=steps, **document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(
            f"{path}: cannot be read ({error}); give the rebase up: build.py rebase --abort"
        ) from error
