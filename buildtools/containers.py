"""docker, podman or buildah: whichever is there, spoken to in one way."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildtools.console import BuildError, warn

NAMES = ("docker", "podman", "buildah")
"""In the order in which they are tried."""
_PACKAGES = {"docker": "docker.io", "podman": "podman", "buildah": "buildah runc"}
"""What Debian calls them."""
_PATIENCE_S = 30
"""How long an engine may take to say its version: one on another host may never answer."""


@dataclass(frozen=True)
class Image:
    """An image that the engine holds.

    Attributes:
        id: hash of its configuration: equal ids are equal images.
        digest: what a registry would know it by; empty if the engine does not know yet.
        labels: its labels.
    """

    id: str
    digest: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Build:
    """One image to build.

    Attributes:
        dockerfile: its path.
        context: directory of the files it may use.
        tag: name of the result.
        arguments: build arguments.
        options: further options of the engine, as the user gave them.
    """

    dockerfile: Path
    context: Path
    tag: str
    arguments: Mapping[str, str]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """A container engine, by the name of its command."""

    name: str

    def find(self, reference: str) -> Image | None:
        """Return the image of that name if the engine holds it; nothing is pulled."""
        kind = ["inspect", "--type", "image"] if self.name == "buildah" else ["image", "inspect"]
        done = subprocess.run(
            [self.name, *kind, reference], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            return None
        try:
            found = json.loads(done.stdout)
            return _from_buildah(found) if self.name == "buildah" else _from_docker(found[0])
        except (ValueError, LookupError, TypeError) as error:
            raise BuildError(
                f"{self.name} inspect {reference}: not understood: {error!r}"
            ) from error

    def pull(self, reference: str) -> None:
        """Fetch an image from its registry; the engine shows its own progress."""
        if subprocess.run([self.name, "pull", reference], check=False).returncode != 0:
            raise BuildError(
                f"the base image {reference} is not here and cannot be pulled by {self.name}; the "
                "reason stands above"
            )

    def command(self, build: Build) -> list[str]:
        """Return the command that builds; it uses the base as it is here, and no network."""
        never = {"docker": [], "podman": ["--pull=never"], "buildah": ["--pull-never"]}
        command = [self.name, "build", "--network=none", *never[self.name]]
        command += ["--file", str(build.dockerfile), "--tag", build.tag]
        for key, value in build.arguments.items():
            command += ["--build-arg", f"{key}={value}"]
        return [*command, *build.options, str(build.context)]

    def build(self, build: Build) -> Image:
        """Build an image, showing what the engine shows.

        Raises:
            BuildError: a step of the build failed.
        """
        environment = os.environ | {"DOCKER_BUILDKIT": "1"}  # the mounts of a RUN step need it
        command = self.command(build)
        if subprocess.run(command, env=environment, check=False).returncode != 0:
            raise BuildError(f"{self.name} did not build {build.tag}; the reason stands above")
        image = self.find(build.tag)
        if image is None:
            raise BuildError(f"{self.name} built {build.tag} and does not find it")
        return image


def show(command: list[str]) -> str:
    """Return a command as one line for a shell."""
    return shlex.join(command)


def choose(name: str | None) -> Engine:
    """Return the engine of that name, or the first that works; say which were passed over.

    Each engine has images of its own: who expects docker's has to know that buildah built.

    Raises:
        BuildError: the named one does not work, or none does; the message says why.
    """
    if name is not None:
        reason = _why_not(name)
        if reason is None:
            return Engine(name)
        works = [other for other in NAMES if other != name and _why_not(other) is None]
        raise BuildError(
            f"--engine {name}: {reason}"
            + (f"; what works here is --engine {' or '.join(works)}" if works else "")
        )
    passed_over: dict[str, str] = {}
    for candidate in NAMES:
        reason = _why_not(candidate)
        if reason is not None:
            passed_over[candidate] = reason
            continue
        for other, why in passed_over.items():
            warn(f"{other} is passed over: {why}")
        if passed_over:
            warn(f"{candidate} builds, and the image is in its storage, which others do not see")
        return Engine(candidate)
    raise BuildError(
        "\n".join(
            [
                "none of the container engines works here:",
                *(f"  {other}: {why}" for other, why in passed_over.items()),
            ]
        )
    )


def _why_not(name: str) -> str | None:
    """Return why an engine cannot be used; docker's client may be there without its daemon."""
    if shutil.which(name) is None:
        return f"not installed (Debian: apt-get install {_PACKAGES[name]})"
    try:
        done = subprocess.run(
            [name, "version"], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"`{name} version` does not answer within {_PATIENCE_S} s"
    except OSError as error:
        return f"`{name} version` cannot be run: {error.strerror}"
    if done.returncode == 0:
        return None
    said = " ".join(done.stderr.split())
    reason = said or f"`{name} version` ends with status {done.returncode}"
    return f"{reason} (start its daemon, or set DOCKER_HOST)" if name == "docker" else reason


def _from_docker(found: dict[str, Any]) -> Image:
    digests = [str(each).partition("@")[2] for each in found.get("RepoDigests") or []]
    return Image(
        id=str(found["Id"]).removeprefix("sha256:"),
        digest=str(found.get("Digest") or "") or next(iter(digests), ""),
        labels=(found.get("Config") or {}).get("Labels") or {},
    )


def _from_buildah(found: dict[str, Any]) -> Image:
    return Image(
        id=str(found["FromImageID"]),
        digest=str(found.get("FromImageDigest") or ""),
        labels=found["OCIv1"]["config"].get("Labels") or {},
    )
