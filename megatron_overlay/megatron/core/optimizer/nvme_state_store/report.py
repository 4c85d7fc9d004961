"""What one step did and how long it took: for the log line, metrics and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Span = tuple[str, int, float, float]
"""(verb, bucket, begin, end): seconds since the step began. Reads ahead begin before zero, writes
behind end after the step."""


@dataclass
class StepReport:
    """One step of one store.

    Attributes:
        buckets: that it walked.
        seconds: from the call to its return: what training waits for.
        read_wait: seconds that the caller's thread waited for bytes from disk.
        write_wait: seconds that it waited for a slot whose bytes were still being written.
        upload: seconds of the upload stream.
        update: seconds of the caller's stream in updates, with decoding before them.
        publish: the same in publishing, with encoding after it.
        download: seconds of the download stream, of those buckets that have arrived.
        bytes_read: bytes that this step took from disk, also those read ahead of it.
        bytes_written: bytes that it gave to the disk, also those written behind it.
        bytes_uploaded: bytes from host to device.
        bytes_downloaded: bytes from device to host.
        bytes_cached: bytes of the files that the page cache holds at the end, if I/O is buffered.
    """

    buckets: int = 0
    seconds: float = 0.0
    read_wait: float = 0.0
    write_wait: float = 0.0
    upload: float = 0.0
    update: float = 0.0
    publish: float = 0.0
    download: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_uploaded: int = 0
    bytes_downloaded: int = 0
    bytes_cached: int | None = None
    make_spans: Callable[[], list[Span]] | None = field(default=None, repr=False)

    def spans(self) -> list[Span]:
        """Return when each verb worked on each bucket, in order of time.

        Waits for what is under way; after the next step they are gone.
        """
        found = [] if self.make_spans is None else self.make_spans()
        return sorted(found, key=lambda span: span[2:])

    def total_seconds(self) -> float:
        """Return the seconds from the first verb to the end of the last one, exposed or not.

        Waits for what is under way; after the next step it is gone.
        """
        spans = self.spans()
        if not spans:
            return self.seconds
        return max(end for *_, end in spans) - min(begin for _, _, begin, _ in spans)

    def __str__(self) -> str:
        text = (
            f"{self.buckets} buckets, read {self.bytes_read / 1e9:.3f} GB, wrote "
            f"{self.bytes_written / 1e9:.3f} GB in {self.seconds:.3f}s (read-wait "
            f"{self.read_wait:.3f}s upload {self.upload:.3f}s update {self.update:.3f}s publish "
            f"{self.publish:.3f}s download {self.download:.3f}s write-wait {self.write_wait:.3f}s)"
        )
        if self.bytes_cached is not None:
            text += f" page cache {self.bytes_cached / 1e9:.3f} GB"
        return text
