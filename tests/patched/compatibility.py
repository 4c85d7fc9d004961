"""`docs/compatibility.md`, rendered from the tests: what streams, and what is refused and why.

    python -m tests.patched.compatibility     writes it (with the Python of the test environment)

A row that streams is a scenario of `tests.patched.scenarios`, which `test_streaming_parity.py`
compares with stock; a row that is refused is one of `tests/store/test_config.py`, with the very
message that the check gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.test_transformer_engine import ROWS as TRANSFORMER_ENGINE
from tests.patched.resume import SAVED_AT
from tests.patched.scenarios import GROUPS, UNTIL
from tests.store.test_config import (
    REFUSED_ARGUMENTS,
    REFUSED_CONFIGS,
    arguments_refusal,
    config_refusal,
)

PATH = Path(__file__).parents[2] / "docs" / "compatibility.md"

_HEAD = f"""# What streams and what is refused

Generated from the tests by `python -m tests.patched.compatibility`; do not edit.

*Same bits*: after {UNTIL} steps on emulated CUDA with gloo ranks, model params, FP32 main params,
every tensor of the optimizer's state, step counters, losses and gradient norms are those of stock
Megatron on every rank; every param that trains has moved and no other has
(`tests/patched/test_streaming_parity.py`). *Resumed*: the streamed run of that comparison was
saved after {SAVED_AT} steps, and loaded and gone on with in fresh processes, against a stock run
without a break.
"""

_GPU = """A GPT with layers and FusedAdam of Transformer Engine; 10 steps stock, streamed, and
streamed with a save and a resume, by `pytest -m gpu tests/gpu/test_transformer_engine.py`, which CI
cannot run: see [benchmarks](benchmarks/2026-11-30-muon.md) for when and on what. Of 8-bit params
bytes and scales are compared.
"""


def render() -> str:
    """Return the text of the document."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for title, scenarios in GROUPS.items():
        yield f"## {title}\n"
        yield "| combination | ranks | streamed | resumed | row |"
        yield "|---|---|---|---|---|"
        for each in scenarios:
            resumed = "same bits" if each.is_resumed else "-"
            yield f"| {each.shows} | {each.world_size} | same bits | {resumed} | `{each.name}` |"
        yield ""
    yield "## On a GPU\n"
    yield _GPU
    yield "| arguments | row |"
    yield "|---|---|"
    for name, arguments in TRANSFORMER_ENGINE.items():
        yield f"| `{' '.join(arguments)}` | `{name}` |"
    yield ""
    yield "## Refused\n"
    yield "At the start, before any file is made (`tests/store/test_config.py`).\n"
    yield "| setting | message |"
    yield "|---|---|"
    refusals = [(changes, config_refusal(changes)) for changes, _ in REFUSED_CONFIGS]
    refusals += [(changes, arguments_refusal(changes)) for changes, _ in REFUSED_ARGUMENTS]
    for changes, message in refusals:
        if not any("stream_optimizer_state" in name or "defer" in name for name in changes):
            yield f"| {_settings(changes)} | {message} |"


def _settings(changes: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in changes.items())


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
