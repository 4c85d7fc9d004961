"""Draws one step from the JSON of ``step.py --timeline``: the six verbs, and bytes on the device.

python benchmarks/figures.py TIMELINE.json PICTURE.png [--title TEXT]
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERBS = ("read", "upload", "update", "publish", "download", "write")
COLOURS = ("#4878a8", "#6aa56a")
"""Of even and odd buckets, so that neighbours can be told apart."""


def bars(timeline: Mapping[str, Any], verb: str) -> list[tuple[float, float, str]]:
    """Return begin, length and colour of each span of a verb."""
    return [
        (begin, end - begin, COLOURS[bucket % len(COLOURS)])
        for each, bucket, begin, end in timeline["spans"]
        if each == verb
    ]


def draw(timeline: Mapping[str, Any], picture: Path, title: str = "") -> None:
    """Write the picture; its format is that of the suffix.

    Raises:
        ImportError: there is no matplotlib.
    """
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (verbs, device) = pyplot.subplots(
        2, 1, sharex=True, figsize=(12, 6), height_ratios=(3, 2), layout="constrained"
    )
    for row, verb in enumerate(VERBS):
        found = bars(timeline, verb)
        verbs.broken_barh(
            [(begin, length) for begin, length, _ in found],
            (row - 0.4, 0.8),
            facecolors=[colour for _, _, colour in found],
        )
    verbs.set_yticks(range(len(VERBS)), VERBS)
    verbs.set_ylim(len(VERBS) - 0.5, -0.5)  # read on top
    verbs.set_title(title or "one step")
    for axes in (verbs, device):
        axes.axvspan(0, timeline["exposed_s"], color="0.9", zorder=0)
        axes.grid(axis="x", alpha=0.3)
    seconds = [at for at, _ in timeline["device_bytes"]]
    held = [nbytes / 1e9 for _, nbytes in timeline["device_bytes"]]
    device.plot(seconds, held, color="black", linewidth=1, label="allocated")
    model = timeline["model_bytes"] / 1e9
    slots = model + timeline["slot_bytes"] / 1e9
    device.axhline(model, linestyle=":", color="tab:blue", label="params + grads")
    device.axhline(slots, linestyle="--", color="tab:red", label="params + grads + slots")
    device.set_ylim(bottom=0)
    device.set_ylabel("device GB")
    device.set_xlabel("seconds since the step began; grey: exposed")
    device.legend(loc="lower right")
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Draw one picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("timeline", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    draw(json.loads(args.timeline.read_text()), args.picture, args.title)


if __name__ == "__main__":
    main()
