"""This clone as a place of work: the series it holds, and what is open in ``.work/``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from buildtools.console import BuildError
from buildtools.history import History
from buildtools.tree import Recipe
from buildtools.upstream import fetch

EXAMINED = "cannot be examined"


@dataclass(frozen=True)
class Workspace:
    """Where authoring and rebasing read and write.

    Attributes:
        recipe: the pin and the series as they are.
        pin_file: ``upstream.toml``.
        patches: directory of the series.
        root: the repository, in which guard tests are looked up.
        work: directory for what is open.
    """

    recipe: Recipe
    pin_file: Path
    patches: Path
    root: Path
    work: Path

    @property
    def edit(self) -> Path:
        """Where `edit` opens the series by default."""
        return self.work / "edit"

    @property
    def rebase(self) -> Path:
        """What an open rebase consists of."""
        return self.work / "rebase"

    @property
    def journal(self) -> Path:
        """The journal of a change of several files."""
        return self.work / "journal"

    def history(self, tree: Path) -> History:
        """Make the series commits on the pinned upstream in the new directory ``tree``.

        Raises:
            BuildError: upstream cannot be had, or a patch does not apply.
        """
        recipe = self.recipe
        fetch(recipe.pin, recipe.source, tree, recipe.cache, recipe.download)
        return History(tree, recipe.patches)

    def require_no_rebase(self) -> None:
        """Raise a BuildError if a rebase is open: its end would replace what is written now."""
        if self.rebase.exists():
            raise BuildError(
                f"a rebase is open in {self.rebase}: finish it with `build.py rebase --continue`, "
                "or give it up with `build.py rebase --abort`"
            )
