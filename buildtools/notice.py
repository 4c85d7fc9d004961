"""The notice of modification that travels in the wheel, made from the series and the overlay."""

from __future__ import annotations

from buildtools.overlay import overlay_files
from buildtools.series import parse_header
from buildtools.tree import Recipe

PATH = "licenses/NOTICE"
"""Where the notice lies in the overlay."""


def render_notice(recipe: Recipe) -> str:
    """Return the text of the notice: every file of upstream that is changed, and by what."""
    pin = recipe.pin
    changed: dict[str, list[str]] = {}
    for patch in recipe.patches:
        for change in patch.changes:
            changed.setdefault(change.path, []).append(parse_header(patch.message).subject)
    added = [path for path in overlay_files(recipe.overlay) if path.startswith("megatron/")]
    rows = [
        f"This is a modified version of {pin.name} {pin.version}, distributed as {pin.label}.",
        "It is neither made nor endorsed by NVIDIA CORPORATION. The licence of the original is in",
        "LICENSE.megatron-lm, that of the added files in LICENSE.megatron-nvme.",
        "",
        "Modified files (changes made in 2026):",
    ]
    for path, subjects in sorted(changed.items()):
        rows.append(f"  {path}")
        rows += [f"      {subject}" for subject in subjects]
    rows += ["", "Added files:", *(f"  {path}" for path in added or ["(none)"]), ""]
    return "\n".join(rows)
