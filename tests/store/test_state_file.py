"""A state file is reserved for real, moves all bytes or says where it failed, and loses no error.

The numbers are those of the rules in `state_file`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
import pickle
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store import state_file
from megatron.core.optimizer.nvme_state_store.errors import (
    DirectoryError,
    StateFileError,
    StateStoreError,
)
from megatron.core.optimizer.nvme_state_store.layout import ALIGN_BYTES
from megatron.core.optimizer.nvme_state_store.memory import page_aligned
from megatron.core.optimizer.nvme_state_store.state_file import StateFile
from megatron.core.optimizer.nvme_state_store.system_calls import OS_LAYER

from buildtools.paths import WORK
from tests.store.failing_file import Action, FailingLayer, missing_ability, mounted, small_tmpfs

MIB = 1 << 20


def read(file: StateFile, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    file.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def pattern(nbytes: int) -> bytes:
    return bytes(index % 251 for index in range(nbytes))


@pytest.fixture
def layer() -> FailingLayer:
    return FailingLayer()


@pytest.fixture
def file(tmp_path: Path, layer: FailingLayer) -> Iterator[StateFile]:
    """A file of 1 MiB whose system calls can be made to fail."""
    made = StateFile.create(tmp_path / "state.bin", MIB, layer)
    layer.count.clear()
    yield made
    with contextlib.suppress(StateFileError):
        made.close()


def the_error(operation: str, call: Any, *arguments: Any) -> StateFileError:
    with pytest.raises(StateFileError, match=operation) as caught:
        call(*arguments)
    assert caught.value.operation == operation
    return caught.value


# Creation


def test_rule_1_a_created_file_has_its_blocks_and_is_private(file: StateFile) -> None:
    info = file.path.stat()
    assert info.st_size == MIB
    assert info.st_blocks * 512 >= MIB
    assert info.st_mode & 0o777 == 0o600


def test_rule_2_what_was_never_written_is_zero(file: StateFile) -> None:
    file.write_from(4096, memoryview(b"x" * 10))

    assert read(file, 0, MIB) == bytes(4096) + b"x" * 10 + bytes(MIB - 4106)


def test_an_existing_file_is_not_taken(file: StateFile) -> None:
    file.write_from(0, memoryview(b"kept"))

    error = the_error("create", StateFile.create, file.path, MIB)

    assert (error.errno, error.path) == (errno.EEXIST, file.path)
    assert read(file, 0, 4) == b"kept"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    error = the_error("create", StateFile.create, tmp_path / "absent" / "state.bin", MIB)

    assert error.errno == errno.ENOENT
    assert str(tmp_path / "absent" / "state.bin") in str(error)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_file_has_at_least_one_byte(nbytes: int, tmp_path: Path) -> None:
    for make in (StateFile.create, StateFile.open_existing):
        with pytest.raises(ValueError, match="at least one byte"):
            make(tmp_path / "state.bin", nbytes)
    assert not list(tmp_path.iterdir())


def test_rule_1_no_space_is_an_error_at_creation(tmp_path: Path) -> None:
    """On a real filesystem of 4 MiB: nothing is left, and free and wanted bytes are named."""
    with small_tmpfs(tmp_path / "small") as small:
        StateFile.create(small / "first.bin", 3 * MIB).close()

        error = the_error("reserve", StateFile.create, small / "second.bin", 3 * MIB)

        assert [path.name for path in small.iterdir()] == ["first.bin"]
        StateFile.create(small / "third.bin", MIB).close()
    assert (error.errno, error.offset, error.expected) == (errno.ENOSPC, 0, 3 * MIB)
    assert f"expected {3 * MIB} bytes" in str(error)
    assert f"{small} has {MIB} bytes free" in str(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_rule_1_a_file_that_cannot_be_reserved_is_removed(
    number: int, tmp_path: Path, layer: FailingLayer
) -> None:
    layer.fail("posix_fallocate", number)

    error = the_error("reserve", StateFile.create, tmp_path / "state.bin", MIB, layer)

    assert (error.errno, error.expected) == (number, MIB)
    assert ("bytes free" in str(error)) == (number in {errno.ENOSPC, errno.EDQUOT})
    assert not list(tmp_path.iterdir())
    assert layer.count["close"] == 1


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_rule_1_zeros_are_written_where_nothing_can_be_reserved(
    number: int, tmp_path: Path, layer: FailingLayer
) -> None:
    layer.fail("posix_fallocate", number)

    with StateFile.create(tmp_path / "state.bin", 9 * MIB + 5, layer) as file:
        info = file.path.stat()
        assert info.st_size == 9 * MIB + 5
        assert info.st_blocks * 512 >= 9 * MIB
        assert layer.count["pwrite"] == 2
        assert layer.count["fdatasync"] == 1


def test_rule_1_a_reservation_that_only_claims_success_is_found_out(
    tmp_path: Path, layer: FailingLayer
) -> None:
    """A file may have been extended without blocks: sparse."""
    layer.on("posix_fallocate", lambda real, arguments: os.ftruncate(arguments[0], MIB))

    with StateFile.create(tmp_path / "state.bin", MIB, layer) as file:
        assert file.path.stat().st_blocks * 512 >= MIB
    assert layer.count["pwrite"] == 1


def test_rule_1_a_filesystem_that_swallows_zeros_is_refused(
    tmp_path: Path, layer: FailingLayer
) -> None:
    layer.fail("posix_fallocate", errno.EOPNOTSUPP)
    layer.omit("pwrite", result=MIB)

    error = the_error("reserve", StateFile.create, tmp_path / "state.bin", MIB, layer)

    assert (error.expected, error.actual, error.errno) == (MIB, 0, None)
    assert "does it compress?" in str(error)
    assert not list(tmp_path.iterdir())


def test_rule_1_no_space_for_the_zeros_is_an_error_at_creation(
    tmp_path: Path, layer: FailingLayer
) -> None:
    with small_tmpfs(tmp_path / "small") as small:
        layer.fail("posix_fallocate", errno.EOPNOTSUPP)

        error = the_error("reserve", StateFile.create, small / "state.bin", 5 * MIB, layer)

        assert not list(small.iterdir())
    assert (error.errno, error.expected) == (errno.ENOSPC, 5 * MIB)
    assert f"has {4 * MIB} bytes free" in str(error)


def test_rule_1_holds_on_a_real_filesystem_without_fallocate(tmp_path: Path) -> None:
    """ext2 has none: the C library writes to each block instead."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext2") is None:
        pytest.skip("needs root and mkfs.ext2")
    image = tmp_path / "image"
    image.write_bytes(bytes(8 * MIB))
    subprocess.run(["mkfs.ext2", "-q", "-F", str(image)], check=True)
    with mounted(tmp_path / "ext2", "-t", "ext2", "-o", "loop", str(image)) as ext2:
        with StateFile.create(ext2 / "state.bin", 2 * MIB + 5) as file:
            assert file.path.stat().st_blocks * 512 >= 2 * MIB + 5
            assert read(file, 0, file.nbytes) == bytes(file.nbytes)
        error = the_error("reserve", StateFile.create, ext2 / "second.bin", 20 * MIB)
        assert error.errno == errno.ENOSPC
        assert not (ext2 / "second.bin").exists()


