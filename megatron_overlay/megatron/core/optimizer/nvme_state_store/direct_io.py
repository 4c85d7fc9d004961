"""Does direct I/O work in a directory? Found by doing it, since versions and names tell too little.

Filesystems refuse O_DIRECT when a file is opened (tmpfs before Linux 6.6), at the first transfer
(another block size), or take it and move other bytes; and a directory's filesystem may be anything
in a container. So a small file goes the ways that a state file goes later, and what comes back is
compared. What accepts direct I/O may still copy through memory (tmpfs, some network filesystems):
that is correct, and `probe` measures what it is worth.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Literal

from .errors import StateFileError
from .layout import ALIGN_BYTES
from .memory import page_aligned
from .state_file import StateFile
from .system_calls import OS_LAYER, Layer

IoMode = Literal["auto", "direct", "buffered"]

_LARGE_BYTES = 8 << 20
"""One request of an I/O engine."""
_SMALL_BYTES = 2 * ALIGN_BYTES


def choose_io(mode: IoMode, directory: Path, layer: Layer = OS_LAYER) -> tuple[bool, str]:
    """Decide whether the state files of ``directory`` use direct I/O.

    Args:
        mode: ``auto`` uses it if it works, ``direct`` insists, ``buffered`` does without.
        directory: Must exist; the probe needs 8 MiB there for a moment.
        layer: The system calls.

    Returns:
        Whether to use it, and a warning for the log if ``auto`` does without; else ''.

    Raises:
        ValueError: ``direct`` does not work there, or ``mode`` is unknown.
    """
    if mode not in ("auto", "direct", "buffered"):
        raise ValueError(f"--stream-optimizer-state-io {mode}: expected auto, direct or buffered")
    if mode == "buffered":
        return False, ""
    reason = probe_direct_io(directory, layer)
    if not reason:
        return True, ""
    if mode == "direct":
        raise ValueError(
            f"--stream-optimizer-state-io direct: direct I/O does not work in {directory} "
            f"({reason}); use auto or buffered, or another directory"
        )
    return False, (
        f"NO DIRECT I/O in {directory}: {reason}. Optimizer state there goes through the page "
        "cache: it competes with everything else for memory, and a step may take several times "
        "as long. Use another directory, or --stream-optimizer-state-io buffered to accept it"
    )


def probe_direct_io(directory: Path, layer: Layer = OS_LAYER) -> str:
    """Move bytes by direct I/O through a file in ``directory``, which is removed again.

    Blocks for as long as about 16 MiB take to be written and read.

    Returns:
        '' if it works, else what failed and how.
    """
    path = directory / f".direct-io-probe-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        file = StateFile.create(path, _SMALL_BYTES + _LARGE_BYTES, layer, is_direct=True)
    except StateFileError as error:
        return str(error)
    try:
        return _move(file)
    except (StateFileError, OSError) as error:
        return str(error)
    finally:
        # What is left of it is no reason against direct I/O; its directory is removed later.
        with contextlib.suppress(StateFileError):
            file.remove()


def _move(file: StateFile) -> str:
    """Write and read in every way; return what came back wrong."""
    with page_aligned(file.nbytes) as written, page_aligned(file.nbytes) as read:
        written[:] = secrets.token_bytes(ALIGN_BYTES) * (file.nbytes // ALIGN_BYTES)
        for start in range(0, file.nbytes, ALIGN_BYTES):  # or swapped blocks would look the same
            written[start : start + 8] = start.to_bytes(8, "little")
        first, second = slice(0, ALIGN_BYTES), slice(ALIGN_BYTES, _SMALL_BYTES)
        large = slice(_SMALL_BYTES, file.nbytes)
        for part in (second, first, large):
            file.write_from(part.start, written[part])
        file.sync()
        for part in (large, first, second):
            file.read_into(part.start, read[part])
        if read != written:
            return f"{file.path}: other bytes were read than had been written"
        return _mix(file, written, read)


def _mix(file: StateFile, written: memoryview, read: memoryview) -> str:
    """Show that both descriptors see what the other has written, whatever is cached."""
    block = slice(0, ALIGN_BYTES)
    unaligned = slice(1, ALIGN_BYTES - 1)
    file.read_into(unaligned.start, read[unaligned])  # now the page cache holds the block
    written[block] = bytes(byte ^ 0xFF for byte in written[block])
    file.write_from(0, written[block])
    file.read_into(unaligned.start, read[unaligned])
    if read[unaligned] != written[unaligned]:
        return f"{file.path}: a direct write left old bytes in the page cache"
    written[unaligned] = bytes(byte ^ 0xFF for byte in written[unaligned])
    file.write_from(unaligned.start, written[unaligned])
    file.read_into(0, read[block])
    if read[block] != written[block]:
        return f"{file.path}: a direct read missed what was in the page cache"
    return ""
