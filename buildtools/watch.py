"""The tripwires of this repository: its record, who leans on what, and the releases to compare."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from buildtools import record, tripwires
from buildtools.console import BuildError
from buildtools.leans import Lean, leans, overlay_leans
from buildtools.objects import blob_id, files_below
from buildtools.paths import WORK, scratch_dir
from buildtools.releases import Shop, fetch_target
from buildtools.symbols import Sources
from buildtools.tree import Recipe
from buildtools.upstream import fetch


def read_sources(directory: Path) -> Sources:
    """Read the Python files, and those at the top, of a tree that has been verified."""
    paths = [path for path in files_below(directory) if path.endswith(".py") or "/" not in path]
    return Sources.of_directory(directory, paths)


class Watch:
    """What is leaned on, what was accepted of it, and looks at trees.

    Args:
        recipe: the series, the overlay and the pin.
        path: the record, ``patches/tripwires.toml``.
        locked: whether the pinned upstream must be the locked tree (`build.py pin` makes a lock).
    """

    def __init__(self, recipe: Recipe, path: Path, *, locked: bool = True) -> None:
        self.recipe = recipe
        self.path = path
        self._locked = locked
        self._surveys: dict[str, tripwires.Survey | None] = {}

    @cached_property
    def pristine(self) -> Sources:
        """The pinned upstream."""
        recipe = self.recipe
        with scratch_dir(WORK) as scratch:
            tree = scratch / "tree"
            args = (recipe.pin, recipe.source, tree, recipe.cache, recipe.download)
            fetch(*args, locked=self._locked)
            return read_sources(tree)

    @cached_property
    def leans(self) -> dict[str, Lean]:
        """Who leans on what.

        Raises:
            BuildError: somebody leans on what upstream does not have.
        """
        return leans(self.recipe.patches, self.recipe.overlay, self.pristine)

    @cached_property
    def record(self) -> dict[tuple[str, str], record.Entry]:
        """What was accepted."""
        return record.read_record(self.path)

    def survey(self, sources: Sources) -> tripwires.Survey:
        """Look at a tree, also for what the overlay would newly lean on there."""
        here = overlay_leans(self.recipe.overlay, sources)
        return tripwires.survey({**here, **self.leans}, sources, self.record)

    def accepted(self, version: str) -> tripwires.Survey | None:
        """Look at a release in which entries were accepted; None if it cannot be had."""
        if version not in self._surveys:
            try:
                self._surveys[version] = self.survey(self._release(version))
            except BuildError:
                self._surveys[version] = None
        return self._surveys[version]

    def _release(self, version: str) -> Sources:
        recipe = self.recipe
        if version == recipe.pin.version:
            return self.pristine
        known_releases_only = Shop(recipe.cache, recipe.download, None)
        with scratch_dir(WORK) as scratch:
            fetch_target(version, recipe.pin, known_releases_only, scratch / "tree")
            return read_sources(scratch / "tree")

    def findings(self, sources: Sources) -> list[tripwires.Finding]:
        """Return what of a tree is not as recorded."""
        now = self.survey(sources)
        return tripwires.findings(self.record, self.accepted, now, sources)

    def blobs(self, sources: Sources) -> list[str]:
        """Return a line for each file that a patch changes and that is another blob in ``sources``.

        A difference in comments, docstrings or formatting alone is labelled cosmetic.
        """
        expected: dict[str, str] = {}
        for patch in self.recipe.patches:
            for change in patch.changes:
                expected.setdefault(change.path, change.before)
        found = []
        for path, blob in expected.items():
            if path not in sources:
                found.append(f"{path}: gone")
            elif (actual := blob_id(sources[path])) != blob:
                same = sources.fingerprint(path) == self.pristine.fingerprint(path)
                label = "cosmetic" if same else "changed"
                found.append(f"{path}: {label}: blob {actual}, the series expects {blob}")
        return found

    def pinned(
        self, accept: Iterable[str], because: str, classed: str = ""
    ) -> tuple[str, list[str]]:
        """Return the text of the record with the named entries accepted, and what is still open.

        Raises:
            BuildError: something cannot be accepted.
        """
        now = self.survey(self.pristine)
        version = self.recipe.pin.version
        updated, open_ = tripwires.update_record(
            self.record, now, version, accept, because, classed
        )
        return record.render_record(updated.values()), [
            f"{what}: {kind}:{name}" for kind, name, what in open_
        ]