def test_an_unfinished_file_that_cannot_be_removed_is_mentioned(
    tmp_path: Path, layer: FailingLayer
) -> None:
    layer.fail("posix_fallocate", errno.EIO)
    layer.fail("unlink", errno.EROFS)

    error = the_error("reserve", StateFile.create, tmp_path / "state.bin", MIB, layer)

    assert "still there" in "".join(error.__notes__)


# Opening


def test_an_existing_file_opens_for_reading_alone(file: StateFile) -> None:
    file.write_from(7, memoryview(b"abc"))
    file.path.chmod(0o400)

    with StateFile.open_existing(file.path, MIB) as again:
        assert read(again, 7, 3) == b"abc"
        error = the_error("write", again.write_from, 0, memoryview(b"x"))
    assert error.errno == errno.EBADF


@pytest.mark.parametrize("nbytes", [MIB - 1, MIB + 1])
def test_a_file_of_another_size_is_refused(nbytes: int, file: StateFile) -> None:
    error = the_error("open", StateFile.open_existing, file.path, nbytes)

    assert (error.expected, error.actual) == (nbytes, MIB)


def test_only_regular_files_open(tmp_path: Path, layer: FailingLayer) -> None:
    error = the_error("open", StateFile.open_existing, tmp_path, MIB, layer)

    assert "not a regular file" in str(error)
    assert layer.count["close"] == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    error = the_error("open", StateFile.open_existing, tmp_path / "state.bin", MIB)

    assert (error.path, error.errno) == (tmp_path / "state.bin", errno.ENOENT)


