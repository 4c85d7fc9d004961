"""What the patches and the overlay lean on is derived from them, and must exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildtools.console import BuildError
from buildtools.leans import leans, overlay_leans
from buildtools.series import load_patches
from buildtools.symbols import Sources
from buildtools.upstream import Source, fetch
from tests.buildtools.toy import MODEL, Toy, write_files

BASE = """\
from .tools import helper
from .parts import Part


class Base:
    def start(self):
        self.rows = helper()

    def step(self):
        return self.rows


class Model(Part):
    limit = 3

    def step(self):
        return super().step()
"""
PRISTINE = {
    "megatron/core/base.py": BASE,
    "megatron/core/parts.py": "from .base import Base\n\n\nclass Part(Base):\n    pass\n",
    "megatron/core/tools.py": "def helper():\n    return []\n",
    "megatron/core/__init__.py": "from .base import Model as PublicModel\n",
}
OVERLAY = "megatron/core/extra/store.py"


def of_overlay(tmp_path: Path, text: str) -> dict[str, set[str]]:
    write_files(tmp_path, {OVERLAY: text})
    pristine = Sources({path: content.encode() for path, content in PRISTINE.items()})
    return {name: lean.by for name, lean in leans([], tmp_path, pristine).items()}


def test_imports_are_followed_to_the_definition(tmp_path: Path) -> None:
    found = of_overlay(
        tmp_path, "from megatron.core import PublicModel\nfrom ..base import helper\n"
    )

    assert found == {
        "megatron/core/base.py::Model": {OVERLAY},
        "megatron/core/tools.py::helper": {OVERLAY},
    }


def test_overrides_and_attributes_of_a_subclass_are_found_in_its_lineage(tmp_path: Path) -> None:
    text = """\
        from ..base import Model


        class Streamed(Model):
            mine = 1

            def step(self):
                self.own = self.limit
                return super().start() or self.rows or self.mine or self.own

            def new(self):
                return 1
        """
    found = of_overlay(tmp_path, "\n".join(line[8:] for line in text.splitlines()))

    assert set(found) == {
        "megatron/core/base.py::Model",
        "megatron/core/parts.py::Part",
        "megatron/core/base.py::Base",
        "megatron/core/base.py::Model.step",
        "megatron/core/base.py::Model.limit",
        "megatron/core/base.py::Base.start",
        "megatron/core/base.py::Base.rows",
    }


def test_what_an_override_would_hide_in_another_tree_is_found(tmp_path: Path) -> None:
    """Upstream gives a class that the overlay extends a method of the overlay's name."""
    text = "from ..base import Model\n\n\nclass A(Model):\n    def fresh(self):\n        return 1\n"
    write_files(tmp_path, {OVERLAY: text})
    newer = PRISTINE | {
        "megatron/core/base.py": BASE + "\n    def fresh(self):\n        return 2\n"
    }
    before, after = (
        set(overlay_leans(tmp_path, Sources({path: text.encode() for path, text in tree.items()})))
        for tree in (PRISTINE, newer)
    )

    assert after - before == {"megatron/core/base.py::Model.fresh"}


def test_a_comment_names_what_is_used_through_other_objects(tmp_path: Path) -> None:
    assert set(of_overlay(tmp_path, "x = 1  # Tripwire: ../base.py::Base.rows\n")) == {
        "megatron/core/base.py::Base.rows"
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from ..base import Gone\n", "imports Gone from megatron/core/base"),
        ("import megatron.core.base\n", "import names from megatron.core.base, not the module"),
        ("# Tripwire: ../base.py::Base.gone\n", "upstream has no megatron/core/base.py::Base.gone"),
        (
            "# Tripwire: ../tools.py::Base\n",
            r"tools.py::Base; there is megatron/core/base.py::Base",
        ),
        (
            "from ..base import Model\nclass A(Model):\n    def f(self):\n        self.renamed()\n",
            "A uses renamed, which upstream does not have",
        ),
        (
            "from ..base import Model\nclass A(Model):\n    def f(self):\n        super().f()\n",
            "A uses f, which upstream does not have",
        ),
    ],
)
def test_leaning_on_what_is_not_there_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        of_overlay(tmp_path, text)


def pristine_of(toy: Toy) -> Sources:
    recipe = toy.recipe()
    tree = toy.root / "pristine"
    fetch(recipe.pin, Source("index"), tree, recipe.cache, recipe.download)
    return Sources.of_directory(tree, [MODEL, "megatron/core/package_info.py"])


def test_a_patch_leans_on_what_its_trailer_names(toy: Toy) -> None:
    found = leans(load_patches(toy.patches), toy.overlay, pristine_of(toy))

    assert found[MODEL].by == {"0002", "0003"}


def test_a_trailer_must_name_what_the_patch_changes(toy: Toy) -> None:
    toy.rewrite(2, f"Tripwires: {MODEL}", "Tripwires: megatron/core/package_info.py")

    with pytest.raises(BuildError, match=rf"0002-.*: Tripwires must name {MODEL}: the patch"):
        leans(load_patches(toy.patches), toy.overlay, pristine_of(toy))


def test_a_hook_is_more_than_part_of_a_statement(toy: Toy) -> None:
    """With ``@``, what stands around the hook counts: so it must stand between statements."""
    toy.rewrite(2, f"Tripwires: {MODEL}", f"Tripwires: {MODEL}@")
    toy.rewrite(3, f"Tripwires: {MODEL}", f"Tripwires: {MODEL}@")

    with pytest.raises(BuildError, match=r"0002-.*does not insert whole statements") as caught:
        leans(load_patches(toy.patches), toy.overlay, pristine_of(toy))
    assert "0003" not in str(caught.value), "that one inserts a statement"


def test_a_base_in_the_overlay_overrides_in_the_place_of_its_subclasses(tmp_path: Path) -> None:
    """What it uses of itself is no name of upstream's; what upstream gave up is a problem."""
    shared = """\
        class Shared:
            mine = 1

            def step(self):
                return self.mine
        """
    streamed = """\
        from ..base import Model
        from ..nvme_state_store.shared import Shared


        class Streamed(Shared, Model):
            def new(self):
                return self.mine or self.{name}
        """
    path = "megatron/core/nvme_state_store/streamed.py"
    pristine = Sources({name: content.encode() for name, content in PRISTINE.items()})

    def found(name: str) -> dict[str, set[str]]:
        texts = {"megatron/core/nvme_state_store/shared.py": shared, path: streamed}
        for file, text in texts.items():
            lines = text.replace("{name}", name).splitlines()
            write_files(tmp_path, {file: "\n".join(line[8:] for line in lines)})
        return {name: lean.by for name, lean in leans([], tmp_path, pristine).items()}

    assert found("limit") == {
        "megatron/core/base.py::Base": {path},
        "megatron/core/base.py::Model": {path},
        "megatron/core/base.py::Model.limit": {path},
        "megatron/core/base.py::Model.step": {path},
        "megatron/core/parts.py::Part": {path},
    }
    with pytest.raises(BuildError, match="Streamed uses gone, which upstream does not have"):
        found("gone")
