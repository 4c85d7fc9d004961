"""The log line of a step is stable, and its spans are in order of time."""

from __future__ import annotations

from megatron.core.optimizer.nvme_state_store.report import Span, StepReport


def test_the_log_line_names_every_figure_once_and_in_its_unit() -> None:
    """Programs parse it: GB are 10^9 bytes, seconds have three digits."""
    report = StepReport(
        buckets=12,
        seconds=1.23456,
        read_wait=0.1,
        write_wait=0.2,
        upload=0.3,
        update=0.4,
        publish=0.5,
        download=0.6,
        bytes_read=1_234_567_890,
        bytes_written=2_000_000_000,
        bytes_uploaded=3,
        bytes_downloaded=4,
    )

    assert str(report) == (
        "12 buckets, read 1.235 GB, wrote 2.000 GB in 1.235s (read-wait 0.100s upload 0.300s "
        "update 0.400s publish 0.500s download 0.600s write-wait 0.200s)"
    )


def test_a_report_of_no_step_is_all_zeros() -> None:
    """As of a store that has not stepped."""
    assert str(StepReport()) == (
        "0 buckets, read 0.000 GB, wrote 0.000 GB in 0.000s (read-wait 0.000s upload 0.000s "
        "update 0.000s publish 0.000s download 0.000s write-wait 0.000s)"
    )
    assert StepReport().spans() == []


def test_spans_are_made_when_they_are_asked_for_and_sorted_by_begin_and_end() -> None:
    """Not by verb, and not before: making them waits for what is under way."""
    made: list[int] = []

    def make() -> list[Span]:
        made.append(1)
        return [
            ("write", 0, 3.0, 9.0),
            ("update", 1, 1.0, 2.0),
            ("read", 1, -2.0, -1.0),
            ("upload", 0, 1.0, 1.5),
        ]

    report = StepReport(make_spans=make)
    assert "make" not in repr(report)
    assert str(report) and made == []
    assert [span[:2] for span in report.spans()] == [
        ("read", 1),
        ("upload", 0),
        ("update", 1),
        ("write", 0),
    ]
    assert made == [1]
