"""Wheels that are not as they were built, and environments to install them in."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buildtools.doctor import Verdict, inspect_installed
from buildtools.manifest import NAME


def rewritten(wheel: Path, out: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Copy a wheel; ``change`` returns each member's new content, or None to leave it out."""
    out.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out / wheel.name, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return out / wheel.name


def another_build(wheel: Path, out: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a wheel as if other sources had given it: with its manifest changed, and intact."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(f"/{NAME}"))
        manifest = json.loads(archive.read(name))
    change(manifest)
    content = json.dumps(manifest).encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()

    def rewrite(member: str, data: bytes) -> bytes:
        if member == name:
            return content
        if not member.endswith("/RECORD"):
            return data
        rows = [row for row in data.decode().splitlines() if not row.startswith(name)]
        return "\n".join([*rows, f"{name},sha256={digest},{len(content)}", ""]).encode()

    return rewritten(wheel, out, rewrite)


class Installation:
    """An environment of its own, into which the wheel can be installed with pip."""

    def __init__(self, root: Path) -> None:
        venv.create(root, with_pip=False, symlinks=True)
        self.python = str(root / "bin" / "python")
        self.site = next(root.glob("lib/python3*/site-packages"))

    def install(self, wheel: Path, pip_python: Path) -> None:
        subprocess.run(
            [
                str(pip_python), "-m", "pip", "--disable-pip-version-check", "--python",
                self.python, "install", "--quiet", "--no-index", "--no-deps", str(wheel),
            ],
            check=True,
        )  # fmt: skip

    def verdict(self) -> tuple[Verdict, str]:
        report = inspect_installed(self.python)
        return report.verdict, "\n".join(report.lines)
