"""Change several files as one: an error undoes all of it, and what a crash cut off is finished.

A journal with the new contents is completed first. From then on the change is decided: `recover`
finishes it, however often it is killed itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from buildtools.console import BuildError, warn
from buildtools.paths import scratch_dir

_PLAN = "plan.json"


def replace_all(changes: Mapping[Path, bytes | None], journal: Path) -> list[Path]:
    """Give every file of ``changes`` its new content; None removes it.

    Args:
        changes: absolute path -> content.
        journal: directory that exists while the change is under way.

    Returns:
        The paths that were changed; a file that has its content already is not written.

    Raises:
        BuildError: a change was cut off and could not be finished.
        OSError: a file could not be written; all of them are as they were.
    """
    with exclusive(journal):
        _finish(journal)
        before = {path: path.read_bytes() if path.exists() else None for path in changes}
        needed = {path: new for path, new in changes.items() if new != before[path]}
        if not needed:
            return []
        with scratch_dir(journal.parent) as scratch:
            _write_journal(scratch / "journal", needed)
            (scratch / "journal").rename(journal)
        try:
            _apply(needed)
        except BaseException:
            _undo({path: before[path] for path in needed})
            _remove(journal)
            raise
        _remove(journal)
    return list(needed)


def recover(journal: Path) -> None:
    """Finish a change that a crash has cut off, if there is one.

    Raises:
        BuildError: the journal cannot be read.
    """
    if journal.exists():
        with exclusive(journal):
            _finish(journal)


def _finish(journal: Path) -> None:
    if not journal.exists():
        return
    try:
        plan = json.loads((journal / _PLAN).read_text(encoding="utf-8"))
        changes = {
            Path(path): None if number is None else (journal / str(number)).read_bytes()
            for path, number in plan
        }
    except (OSError, ValueError, TypeError) as error:
        raise BuildError(f"{journal}: cannot finish the change it describes: {error}") from error
    _apply(changes)
    _remove(journal)
    warn(f"finished a change that had been cut off: {', '.join(path.name for path in changes)}")


def _remove(journal: Path) -> None:
    # By one rename: half a journal would be taken for one that cannot be finished.
    with scratch_dir(journal.parent) as trash:
        journal.rename(trash / "done")


def _write_journal(journal: Path, changes: Mapping[Path, bytes | None]) -> None:
    journal.mkdir()
    plan: list[tuple[str, int | None]] = []
    for number, (path, content) in enumerate(changes.items()):
        plan.append((str(path), None if content is None else number))
        if content is not None:
            (journal / str(number)).write_bytes(content)
    (journal / _PLAN).write_text(json.dumps(plan), encoding="utf-8")


def _undo(before: Mapping[Path, bytes | None]) -> None:
    for path, content in before.items():
        with contextlib.suppress(OSError):  # what could not be written is not there
            _arriving(path).unlink()
        if content != (path.read_bytes() if path.exists() else None):
            _apply({path: content})


def _arriving(path: Path) -> Path:
    # The same name each time, so that finishing a cut off change leaves no half file behind.
    return path.with_name(f".{path.name}.new")


def _apply(changes: Mapping[Path, bytes | None]) -> None:
    for path, content in changes.items():
        arriving = _arriving(path)
        if content is None:
            arriving.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        arriving.write_bytes(content)
        arriving.replace(path)


@contextlib.contextmanager
def exclusive(name: Path, verb: str = "", *, wait: bool = True) -> Iterator[None]:
    """Let one process at a time into the body: those that name the same path.

    Args:
        name: what is used by one alone; the lock is a file beside it, and nothing is left of the
            lock when its holder ends or is killed.
        verb: what the others are told is at work.
        wait: whether to wait for the other, or to refuse.

    Raises:
        BuildError: another is at work, and there is no waiting for it.
    """
    name.parent.mkdir(parents=True, exist_ok=True)
    with name.with_name(f"{name.name}.lock").open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            holder = stream.read().strip() or "another build.py"
            if not wait:
                raise BuildError(
                    f"{holder} is at work here: let it end (`build.py status` says what it "
                    "leaves), then try again; nothing was changed"
                ) from None
            if verb:
                warn(f"waiting for {holder} to end")
            fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            if verb:
                stream.truncate(0)
                stream.write(f"build.py {verb} (process {os.getpid()})")
                stream.flush()
            yield
        finally:
            stream.truncate(0)
