"""Train, save, resume in fresh processes; and the same without the break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import gpt
from tests.gpt import Run
from tests.rank_pool import RankPool

SAVED_AT, UNTIL = 3, 5


@dataclass(frozen=True, slots=True)
class Scenario:
    """A way to train: how many ranks, and which arguments."""

    name: str
    world_size: int
    arguments: Sequence[str]


@dataclass(frozen=True, slots=True)
class Resumption:
    """The runs of one scenario; each list has one `Run` for each rank."""

    scenario: Scenario
    checkpoint: Path
    straight: list[Run]
    before: list[Run]
    after: list[Run]


def train_straight(ranks: RankPool, scenario: Scenario) -> list[Run]:
    """Train to the end without a break."""
    return ranks.run(gpt.train, scenario.world_size, arguments=scenario.arguments, until=UNTIL)


def resume(
    ranks: RankPool,
    scenario: Scenario,
    checkpoint: Path,
    after_setup: Callable[[Sequence[Any], Any], None] | None = None,
) -> list[Run]:
    """Load `checkpoint` in fresh processes and train to the end."""
    return ranks.run(
        gpt.train,
        scenario.world_size,
        arguments=scenario.arguments,
        until=UNTIL,
        load=str(checkpoint),
        after_setup=after_setup,
    )


def break_and_resume(ranks: RankPool, scenario: Scenario, checkpoint: Path) -> Resumption:
    """Make all runs of a scenario; the checkpoint stays for more of them."""
    before = ranks.run(
        gpt.train,
        scenario.world_size,
        arguments=scenario.arguments,
        until=SAVED_AT,
        save=str(checkpoint),
    )
    return Resumption(
        scenario=scenario,
        checkpoint=checkpoint,
        straight=train_straight(ranks, scenario),
        before=before,
        after=resume(ranks, scenario, checkpoint),
    )


def differences(ours: Sequence[Run], theirs: Sequence[Run]) -> list[list[str]]:
    """Return for each rank the names of the final state in which two runs differ."""
    return [one.final.differences(other.final) for one, other in zip(ours, theirs, strict=True)]
