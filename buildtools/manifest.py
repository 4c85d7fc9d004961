"""The manifest that travels in the wheel: what it was made from, and every file it must hold."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from buildtools.archive import sha256_of
from buildtools.console import BuildError
from buildtools.objects import blob_id, files_below
from buildtools.overlay import overlay_files
from buildtools.pin import Lock
from buildtools.tree import Recipe

NAME = "nvme_manifest.json"
"""File name inside the wheel's ``.dist-info`` directory."""
FORMAT = 1
PACKAGE = "megatron/"
"""Everything of the tree below this directory, and nothing else of it, is in the wheel."""
HELPER = "megatron/core/datasets/helpers_cpp"
"""Start of the one path in the wheel that the build makes: the compiled dataset helper."""


@dataclass(frozen=True)
class Manifest:
    """Contents of the manifest; dictionaries map a name or path to a hash, id or version.

    Attributes:
        format: version of this format.
        version: version of the wheel, e.g. ``0.19.2+nvme.1``.
        upstream: name, version and sha256 of the pinned source distribution.
        trees: git tree ids of the three stages of assembly.
        series: patch name -> sha256 of the patch file, in order.
        modified: upstream path that the series changes -> blob id after it.
        overlay: overlay path -> blob id.
        files: every path of the tree below ``megatron/`` -> blob id.
        tools: what built the wheel -> version.
    """

    format: int
    version: str
    upstream: dict[str, str]
    trees: dict[str, str]
    series: dict[str, str]
    modified: dict[str, str]
    overlay: dict[str, str]
    files: dict[str, str]
    tools: dict[str, str]

    def to_json(self) -> str:
        """Return the text of the file; equal manifests give equal text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def make_manifest(
    recipe: Recipe, lock: Lock, tree: Path, patches: Path, tools: dict[str, str]
) -> Manifest:
    """Describe the wheel that is made from ``tree``.

    Args:
        recipe: what the tree was assembled from.
        lock: the tree ids of the assembly.
        tree: the assembled tree.
        patches: directory of the patch files.
        tools: versions of the tools that built the wheel.
    """
    blobs = {path: blob_id((tree / path).read_bytes()) for path in files_below(tree)}
    touched = {change.path for patch in recipe.patches for change in patch.changes}
    return Manifest(
        format=FORMAT,
        version=recipe.pin.label,
        upstream={
            "name": recipe.pin.name,
            "version": recipe.pin.version,
            "sdist-sha256": recipe.pin.sdist_sha256,
        },
        trees=asdict(lock),
        series={patch.name: sha256_of(patches / patch.name) for patch in recipe.patches},
        modified={path: blobs[path] for path in sorted(touched)},
        overlay={path: blobs[path] for path in overlay_files(recipe.overlay)},
        files={path: blob for path, blob in sorted(blobs.items()) if path.startswith(PACKAGE)},
        tools=tools,
    )


def parse_manifest(text: str) -> Manifest:
    """Parse the text of a manifest.

    Raises:
        BuildError: it is not one, or of a format this code does not know.
    """
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise BuildError(f"{NAME}: format {document['format']}, this build.py reads {FORMAT}")
        return Manifest(**document)
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{NAME} is damaged: {error!r}") from error
