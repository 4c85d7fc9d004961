"""What would make a model fit that does not: one change at a time, each computed as a plan.

Tried are other settings, bytes of gradients, more ranks, and more of each kind of memory. A change
that fits with the formats and tiers that were asked for is told with these; else with any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ..budgets import HOST_RESERVE, MIN_HOST_RESERVE_BYTES
from ..config import GB, NUM_DEVICE_SLOTS
from .choices import LOSS, Question, Row, best, rows
from .machine import Machine
from .ranks import Parallel

_MOST_TIMES = 1024
"""More ranks are tried up to so many times the ranks."""
_SMALLER_SLOTS = (2, 4, 8)
_TENTH = GB // 10


@dataclass(frozen=True)
class Advice:
    """A change that makes it fit.

    Attributes:
        change: what to do.
        question: with it.
        row: the best choice that fits then.
    """

    change: str
    question: Question
    row: Row


_Change = Callable[[Question], Advice | None]


def advise(question: Question) -> list[Advice]:
    """Return changes each of which alone makes it fit; for a question of which no choice fits."""
    found: list[Advice | None] = [*_settings(question)]
    changes: list[_Change] = [_gradients, *_MORE_RANKS, *_MORE_OF_ONE]
    found += [_tried(change, question) for change in changes]
    several = _tried(_MORE_OF_ALL, question)
    if several is not None and len(_larger_kinds(question, several.question)) > 1:
        found.append(several)
    return [each for each in found if each is not None]


def _larger_kinds(before: Question, after: Question) -> list[str]:
    """Return of which kinds of memory there is more."""
    pairs = {
        field: (getattr(before.machine, field), getattr(after.machine, field)) for field in _KINDS
    }
    return [field for field, (was, now) in pairs.items() if was is not None and now > was]


def _tried(change: _Change, q: Question) -> Advice | None:
    """Return what a change comes to with what was asked for, or else with other formats, too."""
    advice = change(q)
    if advice is None:
        advice = change(replace(q, formats=q.accepted_formats, are_tiers_given=False))
        if advice is not None:
            others = "other formats or tiers" if q.are_tiers_given else "other formats"
            advice = replace(advice, change=f"{advice.change}, with {others}")
    return advice


def _fitting(change: str, question: Question) -> Advice | None:
    stock, gpu = question.stock, question.machine.gpu_bytes
    if gpu is not None and stock.params + stock.grads + stock.reserve > gpu:
        return None  # wherever the state is
    try:
        row = best(rows(question))
    except ValueError:  # a budget that was given is too large for this machine
        return None
    return None if row is None else Advice(change, question, row)


# ----------------------------------------------------------------------------------------- settings


def _settings(q: Question) -> Iterator[Advice]:
    """Yield what formats, tiers and buckets can do, on the same machine."""
    others = tuple(each for each in q.accepted_formats if each not in q.formats)
    tiers = "leave out --stream-optimizer-state-host-gb and -device-gb"
    singles: list[Advice | None] = []
    if others:
        singles.append(_fitting("other formats", replace(q, formats=others)))
    if q.are_tiers_given:
        singles.append(_fitting(f"other tiers, {tiers}", replace(q, are_tiers_given=False)))
    if others and q.are_tiers_given and not any(singles):
        both = replace(q, formats=others, are_tiers_given=False)
        singles.append(_fitting(f"other formats and tiers, {tiers}", both))
    yield from (each for each in singles if each is not None)
    for times in _SMALLER_SLOTS:
        numel = max(q.config.bucket_numel // times, 1)
        flag = f"smaller slots, --stream-optimizer-state-bucket-numel {numel * NUM_DEVICE_SLOTS}"
        advice = _fitting(flag, replace(q, config=replace(q.config, bucket_numel=numel)))
        if advice is not None:
            yield advice
            break


def _gradients(q: Question) -> Advice | None:
    if q.grads != "fp32":
        return None
    return _fitting("gradients in BF16, --grad-reduce-in-bf16", replace(q, grads="bf16"))


# -------------------------------------------------------------------------------------------- ranks


def _larger(q: Question, name: str, kind: str) -> Advice | None:
    """Return the least size, in powers of two, with which it fits."""
    now = getattr(q.parallel, name)
    times = 2
    while times <= _MOST_TIMES:
        size = now * times
        times *= 2
        if name == "tp" and size > q.gpus_per_node:
            return None  # tensor parallelism over a network is no advice
        sizes = {**vars(q.parallel), name: size}
        if name == "tp" and q.parallel.etp == q.parallel.tp:
            sizes["etp"] = size
        try:
            question = q.split(Parallel(**sizes))
        except ValueError:
            continue
        ranks = f"{question.parallel.world} GPUs instead of {q.parallel.world}"
        advice = _fitting(f"{kind}, --{name} {size} instead of {now} ({ranks})", question)
        if advice is not None:
            return advice
    return None


_MORE_RANKS = [
    *(partial(_larger, name=name, kind="more ranks") for name in ("dp", "tp", "pp")),
    partial(_larger, name="ep", kind="experts over more ranks"),
]

# ------------------------------------------------------------------------------------------- memory


def _needed_gpu(row: Row, machine: Machine) -> int:
    return row.streamed.device.total


def _needed_host(row: Row, machine: Machine) -> int:
    """Return the memory of a node with which `Streamed.lacks` finds enough."""
    s = row.streamed
    pinned = s.host_nbytes * machine.gpus
    asked = min(s.config.host_bytes or 0, s.state_nbytes) + s.most_host_slot_nbytes
    with_reserve = max(math.ceil(pinned / (1 - HOST_RESERVE)), pinned + MIN_HOST_RESERVE_BYTES)
    return max(asked * machine.gpus, with_reserve if pinned else 0)


def _needed_disk(row: Row, machine: Machine) -> int:
    return row.streamed.disk_nbytes * machine.gpus


_Need = Callable[[Row, Machine], int]
_KINDS: dict[str, tuple[str, _Need]] = {
    "gpu_bytes": ("GB a GPU", _needed_gpu),
    "host_bytes": ("GB of host memory a node", _needed_host),
    "disk_bytes": ("GB of disk a node", _needed_disk),
}
"""By what they cost: of several the first is to be the least."""


def _more_of(q: Question, fields: tuple[str, ...]) -> Advice | None:
    """Return how much of these kinds of memory is enough, at the least loss."""
    known = [field for field in fields if getattr(q.machine, field) is not None]
    if not known:
        return None
    # So much that all state and slots fit; None would be too little to plan a host tier with.
    plenty = 100 * (q.stock.total + GB) * q.machine.gpus
    changed = replace(q, machine=replace(q.machine, **dict.fromkeys(known, plenty)))
    needs = [_KINDS[field] for field in known]

    def cost(row: Row) -> tuple[int, ...]:
        return (row.loss, *(need(row, q.machine) for _, need in needs))

    try:
        fitting = [row for row in rows(changed) if not row.lacks]
    except ValueError:
        return None
    if not fitting:
        return None
    row = min(fitting, key=cost)
    enough = {
        field: max(getattr(q.machine, field), -(-need(row, q.machine) // _TENTH) * _TENTH)
        for field, (_, need) in zip(known, needs, strict=True)
    }
    question = replace(q, machine=replace(q.machine, **enough))
    if len(known) == 1:
        lossless = tuple(each for each in q.formats if LOSS[each[1]] <= row.loss)
        question, row = _least(replace(question, formats=lossless), known[0], row, q.machine)
    sizes = [
        f"{getattr(question.machine, field) / GB:.1f} {unit} instead of "
        f"{getattr(q.machine, field) / GB:.1f}"
        for field, (unit, _) in zip(known, needs, strict=True)
        if getattr(question.machine, field) > getattr(q.machine, field)
    ]
    question = replace(question, formats=q.formats)
    return Advice(f"more memory, {' and '.join(sizes)}", question, row)


def _least(q: Question, field: str, row: Row, before: Machine) -> tuple[Question, Row]:
    """Bisect for the least of one kind of memory: what it does not hold, others may."""
    low, high = getattr(before, field), getattr(q.machine, field)
    while high - low > _TENTH:
        middle = -(-(low + high) // 2 // _TENTH) * _TENTH
        if middle in (low, high):
            break
        tried = replace(q, machine=replace(q.machine, **{field: middle}))
        found = best(rows(tried))
        if found is None:
            low = middle
        else:
            high, row, q = middle, found, tried
    return q, row


_MORE_OF_ONE = [partial(_more_of, fields=(field,)) for field in _KINDS]
_MORE_OF_ALL = partial(_more_of, fields=tuple(_KINDS))
