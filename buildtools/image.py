"""The image: what goes into its context, what decides it, and when it need not be built again."""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from buildtools.archive import sha256_of
from buildtools.bake import Facts, manifest_of, series_hash, upstream_label
from buildtools.console import BuildError, say
from buildtools.containers import Build, Engine, Image, show
from buildtools.doctor import Verdict, inspect_wheel
from buildtools.objects import files_below
from buildtools.paths import PATCHES, ROOT, WORK
from buildtools.tree import Recipe

INPUT_LABEL = "megatron-nvme.input-sha256"
TOOL = "megatron-nvme"
"""File name of the verifier in the context and in the image."""
_SOURCES = (
    "LICENSE", "NOTICE", "build.py", "buildtools", "megatron_overlay", "patches", "requirements",
    "upstream.toml",
)  # fmt: skip
"""What of the repository makes the wheel."""
_MAIN = """import sys
if sys.version_info[:2] != (3, 12):
    sys.exit("error: the wheel is for Python 3.12, python3 of this base is " + sys.version)
from buildtools.bake import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Plan:
    """An image to make.

    Attributes:
        dockerfile: its path.
        context: directory of the files it may use.
        base: name of the base image; None takes the Dockerfile's.
        tag: name of the result; None takes the version's.
        arguments: build arguments that describe the content.
        options: further options of the engine.
    """

    dockerfile: Path
    context: Path
    base: str | None
    tag: str | None
    arguments: dict[str, str]
    options: tuple[str, ...] = ()


def context_directory(*, inside: bool) -> Path:
    """Return where the context of an image is made: the wheel, or with ``inside`` the sources."""
    return WORK / "image" / ("context-of-sources" if inside else "context-of-wheel")


def default_base(dockerfile: Path) -> str:
    """Return the base that a Dockerfile takes if none is given."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    if found is None:
        raise BuildError(f"{dockerfile}: expected a line `ARG BASE_IMAGE=...`")
    return found[1]


def tag_of(version: str) -> str:
    """Return the name of the image of a version; a tag may not hold ``+``."""
    return f"megatron-nvme:{version.replace('+', '-')}"


def check_tag(tag: str) -> str:
    """Return ``tag`` if an engine will take it.

    Raises:
        BuildError: it will not.
    """
    registry, name = r"([A-Za-z0-9.-]+(:[0-9]+)?/)?", r"[a-z0-9]+([._/-]+[a-z0-9]+)*"
    if not re.fullmatch(rf"{registry}{name}(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?", tag):
        raise BuildError(f"--tag {tag}: an image cannot be named so; for example {tag_of('1+a')}")
    return tag


def pack_tool(destination: Path) -> None:
    """Write `megatron-nvme`: the module `bake` and what it imports; equal sources, equal bytes."""
    members = {f"buildtools/{name}.py": _module(name) for name in _closure("bake")}
    with destination.open("wb") as stream:
        stream.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(stream, "w") as archive:  # stored: no two zlibs compress alike
            for name, text in {"__main__.py": _MAIN, **members}.items():
                archive.writestr(zipfile.ZipInfo(name), text)
    destination.chmod(0o755)


def _module(name: str) -> str:
    return (ROOT / "buildtools" / f"{name}.py").read_text()