# Transfers


@pytest.mark.parametrize("offset", [0, 1, 4096, MIB - 1000])
def test_what_was_written_is_read(offset: int, file: StateFile) -> None:
    file.write_from(offset, memoryview(pattern(1000)))

    assert read(file, offset, 1000) == pattern(1000)


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
@pytest.mark.parametrize("fault", ["short", "interrupted"])
def test_rule_3_short_and_interrupted_transfers_go_on(
    call: str, fault: str, file: StateFile, layer: FailingLayer
) -> None:
    file.write_from(100, memoryview(pattern(1000)))
    layer.count.clear()
    if fault == "short":
        layer.shorten(call, 300, nth=1)
        layer.shorten(call, 1, nth=2, times=2)
    else:
        layer.shorten(call, 300, nth=1)
        layer.fail(call, errno.EINTR, nth=2, times=2)

    file.write_from(100, memoryview(pattern(1000)[::-1]))

    assert read(file, 100, 1000) == pattern(1000)[::-1]
    assert layer.count[call] == 4


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
def test_rule_3_a_transfer_that_is_to_be_tried_again_is(
    call: str, file: StateFile, layer: FailingLayer
) -> None:
    layer.shorten(call, 300, nth=1)
    layer.fail(call, errno.EAGAIN, nth=2, times=3)

    file.write_from(100, memoryview(pattern(1000)))

    assert read(file, 100, 1000) == pattern(1000)
    assert layer.count[call] == 5


def test_rule_3_but_not_for_ever(
    file: StateFile, layer: FailingLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is that of the whole transfer: a little progress does not start it again."""
    clock = Clock()
    monkeypatch.setattr(state_file, "time", clock)
    for nth in range(1, 100):
        if nth % 10 == 0:
            layer.shorten("pwrite", 1, nth=nth)
        else:
            layer.on("pwrite", clock.passing(state_file.AGAIN_TIMEOUT_S / 20), nth=nth)

    error = the_error("write", file.write_from, 8, memoryview(pattern(1000)))

    assert (error.errno, error.offset, error.actual) == (errno.EAGAIN, 8, 2)
    assert "asked to try again for 30 s" in str(error)
    assert clock.now == pytest.approx(state_file.AGAIN_TIMEOUT_S * 21 / 20)


class Clock:
    """Stands still, unless a system call or a sleep takes its time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "a busy loop"

    def passing(self, seconds: float) -> Action:
        """Return an action that takes some time and wants to be tried again."""

        def action(real: Any, arguments: Any) -> None:
            self.now += seconds
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        return action


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_rule_3_a_failed_transfer_says_where_and_how_far(
    number: int, file: StateFile, layer: FailingLayer
) -> None:
    layer.shorten("pwrite", 100, nth=1)
    layer.cut("pwrite", 50, number, nth=2)

    error = the_error("write", file.write_from, 4096, memoryview(pattern(1000)))

    assert (error.path, error.offset, error.expected) == (file.path, 4096, 1000)
    assert (error.actual, error.errno) == (100, number)
    for word in [file.path, "write", "offset 4096", "1000 bytes", "got 100", os.strerror(number)]:
        assert str(word) in str(error)
    assert isinstance(error.__cause__, OSError)


def test_rule_3_a_truncated_file_is_an_early_end(file: StateFile) -> None:
    os.truncate(file.path, 5000)

    error = the_error("read", file.read_into, 4096, memoryview(bytearray(2000)))

    assert (error.offset, error.expected, error.actual, error.errno) == (4096, 2000, 904, None)
    assert f"5000 bytes long and should be {MIB}" in str(error)


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
def test_rule_3_a_transfer_of_nothing_is_an_error_and_no_endless_loop(
    call: str, file: StateFile, layer: FailingLayer
) -> None:
    layer.shorten(call, 10, nth=1)
    layer.shorten(call, 0, nth=2)
    buffer = memoryview(bytearray(1000))

    operation, method = {"preadv": ("read", file.read_into), "pwrite": ("write", file.write_from)}[
        call
    ]
    error = the_error(operation, method, 8, buffer)

    assert (error.offset, error.expected, error.actual) == (8, 1000, 10)


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
def test_a_flipped_bit_passes_unseen(call: str, file: StateFile, layer: FailingLayer) -> None:
    """Why a checkpoint carries checksums: nothing here would notice."""
    layer.corrupt(call, 3)
    file.write_from(0, memoryview(bytes(8)))

    assert read(file, 0, 8) == bytes([0, 0, 0, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (MIB, 1), (MIB - 1, 2), (0, MIB + 1)])
def test_ranges_outside_the_file_are_refused(offset: int, nbytes: int, file: StateFile) -> None:
    for method in (file.read_into, file.write_from):
        with pytest.raises(ValueError, match="do not lie within"):
            method(offset, memoryview(bytearray(nbytes)))
    assert file.path.stat().st_size == MIB


def test_buffers_that_cannot_be_filled_are_refused(file: StateFile) -> None:
    with pytest.raises(ValueError, match="read-only"):
        file.read_into(0, memoryview(b"constant"))
    with pytest.raises(ValueError, match="has gaps"):
        file.write_from(0, memoryview(bytearray(8))[::2])


def test_an_empty_transfer_touches_nothing(file: StateFile, layer: FailingLayer) -> None:
    file.read_into(MIB, memoryview(bytearray()))
    file.write_from(MIB, memoryview(b""))

    assert not layer.count


def test_buffers_of_other_items_move_as_bytes(file: StateFile) -> None:
    numbers: Any = memoryview(bytearray(64)).cast("f", shape=[4, 4])
    numbers[1, 2] = 1.5
    file.write_from(64, numbers)
    again: Any = memoryview(bytearray(64)).cast("f", shape=[4, 4])
    file.read_into(64, again)

    assert again.tolist() == numbers.tolist()


def test_threads_move_distinct_ranges_at_once(tmp_path: Path) -> None:
    piece, count = 64 << 10, 64
    with StateFile.create(tmp_path / "state.bin", piece * count) as file:
        start = threading.Barrier(4)

        def move(worker: int) -> None:
            start.wait()
            for number in range(worker, count, 4):
                file.write_from(number * piece, memoryview(bytes([number]) * piece))
                assert read(file, number * piece, piece) == bytes([number]) * piece

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(move, range(4)))
        content = read(file, 0, file.nbytes)
    assert content == b"".join(bytes([number]) * piece for number in range(count))


