"""Assemble the tree: verified upstream, plus the series, plus the overlay, equal to the lock."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from buildtools.apply import Engine, apply_series
from buildtools.console import BuildError
from buildtools.objects import entries_below, tree_id
from buildtools.overlay import lay_over
from buildtools.patchfile import Patch
from buildtools.paths import scratch_dir, swap_in
from buildtools.pin import Lock, Pin
from buildtools.upstream import PACKAGE_INFO, Download, Source, fetch


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the tree becomes."""

    pin: Pin
    patches: list[Patch]
    overlay: Path
    source: Source
    cache: Path
    download: Download | None


def assemble(recipe: Recipe, engine: Engine, destination: Path, *, locked: bool = True) -> Lock:
    """Assemble the tree and move it to ``destination`` in one step.

    Args:
        recipe: sources, series and overlay.
        engine: what applies the series.
        destination: directory that is made or replaced; it is untouched if anything fails.
        locked: whether the result must equal the pin's lock (`build.py pin` makes a new one).

    Returns:
        The tree ids of the three stages.

    Raises:
        BuildError: a stage failed, or its tree is not the locked one.
    """
    pin = recipe.pin
    with scratch_dir(destination.parent) as scratch:
        tree = scratch / "tree"
        fetch(pin, recipe.source, tree, recipe.cache, recipe.download, locked=locked)
        pristine = tree_id(entries_below(tree))
        apply_series(tree, recipe.patches, engine)
        patched = tree_id(entries_below(tree))
        if locked:
            _compare("after patches/", pin.lock.patched, patched)
        verify_label(tree, pin)
        lay_over(recipe.overlay, tree)
        assembled = tree_id(entries_below(tree))
        if locked:
            _compare("after megatron_overlay/", pin.lock.assembled, assembled)
        swap_in(tree, destination)
    return Lock(pristine, patched, assembled)


def _compare(stage: str, locked: str, actual: str) -> None:
    if actual != locked:
        raise BuildError(
            f"tree {stage}: expected {locked} (upstream.toml [lock]), got {actual}; if the change "
            "is intended, record it with `build.py pin`"
        )


def verify_label(tree: Path, pin: Pin) -> None:
    """Check that the patched ``package_info.py`` says our version, and says it without help.

    Raises:
        BuildError: ``__version__`` is not ``<upstream>+nvme.<revision>``, or the file imports a
            module (upstream's appends the git hash of whatever repository it lies in).
    """
    source = tree / PACKAGE_INFO
    try:
        module = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise BuildError(f"version label: cannot read {source}: {error}") from error
    imports = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    if imports:
        raise BuildError(
            f"version label: {PACKAGE_INFO} line {imports[0].lineno} imports a module; the "
            "version must not depend on where the package lies"
        )
    names: dict[str, object] = {"__builtins__": {"map": map, "str": str}}
    try:
        exec(compile(module, str(source), "exec"), names)
    except Exception as error:  # whatever upstream's arithmetic may raise
        raise BuildError(f"version label: {PACKAGE_INFO} does not run: {error!r}") from error
    if names.get("__version__") != pin.label:
        raise BuildError(
            f"version label: upstream.toml says {pin.label}, the patched {PACKAGE_INFO} "
            f"{names.get('__version__')}: change the label patch, or [release] revision"
        )