def _closure(start: str) -> list[str]:
    """Return the modules of buildtools that ``start`` needs, itself and the package included."""
    found: set[str] = set()
    queue = ["__init__", start]
    while queue:
        name = queue.pop()
        found.add(name)
        for node in ast.walk(ast.parse(_module(name))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("buildtools."):
                queue += {(node.module or "").partition(".")[2]} - found
    return sorted(found)


def context_of_wheel(wheel: Path, context: Path) -> dict[str, str]:
    """Make the context that installs ``wheel``; return the build arguments that describe it.

    Raises:
        BuildError: the wheel is not sound.
    """
    report = inspect_wheel(wheel)
    if report.verdict is not Verdict.VERIFIED:
        raise BuildError("\n".join([f"{wheel.name} is not to be baked:", *report.lines]))
    digest = fill_context(wheel, context)
    return _arguments(Facts.of_manifest(manifest_of(wheel))) | {"SHA256": digest}


def fill_context(wheel: Path, context: Path) -> str:
    """Make a context of a wheel, whatever is in it; return its sha256."""
    _empty(context)
    shutil.copyfile(wheel, context / wheel.name)
    digest = sha256_of(wheel)
    (context / f"{wheel.name}.sha256").write_text(f"{digest}  {wheel.name}\n")
    pack_tool(context / TOOL)
    return digest


def context_of_sources(recipe: Recipe, cached: dict[str, Path], context: Path) -> dict[str, str]:
    """Make the context that builds the wheel inside; return the arguments that describe it.

    Args:
        recipe: what is built.
        cached: what the build takes from the cache -> where it is now.
        context: the directory to make.
    """
    _empty(context)
    source = context / "source"
    for name in _SOURCES:
        path = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=ignore)
        else:
            source.mkdir(exist_ok=True)
            shutil.copyfile(path, source / name)
    for name, path in cached.items():
        destination = source / "cache" / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, destination)
    pack_tool(context / TOOL)
    pin = recipe.pin
    hashes = {"sdist-sha256": pin.sdist_sha256}
    facts = Facts(
        version=pin.label,
        upstream=upstream_label(pin.name, pin.version, **hashes),
        series=series_hash({p.name: sha256_of(PATCHES / p.name) for p in recipe.patches}),
        tree=pin.lock.assembled,
    )
    return _arguments(facts)


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _arguments(facts: Facts) -> dict[str, str]:
    return {name.upper(): value for name, value in asdict(facts).items()}


def input_hash(plan: Plan, base: str, base_id: str) -> str:
    """Return a hash of all that decides the image: files, Dockerfile, arguments, options, base.

    Args:
        plan: the image.
        base: name of its base.
        base_id: what that name means now: a tag moves.
    """
    lines = [f"base {base} {base_id}", f"dockerfile {sha256_of(plan.dockerfile)}"]
    lines += [f"argument {key}={value}" for key, value in sorted(plan.arguments.items())]
    lines += [f"option {option}" for option in plan.options]
    lines += [f"file {sha256_of(plan.context / n)} {n}" for n in files_below(plan.context)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def make_image(plan: Plan, engine: Engine, *, dry_run: bool) -> None:
    """Build the image unless the engine holds it already; say what it is.

    Raises:
        BuildError: the base cannot be had, or a step of the build failed.
    """
    base = default_base(plan.dockerfile) if plan.base is None else plan.base
    tag = check_tag(tag_of(plan.arguments["VERSION"]) if plan.tag is None else plan.tag)
    held = engine.find(base)
    if held is None and not dry_run:
        engine.pull(base)
        held = engine.find(base)
    inputs = input_hash(plan, base, held.id if held else "")
    build = Build(
        plan.dockerfile,
        plan.context,
        tag,
        {"BASE_IMAGE": base, **plan.arguments, "INPUT": inputs},
        plan.options,
    )
    if dry_run:
        say(f"{show(engine.command(build))}\ninput {inputs}")
        if held is None:
            say(f"{base} is not here: pulled first, it gives another input hash")
        return
    image = engine.find(tag)
    if image is not None and image.labels.get(INPUT_LABEL) == inputs:
        say(f"{tag} is up to date")
    else:
        image = engine.build(build)
    say("\n".join(_description(tag, image, inputs, engine)))


def _description(tag: str, image: Image, inputs: str, engine: Engine) -> list[str]:
    lines = [f"image  {tag}", f"id     sha256:{image.id}"]
    lines += [f"digest {image.digest}"] if image.digest else []
    return [*lines, f"input  {inputs}", f"engine {engine.name}"]