# Direct I/O


BLOCK = ALIGN_BYTES


class DescriptorsTold(FailingLayer):
    """Tells for each transfer whether its descriptor was opened for direct I/O."""

    def __init__(self) -> None:
        super().__init__()
        self.were_direct: list[bool] = []

    def preadv(self, fd: int, *rest: Any) -> int:
        return self._told("preadv", fd, *rest)

    def pwrite(self, fd: int, *rest: Any) -> int:
        return self._told("pwrite", fd, *rest)

    def _told(self, call: str, fd: int, *rest: Any) -> int:
        self.were_direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        moved: int = self.__getattr__(call)(fd, *rest)
        return moved


@pytest.fixture
def told() -> DescriptorsTold:
    return DescriptorsTold()


@pytest.fixture
def direct(told: DescriptorsTold) -> Iterator[StateFile]:
    """A file of 1 MiB for direct I/O, on a real disk."""
    WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as scratch:
        try:
            made = StateFile.create(Path(scratch) / "state.bin", MIB, told, is_direct=True)
        except StateFileError as error:
            missing_ability(f"no direct I/O in {WORK}: {error}")
        told.count.clear()
        yield made
        with contextlib.suppress(StateFileError):
            made.close()


def aligned(content: bytes) -> memoryview:
    view = page_aligned(len(content))
    view[:] = content
    return view


def test_rule_5_what_is_aligned_bypasses_the_page_cache(
    direct: StateFile, told: DescriptorsTold
) -> None:
    content, buffer = aligned(pattern(8 * BLOCK)), page_aligned(8 * BLOCK)
    direct.write_from(BLOCK, content)
    direct.read_into(BLOCK, buffer)

    assert direct.is_direct
    assert buffer == content
    assert told.were_direct == [True, True]
    assert direct.resident_bytes() == 0


