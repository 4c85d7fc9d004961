"""A plan as a table for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..config import GB
from .advice import Advice, advise
from .choices import Question, Row, best, faster, flags
from .machine import DeviceBytes
from .model import Kind

_HEAD = (
    *("main", "moments", "tiers", "GPU", "host", "disk", "node host", "node disk"),
    *("step s", "by", "exposed s", "TB/day", "fits"),
)
_TB = 10**12
_DAYS_OF_A_RATING = 5 * 365
"""A drive of one write of all of it a day, for five years, takes so many times its size."""


def as_text(question: Question, choices: Sequence[Row], warnings: Sequence[str]) -> str:
    """Return the table, what is suggested, and what to be warned of."""
    q = question
    lines = [_model_line(q), _ranks_line(q), _stock_line(q), ""]
    table = [_HEAD, *(_cells(q, row) for row in choices)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        left = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(cells[3:-1], widths[3:-1], strict=True)]
        lines.append("  ".join((*left, *right, cells[-1])).rstrip())
    lines += ["", *_suggestion(q, choices), *(f"warning: {text}" for text in warnings)]
    return "\n".join(lines) + "\n"


def _model_line(q: Question) -> str:
    experts = q.model.numel(Kind.EXPERT)
    of_experts = f", {_billions(experts)} of them experts'" if experts else ""
    return (
        f"model   {_billions(q.model.numel())} params{of_experts}; on the largest rank "
        f"{_billions(q.rank.params)}, with the state of {_billions(q.rank.main_params)}"
    )


def _ranks_line(q: Question) -> str:
    p = q.parallel
    nodes = -(-p.world // q.machine.gpus)
    return (
        f"ranks   {p.world} on {nodes} {'node' if nodes == 1 else 'nodes'} of {q.machine.gpus}: dp "
        f"{p.dp} tp {p.tp} pp {p.pp} cp {p.cp} ep {p.ep} etp {p.etp} (experts' dp {p.expert_dp}); "
        f"{q.optimizer}, gradients {q.grads}"
    )


def _stock_line(q: Question) -> str:
    stock = q.stock
    parts = " + ".join(
        f"{name} {_gb(nbytes)}"
        for name, nbytes in asdict(stock).items()
        if nbytes or name in ("params", "grads", "state")
    )
    return f"stock   {_gb(stock.total)} GB a GPU = {parts}{_stock_verdict(q, stock)}"


def _stock_verdict(q: Question, stock: DeviceBytes) -> str:
    gpu = q.machine.gpu_bytes
    if gpu is None:
        return ""
    return f": {'fits' if stock.total <= gpu else 'does not fit'} {_gb(gpu)} GB"


def _unknown(q: Question, row: Row) -> list[str]:
    """Return of what a choice needs some and the size was not told."""
    s, machine = row.streamed, q.machine
    sizes = (
        ("GPU", s.device.total, machine.gpu_bytes),
        ("host", s.host_nbytes, machine.host_bytes),
        ("disk", s.disk_nbytes, machine.disk_bytes),
    )
    return [name for name, needed, there in sizes if needed and there is None]


def _cells(q: Question, row: Row) -> tuple[str, ...]:
    s, machine = row.streamed, q.machine
    unknown = _unknown(q, row)
    verdict = f"? {', '.join(unknown)}" if unknown else "yes"
    return (
        s.config.main_storage,
        s.config.moment_dtype,
        row.tiers,
        *(_gb(nbytes) for nbytes in (s.device.total, s.host_nbytes, s.disk_nbytes)),
        *(_gb(nbytes * machine.gpus) for nbytes in (s.host_nbytes, s.disk_nbytes)),
        _seconds(row.time.step),
        row.time.slowest or "-",
        _seconds(row.time.exposed),
        "-" if row.written_per_day is None else f"{row.written_per_day / _TB:.1f}",
        f"no: {', '.join(row.lacks)}" if row.lacks else verdict,
    )


def _suggestion(q: Question, choices: Sequence[Row]) -> list[str]:
    chosen = best(choices)
    if chosen is None:
        return _advice(advise(q))
    lines = []
    gpu = q.machine.gpu_bytes
    if gpu is not None and q.stock.total <= gpu:
        lines.append("the stock run fits: stream only if its memory is wanted for something else")
    lines.append(f"suggested: {chosen.name}")
    words = flags(q, chosen)
    lines += [f"    {word} \\" for word in words[:-1]] + [f"    {words[-1]}"]
    lines += _wear(q, chosen)
    other = faster(choices, chosen)
    if other is not None:
        lines.append(
            f"faster: {other.name}, {_seconds(other.waits)} s instead of "
            f"{_seconds(chosen.waits)} s, with rounded moments"
        )
    return lines


def _advice(found: Sequence[Advice]) -> list[str]:
    if not found:
        return ["nothing fits, and no change of one thing that was tried would make it fit"]
    lines = ["nothing fits. Each of these alone would make it fit:"]
    return lines + [f"    {each.change}: {each.row.name}" for each in found]


def _wear(q: Question, row: Row) -> list[str]:
    wear = row.written_per_day
    if not wear:
        return []
    text = (
        f"wear: {row.streamed.disk_nbytes * q.machine.gpus / GB:.1f} GB a step and "
        f"{wear / _TB:.1f} TB a day on the disks of a node"
    )
    if q.between is None:
        text += ", if steps are all it does"
    if q.endurance is not None:
        text += f"; {q.endurance / _TB:g} TB of endurance last {q.endurance / wear:.0f} days"
    else:
        drives = 365 * wear / _DAYS_OF_A_RATING / _TB
        text += f"; in a year, the life of {drives:.1f} TB of drives rated 1 DWPD for 5 years"
    return [text]


def _billions(count: int) -> str:
    return f"{count / 1e9:.3f} B"


def _gb(nbytes: int) -> str:
    return f"{nbytes / GB:.1f}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


def as_json(question: Question, choices: Sequence[Row], warnings: Sequence[str]) -> dict[str, Any]:
    """Return the same, and all numbers in bytes, seconds and params."""
    q = question
    chosen = best(choices)
    stock = q.stock
    gpu = q.machine.gpu_bytes
    return {
        "model": {"params": q.model.numel(), "expert_params": q.model.numel(Kind.EXPERT)},
        "parallel": {**asdict(q.parallel), "world": q.parallel.world},
        "optimizer": q.optimizer,
        "rank": {"params": q.rank.params, "main_params": q.rank.main_params},
        "machine": asdict(q.machine),
        "stock": {
            **{"device": _device(stock)},
            "fits": None if gpu is None else stock.total <= gpu,
        },
        "choices": [_row(q, row) for row in choices],
        "suggested": None if chosen is None else {**_row(q, chosen), "flags": flags(q, chosen)},
        "advice": []
        if chosen is not None
        else [{"change": each.change, **_row(each.question, each.row)} for each in advise(q)],
        "warnings": list(warnings),
    }


def _device(device: DeviceBytes) -> dict[str, int]:
    return {**asdict(device), "total": device.total}


def _row(q: Question, row: Row) -> dict[str, Any]:
    s = row.streamed
    return {
        "main_storage": s.config.main_storage,
        "moment_dtype": s.config.moment_dtype,
        "tiers": row.tiers,
        "state_bytes": s.state_nbytes,
        "device": _device(s.device),
        "host_bytes": s.host_nbytes,
        "host_tier_bytes": s.host_tier_nbytes,
        "disk_bytes": s.disk_nbytes,
        "node_host_bytes": s.host_nbytes * q.machine.gpus,
        "node_disk_bytes": s.disk_nbytes * q.machine.gpus,
        "read_bytes_per_step": s.read_nbytes,
        "written_bytes_per_step": s.disk_nbytes,
        "pcie_bytes_each_way": s.away_nbytes,
        "step_seconds": row.time.step,
        "slowest_path": row.time.slowest or None,
        "exposed_seconds": row.time.exposed,
        "node_written_bytes_per_day": row.written_per_day,
        "fits": False if row.lacks else None if _unknown(q, row) else True,
        "lacks": list(row.lacks),
    }
