"""The overlay: new files that are laid over the patched tree, never over a file of upstream's."""

from __future__ import annotations

import shutil
from pathlib import Path

from buildtools.console import BuildError
from buildtools.objects import files_below

_LICENSES = "licenses/"
_CACHES = {"__pycache__", ".mypy_cache", ".ruff_cache"}


def overlay_files(overlay: Path) -> list[str]:
    """Return the sorted POSIX paths of the overlay's files.

    Raises:
        BuildError: a file is one that the wheel would leave out; all are reported.
    """
    files = [path for path in files_below(overlay) if not _CACHES.intersection(path.split("/"))]
    left_out = [path for path in files if not _is_shipped(path)]
    if left_out:
        raise BuildError(
            "\n".join(
                [
                    "the wheel would leave out these files of megatron_overlay/ (only .py files "
                    "below megatron/core or megatron/training, and licenses/, are shipped):",
                    *(f"  {path}" for path in left_out),
                ]
            )
        )
    return files


def _is_shipped(path: str) -> bool:
    if path.startswith(_LICENSES):
        return "/" not in path[len(_LICENSES) :]
    return path.startswith(("megatron/core/", "megatron/training/")) and path.endswith(".py")


def collisions(files: list[str], tree: Path) -> list[str]:
    """Return a line for each overlay file whose place upstream has taken.

    Names that differ only in case collide too: one of them is lost on some filesystems.
    """
    upstream = {path.lower(): path for path in files_below(tree)}
    directories = {
        "/".join(parts[:depth])
        for parts in (path.split("/") for path in upstream)
        for depth in range(1, len(parts))
    }
    found = []
    for path in files:
        lowered = path.lower()
        parents = [lowered[:n] for n, letter in enumerate(lowered) if letter == "/"]
        module = lowered.removesuffix(".py")
        packages = [f"{parent}.py" for parent in parents]
        if lowered in upstream:
            found.append(f"{path}: upstream has {upstream[lowered]}")
        elif module in directories:
            found.append(f"{path}: upstream has a package of that name, which would hide it")
        elif any(package in upstream for package in packages):
            hidden = next(package for package in packages if package in upstream)
            found.append(f"{path}: its package would hide upstream's module {upstream[hidden]}")
        elif lowered in directories:
            found.append(f"{path}: upstream has a directory of that name")
        else:
            found += [f"{path}: upstream has a file {p}" for p in parents if p in upstream]
    return found


def lay_over(overlay: Path, tree: Path) -> list[str]:
    """Copy the overlay into ``tree`` and return the paths that were added.

    Raises:
        BuildError: a file would be left out by the wheel, or collides with one of upstream's.
    """
    files = overlay_files(overlay)
    taken = collisions(files, tree)
    if taken:
        raise BuildError("\n".join(["megatron_overlay/ collides with upstream:", *taken]))
    for path in files:
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(overlay / path, target)
        target.chmod(0o644)
    return files