@pytest.mark.parametrize(
    ("offset", "start", "stop"),
    [
        (1, 0, BLOCK),
        (512, 0, BLOCK),
        (0, 0, BLOCK - 1),
        (0, 0, 512),
        (0, 1, BLOCK + 1),
        (0, 512, BLOCK + 512),
    ],
    ids=["place", "place 512", "length", "length 512", "address", "address 512"],
)
def test_what_is_not_aligned_goes_through_the_page_cache(
    offset: int, start: int, stop: int, direct: StateFile, told: DescriptorsTold
) -> None:
    """512 would do on some disks; the same way on every disk is worth more."""
    content, buffer = aligned(pattern(2 * BLOCK)), page_aligned(2 * BLOCK)
    direct.write_from(offset, content[start:stop])
    direct.read_into(offset, buffer[start:stop])

    assert buffer[start:stop] == content[start:stop]
    assert told.were_direct == [False, False]


def test_memory_whose_address_is_unknown_goes_through_the_page_cache(
    direct: StateFile, told: DescriptorsTold
) -> None:
    direct.write_from(0, aligned(pattern(BLOCK)).toreadonly())

    assert told.were_direct == [False]
    assert read(direct, 0, BLOCK) == pattern(BLOCK)


def test_a_file_without_direct_io_never_uses_it(tmp_path: Path, told: DescriptorsTold) -> None:
    with StateFile.create(tmp_path / "state.bin", MIB, told) as file:
        file.write_from(0, aligned(pattern(BLOCK)))

    assert not file.is_direct
    assert told.were_direct == [False]
    assert told.count["open"] == 1


def test_both_ways_see_the_same_bytes(direct: StateFile, told: DescriptorsTold) -> None:
    """On whatever was cached or dirty before. Three blocks, each side writes in turn."""
    block, odd = aligned(pattern(3 * BLOCK)), bytearray(pattern(3 * BLOCK)[::-1])
    for round_number in range(3):
        direct.read_into(1, memoryview(bytearray(3 * BLOCK - 2)))  # now the pages are cached
        block[0] = round_number
        direct.write_from(0, block)
        assert read(direct, 1, 3 * BLOCK - 2) == block[1:-1]

        odd[5] = round_number
        direct.write_from(1, memoryview(odd)[1:-1])  # dirty pages
        buffer = page_aligned(3 * BLOCK)
        direct.read_into(0, buffer)
        assert buffer[1:-1] == odd[1:-1]
        assert (buffer[0], buffer[-1]) == (round_number, block[-1])
    assert told.were_direct == [False, True, False, False, True] * 3


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
def test_a_short_direct_transfer_goes_on_directly_if_it_ends_aligned(
    call: str, direct: StateFile, told: DescriptorsTold
) -> None:
    told.shorten(call, BLOCK, nth=1)
    told.fail(call, errno.EINTR, nth=2)
    content, buffer = aligned(pattern(4 * BLOCK)), page_aligned(4 * BLOCK)
    direct.write_from(0, content)
    direct.read_into(0, buffer)

    assert buffer == content
    assert told.were_direct == [True] * 4


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
def test_the_rest_of_a_short_transfer_goes_directly_once_it_is_aligned(
    call: str, direct: StateFile, told: DescriptorsTold
) -> None:
    """Place, length and address all move on by what has been transferred."""
    content, buffer = aligned(pattern(3 * BLOCK)), page_aligned(3 * BLOCK)
    told.shorten(call, BLOCK - 100)
    direct.write_from(100, content[100:])
    direct.read_into(100, buffer[100:])

    assert buffer[100:] == content[100:]
    assert told.were_direct == ([False, True, False] if call == "pwrite" else [False, False, True])


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
@pytest.mark.parametrize("nbytes", [100, 512])
def test_a_short_direct_transfer_goes_on_through_the_page_cache_if_not(
    call: str, nbytes: int, direct: StateFile, told: DescriptorsTold
) -> None:
    """The layer moves nothing more than it says, so what is read comes from both ways."""
    told.on(call, lambda real, a: moved_by_copy(real, a, BLOCK + nbytes))
    content, buffer = aligned(pattern(4 * BLOCK)), page_aligned(4 * BLOCK)
    direct.write_from(0, content)
    direct.read_into(0, buffer)

    assert buffer == content
    first = [True, False] if call == "pwrite" else [True]
    assert told.were_direct == first + ([True, False] if call == "preadv" else [True])


def moved_by_copy(real: Any, arguments: Any, nbytes: int) -> int:
    """Do a whole direct transfer beside the caller's memory, and let it have the beginning."""
    fd, buffer, offset = arguments
    is_read = isinstance(buffer, list)
    view = buffer[0] if is_read else buffer
    whole = page_aligned(view.nbytes)
    if is_read:
        real(fd, [whole], offset)
        view[:nbytes] = whole[:nbytes]
    else:
        whole[:nbytes] = view[:nbytes]
        real(fd, whole, offset)
    return nbytes


