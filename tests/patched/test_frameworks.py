"""The example of `docs/frameworks.md` runs as it stands there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buildtools.paths import ROOT
from tests import gpt
from tests.patched.test_streaming_failures import Stopped, fill_grads
from tests.rank_pool import RankPool

DOCUMENT = ROOT / "docs" / "frameworks.md"


def example() -> str:
    """Return the one block of Python in the document."""
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def run_example(directory: str) -> dict[str, Any]:
    """Run it on a model of Megatron's, with its directories below ``directory``."""
    source = example().replace('"/', f'"{directory}/')
    found: dict[str, Any] = {}

    def run(model: Sequence[Any], optimizer: Any) -> None:
        fill_grads(model)
        before = [param.detach().clone() for param in model[0].parameters()]
        names: dict[str, Any] = {"model_chunks": list(model)}
        exec(compile(source, str(DOCUMENT), "exec"), names)
        after = model[0].parameters()
        found["moved"] = any(bool((a != b).any()) for a, b in zip(before, after, strict=True))
        (store,) = names["optimizer"]._stores()
        found["state"], found["steps"] = store.state.value, store.steps
        found["host"] = store.placement.host_nbytes
        raise Stopped

    try:
        gpt.train(list(gpt.BF16), 0, after_setup=run)
    except Stopped:
        return found
    raise AssertionError("setup did not reach the callback")


def test_the_example_runs_as_it_stands(ranks: RankPool, tmp_path: Path) -> None:
    """It steps, saves, offloads, restores and loads."""
    (found,) = ranks.run(run_example, directory=str(tmp_path))

    assert found["moved"]
    assert (found["state"], found["steps"]) == ("ready", 1)
    assert found["host"] > 0
    assert "step-seconds" not in ranks.outputs[0]  # a number was printed, not a name
    assert (tmp_path / "checkpoints" / "step1").is_dir()
