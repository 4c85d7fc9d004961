"""How long a step takes, how much of it training waits for, and what it wears off the disks.

The verbs of a step work at the same time on different buckets, so the slowest path decides:

    disk      2 x the fewer of bytes read and written by all ranks of a node / mixed bandwidth
              + what is only written / bandwidth of writing alone, or mixed if that is not known;
              also not faster than either alone
    PCIe      bytes of the host and disk tier, each way / bandwidth each way with both at once
              + `SECONDS_PER_PARAM` x params     fingerprints and what else is not a copy
              + largest bucket / bandwidth       its last download: nothing is left beside it
    update    params / rate of the optimizer, as in a stock run

Steps back to back take the longest of these. With forward and backward between two steps the last
host slots are written behind the first of them, and as many bytes are read before the second, if
buckets are read at all: 2 x min(disk tier, host slots) at most, as far as the disk gets in that
time. The last download is hidden, too. What is left is exposed. (`pipeline`, decision 0014.)

`SECONDS_PER_PARAM` is fitted to one run: all state in the host tier, 2.147 B params, 0.545 s a step
at 50.6 GB/s each way (docs/benchmarks/2026-11-30-engine.md). Rates of updates are those of stock
runs on an H200 (the same, anchors of 2026-11-29, and docs/benchmarks/2026-11-30-muon.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine
from .memory import Streamed
from .ranks import Rank
from .rates import Rates

SECONDS_PER_PARAM = 1.13e-11
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of one setting.

    Attributes:
        step: back to back; None if a rate that it needs is not known.
        slowest: the path that decides: ``disk``, ``PCIe`` or ``update``.
        exposed: what training waits for with forward and backward between two steps; None if how
            long these take is not known.
    """

    step: float | None
    slowest: str
    exposed: float | None

    def period(self, between: float | None) -> float | None:
        """Return the seconds from one step to the next."""
        if between is None or self.exposed is None:
            return self.step
        return between + self.exposed


def step_time(
    streamed: Streamed, rank: Rank, machine: Machine, rates: Rates, between: float | None
) -> StepTime:
    """Predict a step; ``between`` are the seconds of forward and backward, if they are known."""
    ranks = machine.gpus
    read, written = streamed.read_nbytes * ranks, streamed.disk_nbytes * ranks
    disk = _disk_seconds(read, written, rates)
    pcie = _over(streamed.away_nbytes, rates.pcie)
    if pcie is not None and streamed.away_nbytes:
        pcie += SECONDS_PER_PARAM * rank.main_params
    if disk is None or pcie is None:
        return StepTime(None, "", None)
    last = (_over(streamed.bucket_nbytes, rates.pcie) or 0.0) if streamed.away_nbytes else 0.0
    paths = {"disk": disk, "PCIe": pcie + last, "update": rank.main_params / rates.update}
    slowest = max(paths, key=lambda name: paths[name])
    exposed = None
    if between is not None:
        hidden = (streamed.behind_nbytes + streamed.ahead_nbytes) * ranks
        saved = 0.0 if not disk else min(disk * hidden / (read + written), between)
        exposed = max(disk - saved, pcie, paths["update"])
    return StepTime(paths[slowest], slowest, exposed)


def _disk_seconds(read: int, written: int, rates: Rates) -> float | None:
    # Slots for the whole disk tier: nothing is read, and nothing slows the writes down.
    both = 2 * min(read, written)
    only_written = _over(read + written - both, rates.disk_write or rates.disk)
    seconds = _over(both, rates.disk)
    if seconds is None or only_written is None:
        return None
    seconds += only_written
    alone = (_over(read, rates.disk_read), _over(written, rates.disk_write))
    return max(seconds, *(each for each in alone if each is not None), 0.0)


def _over(nbytes: int, rate: float | None) -> float | None:
    """Return the seconds that bytes take; None if that is not known."""
    if not nbytes:
        return 0.0
    return None if rate is None else nbytes / rate


def written_per_day(
    streamed: Streamed, machine: Machine, time: StepTime, between: float | None
) -> float | None:
    """Return the bytes that a node's disks take in a day of steps; None if that is not known."""
    if not streamed.disk_nbytes:
        return 0.0
    period = time.period(between)
    if not period:
        return None
    return streamed.disk_nbytes * machine.gpus * _SECONDS_PER_DAY / period