def test_a_direct_transfer_that_is_to_be_tried_again_is(
    direct: StateFile, told: DescriptorsTold
) -> None:
    told.fail("pwrite", errno.EAGAIN, times=3)
    direct.write_from(0, aligned(pattern(BLOCK)))

    assert told.were_direct == [True] * 4
    assert read(direct, 0, BLOCK) == pattern(BLOCK)


def test_rule_5_a_filesystem_that_refuses_to_open_is_refused(
    tmp_path: Path, layer: FailingLayer
) -> None:
    """And nothing is left."""
    layer.fail("open", errno.EINVAL, nth=2)

    error = the_error(
        "open", lambda: StateFile.create(tmp_path / "state.bin", MIB, layer, is_direct=True)
    )

    assert error.errno == errno.EINVAL
    assert "refuses direct I/O" in str(error)
    assert "--stream-optimizer-state-io auto or buffered" in str(error)
    assert not list(tmp_path.iterdir())
    assert layer.count["close"] == 1


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
def test_rule_5_a_filesystem_that_refuses_to_move_is_an_error(
    call: str, direct: StateFile, told: DescriptorsTold
) -> None:
    """No silent way through the page cache."""
    told.fail(call, errno.EINVAL)
    method = {"preadv": direct.read_into, "pwrite": direct.write_from}[call]

    error = the_error({"preadv": "read", "pwrite": "write"}[call], method, 0, page_aligned(BLOCK))

    assert error.errno == errno.EINVAL
    assert "refuses direct I/O" in str(error)
    assert told.were_direct == [True]


def test_a_buffered_transfer_that_is_invalid_is_not_blamed_on_direct_io(
    file: StateFile, layer: FailingLayer
) -> None:
    layer.fail("pwrite", errno.EINVAL)

    assert "direct" not in str(the_error("write", file.write_from, 0, memoryview(b"x")))


def test_a_file_that_was_replaced_in_between_is_noticed(
    tmp_path: Path, layer: FailingLayer
) -> None:
    """Or the two ways would lead to two files."""

    def replace(real: Any, arguments: Any) -> Any:
        (tmp_path / "state.bin").unlink()
        (tmp_path / "state.bin").write_bytes(bytes(MIB))
        return real(*arguments)

    layer.on("open", replace, nth=2)

    error = the_error(
        "open", lambda: StateFile.create(tmp_path / "state.bin", MIB, layer, is_direct=True)
    )

    assert "replaced" in str(error)
    assert layer.count["close"] == 2


def test_an_existing_file_is_read_directly(direct: StateFile, told: DescriptorsTold) -> None:
    direct.write_from(0, aligned(pattern(2 * BLOCK)))
    told.were_direct.clear()
    direct.path.chmod(0o400)

    with StateFile.open_existing(direct.path, MIB, told, is_direct=True) as again:
        buffer = page_aligned(2 * BLOCK)
        again.read_into(0, buffer)
        error = the_error("write", again.write_from, 0, buffer)
    assert buffer == pattern(2 * BLOCK)
    assert told.were_direct == [True, True]
    assert error.errno == errno.EBADF


def test_an_existing_file_that_refuses_direct_io_is_closed(
    file: StateFile, layer: FailingLayer
) -> None:
    layer.fail("open", errno.EINVAL, nth=2)

    error = the_error(
        "open", lambda: StateFile.open_existing(file.path, MIB, layer, is_direct=True)
    )

    assert "refuses direct I/O" in str(error)
    assert layer.count["close"] == 1


def test_both_descriptors_are_closed_although_one_fails(
    direct: StateFile, told: DescriptorsTold
) -> None:
    told.cut("close", 0, errno.EIO)

    assert the_error("close", direct.close).errno == errno.EIO
    direct.close()

    assert told.count["close"] == 2
    assert the_error("read", direct.read_into, 0, page_aligned(BLOCK)).errno == errno.EBADF


def test_a_truncated_file_is_an_early_end_of_a_direct_read(direct: StateFile) -> None:
    os.truncate(direct.path, BLOCK + 100)

    error = the_error("read", direct.read_into, 0, page_aligned(4 * BLOCK))

    assert (error.expected, error.actual) == (4 * BLOCK, BLOCK + 100)


