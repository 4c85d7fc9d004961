"""`build.py check`: everything that can be known about the series without building anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from buildtools import git, notice, series
from buildtools.apply import ENGINES
from buildtools.console import BuildError, step, warn
from buildtools.dropped import read_dropped
from buildtools.history import History
from buildtools.overlay import overlay_files
from buildtools.paths import WORK, scratch_dir
from buildtools.tree import Recipe, assemble
from buildtools.tripwires import render_finding
from buildtools.upstream import fetch
from buildtools.watch import Watch

RECORD = "tripwires.toml"
ACCEPT = (
    "Look at what leans on each of these, then accept them one by one: "
    "build.py pin --accept NAME --because TEXT (a new reader: --as served|refused|harmless)"
)


def generated_files(recipe: Recipe, patches: Path) -> dict[Path, str]:
    """Return the files that `build.py pin` makes from the series, with the text they must have."""
    return {
        patches / "README.md": series.render_readme(recipe.patches, read_dropped(patches)),
        recipe.overlay / notice.PATH: notice.render_notice(recipe),
    }


def lint(recipe: Recipe, root: Path) -> None:
    """Raise a BuildError that lists every breach of the rules of the series, if there is one."""
    found = series.lint(recipe.patches, root, set(overlay_files(recipe.overlay)))
    if found:
        raise BuildError("\n".join(["the patch series breaks its rules:", *found]))


def _tripwires(recipe: Recipe, patches: Path) -> None:
    watch = Watch(recipe, patches / RECORD)
    found = [render_finding(finding) for finding in watch.findings(watch.pristine)]
    if found:
        raise BuildError("\n\n".join([*found, ACCEPT]))
    if watch.pinned((), "")[0] != watch.path.read_text(encoding="utf-8"):
        raise BuildError(f"patches/{RECORD} is not what `build.py pin` makes of it")


def canonical(recipe: Recipe) -> None:
    """Raise a BuildError that names the patches whose file is not what `build.py export` writes."""
    with scratch_dir(WORK) as scratch:
        tree = scratch / "tree"
        fetch(recipe.pin, recipe.source, tree, recipe.cache, recipe.download)
        found = History(tree, recipe.patches).non_canonical()
    if found:
        raise BuildError(
            f"not what `build.py export` writes: {', '.join(found)}: build.py edit && "
            "build.py export"
        )


def check(recipe: Recipe, root: Path, patches: Path) -> None:
    """Lint the series, compare generated files, and assemble the tree with every engine.

    Args:
        recipe: what is checked; loading its series has already checked order and blob chain.
        root: the repository, in which guard tests are looked up.
        patches: directory of the series.

    Raises:
        BuildError: something is wrong; everything that is wrong is reported.
    """
    problems: list[str] = []

    def collect(title: str, body: Callable[[], None]) -> None:
        with step(title):
            try:
                body()
            except BuildError as error:
                problems.append(str(error))

    def generated() -> None:
        stale = [
            str(path.relative_to(root))
            for path, text in generated_files(recipe, patches).items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        if stale:
            raise BuildError(f"not what `build.py pin` makes of the series: {', '.join(stale)}")

    collect("lint of the series", lambda: lint(recipe, root))
    if not problems:  # the texts are made from headers that the lint found complete
        collect("generated files", generated)
    collect("tripwires and census", lambda: _tripwires(recipe, patches))
    if git.available():
        collect("form of the patches", lambda: canonical(recipe))
    for name, engine in ENGINES.items():
        if name == "git" and not git.available():
            warn("git was not found: the series is checked with --engine python-patch alone")
            continue

        def apply(engine: Callable[[], object] = engine) -> None:
            with scratch_dir(WORK) as scratch:
                assemble(recipe, engine(), scratch / "tree")  # type: ignore[arg-type]

        collect(f"tree lock, --engine {name}", apply)
    if problems:
        raise BuildError("\n".join(dict.fromkeys(problems)))
