"""Whether a build that is intact is the one of this checkout, or an older one, or another's.

A verifier in an image has no checkout to compare with; only `build.py doctor` does this. Versions
do not tell: all builds of one revision have the same, and pip leaves an installed one alone when a
wheel of that version is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from buildtools.archive import sha256_of
from buildtools.console import BuildError
from buildtools.doctor import Report, Verdict
from buildtools.manifest import Manifest
from buildtools.objects import blob_id
from buildtools.overlay import overlay_files
from buildtools.pin import read_pin
from buildtools.series import read_series

_SHOWN = 6
"""Names of patches or overlay files that a line shows."""


@dataclass(frozen=True)
class Checkout:
    """What this checkout would build.

    Attributes:
        label: version of the wheel.
        tree: git tree id of the assembled tree, as the lock has it.
        series: patch name -> sha256.
        overlay: overlay path -> blob id.
    """

    label: str
    tree: str
    series: dict[str, str]
    overlay: dict[str, str]

    @classmethod
    def read(cls, pin_file: Path, patches: Path, overlay: Path) -> Checkout:
        """Read it from the files.

        Raises:
            BuildError: the pin, the series or the overlay cannot be read.
        """
        pin = read_pin(pin_file)
        try:
            return cls(
                label=pin.label,
                tree=pin.lock.assembled,
                series={name: sha256_of(patches / name) for name in read_series(patches)},
                overlay={
                    path: blob_id((overlay / path).read_bytes()) for path in overlay_files(overlay)
                },
            )
        except OSError as error:
            raise BuildError(f"cannot read the series or the overlay: {error}") from error

    def builds(self, manifest: Manifest) -> bool:
        """Return whether a build is of the locked tree, with the overlay as it is here now."""
        return manifest.trees.get("assembled") == self.tree and manifest.overlay == self.overlay


def compared(report: Report, checkout: Checkout | BuildError, remedy: str) -> Report:
    """Return a report that also says whether an intact build is this checkout's.

    Args:
        report: what the doctor found.
        checkout: what to compare with, or why it cannot be read.
        remedy: how to come from another build to this checkout's.
    """
    manifest = report.manifest
    if report.verdict is not Verdict.VERIFIED or manifest is None:
        return report
    lines = report.lines[:-1]
    intact = report.lines[-1].removeprefix("VERIFIED: ")
    if isinstance(checkout, BuildError):
        lines.append(f"NOT COMPARED: {intact}, but whether it is this checkout's build: {checkout}")
        return Report(Verdict.ANOTHER_BUILD, lines, manifest)
    if checkout.builds(manifest):
        lines.append(f"VERIFIED: {intact}, and it is this checkout's build")
        return Report(Verdict.VERIFIED, lines, manifest)
    lines += [
        f"ANOTHER BUILD: {intact}, but it is not what this checkout builds",
        f"  found     {manifest.version}, tree {manifest.trees.get('assembled')}",
        f"  checkout  {checkout.label}, tree {checkout.tree} ([lock] assembled in upstream.toml)",
        *_differences("patches", manifest.series, checkout.series),
        *_differences("overlay", manifest.overlay, checkout.overlay),
        f"  {remedy}",
        "  To keep what was found, use the commit it was built from.",
    ]
    return Report(Verdict.ANOTHER_BUILD, lines, manifest)


def _differences(title: str, found: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each way in which two sets of files differ."""
    ways = {
        "differ": [name for name in found if here.get(name, found[name]) != found[name]],
        "only found": [name for name in found if name not in here],
        "only here": [name for name in here if name not in found],
    }
    for way, names in ways.items():
        shown = [name.rpartition("/")[2] for name in names[:_SHOWN]]
        shown += [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        if names:
            yield f"  {title:<8}  {way}: {', '.join(shown)}"