def test_rule_1_holds_for_direct_io_where_nothing_can_be_reserved(
    direct: StateFile, told: DescriptorsTold
) -> None:
    """The zeros went through the page cache; direct reads see them, and nothing stays."""
    told.fail("posix_fallocate", errno.EOPNOTSUPP)
    path = direct.path.with_name("second.bin")
    with StateFile.create(path, MIB, told, is_direct=True) as second:
        buffer = aligned(pattern(BLOCK))
        second.read_into(MIB - BLOCK, buffer)
    assert buffer == bytes(BLOCK)


# Sync and page cache


def test_rule_4_a_failed_sync_is_final(file: StateFile, layer: FailingLayer) -> None:
    layer.fail("fdatasync", errno.EIO)

    first = the_error("sync", file.sync)
    second = the_error("sync", file.sync)

    assert second is first
    assert first.errno == errno.EIO
    assert layer.count["fdatasync"] == 1


def test_a_dropped_cache_is_gone() -> None:
    """On a real disk: after sync and drop the kernel holds no page, and the bytes are there."""
    WORK.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=WORK)))
        file = stack.enter_context(StateFile.create(scratch / "state.bin", 4 * MIB + 100))
        content = memoryview(pattern(4 * MIB + 100))
        file.write_from(0, content)
        assert file.resident_bytes() == file.nbytes
        file.sync()

        file.drop_page_cache()

        if file.resident_bytes() == file.nbytes:
            missing_ability(f"the filesystem of {WORK} keeps its pages: it is no disk")
        assert file.resident_bytes() == 0
        assert read(file, 4 * MIB, 100) == content[-100:]
        assert 0 < file.resident_bytes() <= file.nbytes


def test_a_refused_drop_is_an_error(file: StateFile, layer: FailingLayer) -> None:
    layer.fail("posix_fadvise", errno.EINVAL)

    assert the_error("drop_page_cache", file.drop_page_cache).errno == errno.EINVAL


# Closing and removing


def test_a_closed_file_moves_nothing(file: StateFile, layer: FailingLayer) -> None:
    file.close()
    file.close()

    assert layer.count["close"] == 1
    for operation, call in [
        ("read", lambda: file.read_into(0, memoryview(bytearray(8)))),
        ("write", lambda: file.write_from(0, memoryview(bytes(8)))),
        ("sync", file.sync),
        ("drop_page_cache", file.drop_page_cache),
        ("resident_bytes", file.resident_bytes),
    ]:
        assert the_error(operation, call).errno == errno.EBADF


def test_an_error_of_close_is_told_and_not_repeated(file: StateFile, layer: FailingLayer) -> None:
    layer.cut("close", 0, errno.EIO)

    assert the_error("close", file.close).errno == errno.EIO
    file.close()

    assert layer.count["close"] == 1


def test_a_removed_file_is_gone(file: StateFile) -> None:
    file.remove()
    file.remove()

    assert not file.path.exists()
    assert the_error("sync", file.sync).errno == errno.EBADF


def test_a_file_that_cannot_be_removed_is_named(file: StateFile, layer: FailingLayer) -> None:
    layer.fail("unlink", errno.EROFS)

    assert the_error("remove", file.remove).errno == errno.EROFS
    assert layer.count["close"] == 1


def test_a_file_removed_behind_our_back_still_serves(file: StateFile) -> None:
    file.path.unlink()
    file.write_from(5, memoryview(b"here"))
    file.sync()

    assert read(file, 5, 4) == b"here"
    file.remove()


# Errors


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
@pytest.mark.parametrize(
    "error",
    [
        StateStoreError("the store has failed"),
        StateFileError(Path("/x"), "read", offset=1, expected=3, actual=2, errno=5, hint="why"),
        StateFileError(Path("/x"), "close"),
        DirectoryError(Path("/x"), "cannot be used", errno=30, hint="do"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_the_way_to_another_rank(error: Exception, copied: Any) -> None:
    error.add_note("on rank 3")

    again = copied(error)

    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_the_message_names_everything() -> None:
    error = StateFileError(Path("/x"), "read", offset=1, expected=3, actual=2, errno=5, hint="why")

    assert str(error) == (
        "/x: read failed at offset 1: expected 3 bytes, got 2: [Errno 5] Input/output error; why"
    )
    assert OS_LAYER is os
