"""A plan as a picture: the bytes of a GPU, stacked, stock beside streamed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..config import GB
from .choices import Question, Row


def draw(question: Question, choices: Sequence[Row], path: Path) -> None:
    """Write a PNG.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ValueError(
            f"--png {path}: expected matplotlib, which is not installed: pip install matplotlib, "
            "or leave --png out"
        ) from error
    bars = {"stock": asdict(question.stock)}
    for row in choices:
        config = row.streamed.config
        name = f"main {config.main_storage}, moments {config.moment_dtype}\n{row.tiers}"
        bars[name] = asdict(row.streamed.device)
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.45 * len(bars)), layout="constrained")
    ends = [0.0] * len(bars)
    for part in asdict(question.stock):
        widths = [sizes[part] / GB for sizes in bars.values()]
        if not any(widths):
            continue
        axes.barh(list(bars), widths, left=ends, label=part, height=0.7)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    if question.machine.gpu_bytes is not None:
        axes.axvline(question.machine.gpu_bytes / GB, color="black", linestyle="--", label="GPU")
    for place, end in enumerate(ends):
        axes.text(end, place, f" {end:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("GB on each GPU")
    figure.legend(loc="outside lower center", ncols=7, fontsize=8)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"--png {path}: expected a file that can be written: {error}") from error
    finally:
        pyplot.close(figure)
