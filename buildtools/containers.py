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

from buildtools.console import BuildError

NAMES = ("docker", "podman", "buildah")
"""In the order in which they are tried."""


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
            raise BuildError(f"the base image {reference} is not here and cannot be pulled")

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
    """Return the engine of that name, or the first that works.

    Raises:
        BuildError: none does; the message has the reason for each.
    """
    reasons = []
    for candidate in (name,) if name else NAMES:
        reason = _why_not(candidate)
        if reason is None:
            return Engine(candidate)
        reasons.append(f"{candidate}: {reason}")
    raise BuildError(
        "no container engine (Debian: apt-get install buildah runc): " + "; ".join(reasons)
    )


def _why_not(name: str) -> str | None:
    """Return why an engine cannot be used; docker's client may be there without its daemon."""
    if shutil.which(name) is None:
        return "not installed"
    done = subprocess.run([name, "version"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip() or "does not run")


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
