"""Streams and events of the emulated device.

Every operator runs on the CPU at once, so a stream is an identity and nothing more, and waiting has
no effect. A missing wait can therefore not be found here: ordering is tested on a GPU.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch

from tests import emulated_device

_IDS = itertools.count(1)


class Stream:
    """Synchronous double of `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", emulated_device.current_index())
        self.device_index = emulated_device.current_index()
        self.priority = priority
        self.stream_id: int = kwargs.get("stream_id", next(_IDS))

    @property
    def cuda_stream(self) -> int:
        """Number that stands for the driver's handle."""
        return self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority, as an H200 reports them."""
        return (0, -5)

    def wait_stream(self, stream: Stream) -> None:
        """Accept and ignore: the work of `stream` is done already."""

    def wait_event(self, event: Event) -> None:
        """Accept and ignore: the work before `event` is done already."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event` (a new one by default) and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: nothing is ever pending."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> Stream:
        self._outer = current_stream()
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._outer)


class Event:
    """Synchronous double of `torch.cuda.Event`; times are wall clock times of the records."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self._recorded_at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Take the time."""
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Accept and ignore."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: nothing is ever pending, and an event not yet recorded counts as done."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two records; the errors are those of CUDA."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_at is None or end_event._recorded_at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_at - self._recorded_at) * 1e3


DEFAULT_STREAM = Stream(stream_id=0)


class _Current(threading.local):
    stream: Stream = DEFAULT_STREAM


_CURRENT = _Current()


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of this thread."""
    return _CURRENT.stream


def default_stream(device: Any = None) -> Stream:
    """Return the default stream."""
    return DEFAULT_STREAM


def set_stream(stream: Stream | None) -> None:
    """Make `stream` this thread's current stream; None leaves it, as in torch."""
    if stream is not None:
        _CURRENT.stream = stream
