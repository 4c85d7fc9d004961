"""All ranks of a group raise the same error, which names each that failed, or none raises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer.nvme_state_store.agreement import (
    agree,
    agreed_error,
    gather,
)
from megatron.core.optimizer.nvme_state_store.errors import StateStoreError

from tests.rank_pool import RankPool

CPU = torch.device("cpu")
DISK, KERNEL = StateStoreError("disk is full"), ValueError("bad kernel")


def errors_of_each_meeting(
    brought: Sequence[Exception | None], meetings: Sequence[Sequence[int] | None]
) -> list[str | None]:
    """Go through meetings with one error for each rank; return what this rank has after each.

    A meeting is of the ranks given, or of all.
    """
    dist.init_process_group("gloo")
    rank, told = dist.get_rank(), []
    error = brought[rank]
    # Every rank makes every group, as `new_group` wants it.
    groups = [dist.group.WORLD if each is None else dist.new_group(each) for each in meetings]
    for members, group in zip(meetings, groups, strict=True):
        if members is None or rank in members:
            error = agreed_error(error, group, CPU)
            assert error is None or (isinstance(error, StateStoreError) and error.names_ranks)
        told.append(None if error is None else str(error))
    return told


def test_without_an_error_there_is_none(ranks: RankPool) -> None:
    told = ranks.run(errors_of_each_meeting, 3, brought=[None] * 3, meetings=[None, None])
    assert told == [[None, None]] * 3


def test_an_error_of_one_rank_is_that_of_all_and_names_it(ranks: RankPool) -> None:
    """One of another kind is told with its kind."""
    told = ranks.run(errors_of_each_meeting, 3, brought=[None, DISK, None], meetings=[None])
    assert told == [["rank 1: disk is full"]] * 3
    told = ranks.run(errors_of_each_meeting, 3, brought=[None, None, KERNEL], meetings=[None])
    assert told == [["rank 2: ValueError: bad kernel"]] * 3


def test_every_rank_that_failed_is_named_and_equal_causes_are_told_once(ranks: RankPool) -> None:
    brought = [DISK, KERNEL, None, DISK]
    told = ranks.run(errors_of_each_meeting, 4, brought=brought, meetings=[None])
    assert told == [["rank 0, 3: disk is full; rank 1: ValueError: bad kernel"]] * 4


def test_an_agreed_error_keeps_its_text_at_later_meetings(ranks: RankPool) -> None:
    """A step has one for each bucket, and all ranks bring it to each."""
    brought = [DISK, None, KERNEL]
    told = ranks.run(errors_of_each_meeting, 3, brought=brought, meetings=[None] * 3)
    assert told == [["rank 0: disk is full; rank 2: ValueError: bad kernel"] * 3] * 3


def test_an_error_goes_from_one_group_to_the_next_with_the_ranks_of_its_origin(
    ranks: RankPool,
) -> None:
    """Ranks are global; one that did not fail is not named, though it brings the error."""
    told = ranks.run(
        errors_of_each_meeting, 4, brought=[None] * 3 + [DISK], meetings=[[2, 3], [0, 2], None]
    )
    cause = "rank 3: disk is full"
    assert told == [[None, cause, cause], [None, None, cause], *[[cause] * 3] * 2]


def test_agreed_and_new_errors_meet(ranks: RankPool) -> None:
    """Each is there once."""
    told = ranks.run(
        errors_of_each_meeting, 3, brought=[KERNEL, None, DISK], meetings=[[1, 2], None]
    )
    both = "rank 0: ValueError: bad kernel; rank 2: disk is full"
    assert [each[-1] for each in told] == [both] * 3


def raised() -> tuple[str, str]:
    """Return what `agree` raises on a rank, and its cause, if only the last one fails."""
    dist.init_process_group("gloo")
    is_last = dist.get_rank() == dist.get_world_size() - 1
    try:
        agree(KERNEL if is_last else None, dist.group.WORLD, CPU)
    except StateStoreError as error:
        return str(error), repr(error.__cause__)
    return "", ""


def test_what_is_raised_has_the_ranks_own_error_as_its_cause(ranks: RankPool) -> None:
    text = "rank 1: ValueError: bad kernel"
    assert ranks.run(raised, 2) == [(text, "None"), (text, repr(KERNEL))]


def agreed_alone_then_with_others() -> str:
    """Return what all agree on, if the last rank has an error that it agreed on with itself."""
    dist.init_process_group("gloo")
    error: Exception | None = None
    if dist.get_rank() == dist.get_world_size() - 1:
        try:
            agree(DISK, None, CPU)
        except StateStoreError as raised_alone:
            error = raised_alone
    return str(agreed_error(error, dist.group.WORLD, CPU))


def test_an_error_that_a_rank_raised_alone_gets_its_name_from_the_others(ranks: RankPool) -> None:
    """A store without peers has agreed with nobody when the optimizers of all ranks do."""
    assert ranks.run(agreed_alone_then_with_others, 2) == ["rank 1: disk is full"] * 2


def gathered() -> dict[int, str]:
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    return {} if dist.get_rank() == 0 else gather(f"of {dist.get_rank()}", group)


def test_values_are_gathered_by_global_rank(ranks: RankPool) -> None:
    everything = {1: "of 1", 2: "of 2"}
    assert ranks.run(gathered, 3) == [{}, everything, everything]


def test_a_rank_alone_agrees_with_itself() -> None:
    """Nobody else has failed, so no rank is named."""
    assert agreed_error(None, None, CPU) is None
    error = agreed_error(KERNEL, None, CPU)
    assert str(error) == "ValueError: bad kernel"
    assert str(agreed_error(error, None, CPU)) == "ValueError: bad kernel"
    assert gather("mine", None) == {0: "mine"}
