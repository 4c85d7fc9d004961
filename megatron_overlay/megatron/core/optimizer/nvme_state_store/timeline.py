"""When each verb of a step worked on each bucket."""

from __future__ import annotations

import time
from functools import partial

import torch

from .io_request import Ticket
from .layout import Bucket
from .report import Span, StepReport
from .staging import Staging


class StepTimes:
    """When each verb worked on each bucket, from marks that are read when the step is over."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._begin: torch.cuda.Event | None = None
        self._began = 0.0
        self._marks: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._tickets: list[tuple[str, int, Ticket]] = []

    def begin(self) -> None:
        """Begin to count; what was added before began before zero."""
        self._begin = self._staging.mark()
        self._began = time.monotonic()

    def add(
        self, verb: str, bucket: Bucket, begin: torch.cuda.Event, end: torch.cuda.Event
    ) -> None:
        """Remember the marks of a verb of the device."""
        self._marks.append((verb, bucket.index, begin, end))

    def add_ticket(self, verb: str, bucket: Bucket, ticket: Ticket) -> None:
        """Remember the ticket of a verb of the disk."""
        self._tickets.append((verb, bucket.index, ticket))

    def finish(self, report: StepReport) -> None:
        """Wait for the last publish; add up the seconds of what is over, and offer all spans."""
        self._staging.mark().synchronize()
        for verb, _, begin, end in self._marks:
            if end.query():  # type: ignore[no-untyped-call]
                seconds = self._staging.seconds_between(begin, end)
                setattr(report, verb, getattr(report, verb) + seconds)
        report.make_spans = self.spans

    def spans(self) -> list[Span]:
        """Return (verb, bucket, begin, end) of all; waits for what is under way."""
        assert self._begin is not None, "the step was begun"
        found: list[Span] = []
        for verb, bucket, begin, end in self._marks:
            since = partial(self._staging.seconds_between, self._begin)
            found.append((verb, bucket, since(begin), since(end)))
        for verb, bucket, ticket in self._tickets:
            span = ticket.span
            if span is not None:
                found.append((verb, bucket, span.begin - self._began, span.end - self._began))
        return found
