"""`build.py image`, before an engine does anything: command, input hash, context, what is skipped.

Images are built for real in tests/image.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from buildtools import bake, containers, image
from buildtools.archive import sha256_of
from buildtools.console import BuildError
from buildtools.containers import choose
from buildtools.image import Plan, context_of_wheel, input_hash, pack_tool
from buildtools.paths import ROOT
from tests.buildtools.command import build_py, run
from tests.buildtools.toy import write_files

FAKE = """#!{python}
# An engine that holds images as files below $FAKE: name -> what `image inspect` prints.
import hashlib, json, os, pathlib, sys
state, arguments = pathlib.Path(os.environ["FAKE"]), sys.argv[1:]
buildah = sys.argv[0].endswith("buildah")
with (state / "log").open("a") as log:
    log.write(" ".join(arguments) + "\\n")
name = hashlib.sha256(arguments[-1].encode()).hexdigest()
labels = {{}}
if arguments[0] == "version":
    sys.exit(os.environ.get("FAKE_BROKEN"))
if "inspect" in arguments:
    if not (state / name).exists():
        sys.exit("no such image")
    print((state / name).read_text())
    sys.exit()
if arguments[0] == "build":
    if os.environ.get("FAKE_FAILS"):
        sys.exit("a step failed")
    name = hashlib.sha256(arguments[arguments.index("--tag") + 1].encode()).hexdigest()
    inputs = next(word for word in arguments if word.startswith("INPUT="))
    labels = {{"megatron-nvme.input-sha256": inputs[6:]}}
elif arguments[0] != "pull" or "nowhere" in arguments[1]:
    sys.exit("unknown")
found = {{"Id": "sha256:" + name, "Config": {{"Labels": labels}}, "RepoDigests": ["x@sha256:d"]}}
if buildah:
    found = {{"FromImageID": name, "FromImageDigest": "sha256:d"}}
    found["OCIv1"] = {{"config": {{"Labels": labels}}}}
(state / name).write_text(json.dumps(found if buildah else [found]))
"""


class Fake:
    """Container engines on PATH that build nothing."""

    def __init__(self, root: Path) -> None:
        self.state = root
        self.bin = root / "bin"

    def add(self, *names: str) -> Fake:
        write_files(self.bin, {name: FAKE.format(python=sys.executable) for name in names})
        for name in names:
            (self.bin / name).chmod(0o755)
        return self

    def image(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return build_py(
            "image", *arguments, **{"PATH": path, "FAKE": str(self.state)} | environment
        )

    def calls(self, verb: str) -> list[list[str]]:
        lines = map(str.split, (self.state / "log").read_text().splitlines())
        return [words for words in lines if words[0] == verb]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path / "fake").add("docker")


@pytest.fixture
def plan(wheel: Path, tmp_path: Path) -> Plan:
    dockerfile = write_files(tmp_path, {"Dockerfile": "ARG BASE_IMAGE=base:1\n"}) / "Dockerfile"
    arguments = context_of_wheel(wheel, tmp_path / "context")
    return Plan(dockerfile, tmp_path / "context", None, None, arguments)


def test_a_dry_run_shows_the_command_and_builds_nothing(fake: Fake, wheel: Path) -> None:
    done = fake.image("--dry-run", "--base", "base:1", "--wheel", str(wheel))

    assert done.returncode == 0, done.stderr
    command, inputs, pulled = done.stdout.splitlines()
    words = shlex.split(command)
    assert words[:3] == ["docker", "build", "--network=none"]
    assert words[words.index("--tag") + 1] == "megatron-nvme:0.19.2-nvme.1"
    assert {"BASE_IMAGE=base:1", "VERSION=0.19.2+nvme.1", f"SHA256={sha256_of(wheel)}"} < {*words}
    assert f"INPUT={inputs.removeprefix('input ')}" in words
    assert words[-1].endswith("/.work/image/context-of-wheel")
    assert pulled.startswith("base:1 is not here")
    assert not fake.calls("build") + fake.calls("pull")


@pytest.mark.parametrize("engine", ["docker", "podman", "buildah"])
def test_each_engine_builds_once_for_the_same_input(fake: Fake, wheel: Path, engine: str) -> None:
    fake.add(engine)
    command = ("--engine", engine, "--base", "base:1", "--wheel", str(wheel))

    first, second = fake.image(*command), fake.image(*command)
    other = fake.image(*command, "--", "--squash")

    for done in (first, second, other):
        assert done.returncode == 0, done.stderr
    assert first.stdout.splitlines()[0] == "image  megatron-nvme:0.19.2-nvme.1"
    assert "\ndigest sha256:d\n" in first.stdout
    assert first.stdout.endswith(f"\nengine {engine}\n")
    assert second.stdout == "megatron-nvme:0.19.2-nvme.1 is up to date\n" + first.stdout
    assert len(fake.calls("pull")) == 1
    assert len(fake.calls("build")) == 2
    assert "--squash" in fake.calls("build")[1]


def test_a_build_that_fails_and_a_base_that_is_nowhere_are_errors(fake: Fake, wheel: Path) -> None:
    failed = fake.image("--base", "base:1", "--wheel", str(wheel), FAKE_FAILS="1")
    unknown = fake.image("--base", "nowhere:1", "--wheel", str(wheel))

    assert failed.returncode == 1
    assert "docker did not build megatron-nvme:0.19.2-nvme.1" in failed.stderr
    assert unknown.returncode == 1
    assert "the base image nowhere:1 is not here and cannot be pulled by docker" in unknown.stderr


def test_an_unsound_wheel_is_not_given_to_an_engine(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_text("not a wheel")

    done = fake.image("--base", "base:1", "--wheel", str(tmp_path / "x.whl"))

    assert done.returncode == 1
    assert "x.whl is not to be baked" in done.stderr
    assert not fake.calls("build")


NO_DAEMON = "#!/bin/sh\necho Cannot connect. Is the daemon running? >&2\nexit 1\n"


def test_the_first_engine_that_works_is_taken_and_the_others_are_said(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(fake.bin))
    monkeypatch.setenv("FAKE", str(fake.state))
    assert choose(None).name == "docker"
    assert capsys.readouterr().err == ""

    write_files(fake.bin, {"docker": NO_DAEMON})
    with pytest.raises(BuildError) as caught:
        choose(None)
    assert str(caught.value).splitlines() == [
        "none of the container engines works here:",
        "  docker: Cannot connect. Is the daemon running? (start its daemon, or set DOCKER_HOST)",
        "  podman: not installed (Debian: apt-get install podman)",
        "  buildah: not installed (Debian: apt-get install buildah runc)",
    ]
    fake.add("buildah")
    assert choose(None).name == "buildah"
    said = capsys.readouterr().err
    assert "warning: docker is passed over: Cannot connect. Is the daemon running? (start" in said
    assert "warning: podman is passed over: not installed" in said
    assert "warning: buildah builds, and the image is in its storage, which others do not see" in (
        said
    )


def test_an_engine_that_was_named_is_the_one_the_error_is_about(fake: Fake) -> None:
    write_files(fake.bin, {"docker": NO_DAEMON})
    fake.add("buildah")

    broken = fake.image("--engine", "docker", "--dry-run")
    missing = fake.image("--engine", "podman", "--dry-run", PATH=str(fake.bin))

    assert broken.returncode == missing.returncode == 1
    assert "error: --engine docker: Cannot connect. Is the daemon running? (start its" in (
        broken.stderr
    )
    assert "; what works here is --engine " in broken.stderr and "buildah" in broken.stderr
    assert "podman" not in broken.stderr.partition("what works")[0]
    assert "error: --engine podman: not installed (Debian: apt-get install podman); what works" in (
        missing.stderr
    )
    assert "docker" not in missing.stderr


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("#!/bin/sh\nexec sleep 60\n", "`podman version` does not answer within 1 s"),
        ("#!/nowhere\n", "`podman version` cannot be run: No such file or directory"),
        ("#!/bin/sh\nexit 3\n", "`podman version` ends with status 3"),
    ],
    ids=["hangs", "broken", "silent"],
)
def test_an_engine_that_does_not_answer_is_passed_over(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, engine: str, reason: str
) -> None:
    monkeypatch.setattr(containers, "_PATIENCE_S", 1)
    monkeypatch.setenv("PATH", f"{fake.bin}{os.pathsep}{os.environ['PATH']}")
    write_files(fake.bin, {"podman": engine})
    (fake.bin / "podman").chmod(0o755)

    with pytest.raises(BuildError, match=f"--engine podman: {reason}"):
        choose("podman")


def test_what_is_no_option_is_not_passed_on_unless_it_stands_behind_two_dashes(fake: Fake) -> None:
    assert fake.image("--dryrun").returncode == 2


@pytest.mark.parametrize("tag", ["x:1+a", "X:1", "x y", "", "x:" + "a" * 129])
def test_a_tag_that_no_engine_takes_is_refused(tag: str) -> None:
    with pytest.raises(BuildError, match=r"for example megatron-nvme:1-a"):
        image.check_tag(tag)


def test_a_tag_may_name_a_registry() -> None:
    assert image.check_tag("registry.example:5000/team/x:0.19.2-nvme.1")


def test_the_context_holds_the_wheel_its_hash_and_the_verifier(plan: Plan, wheel: Path) -> None:
    names = {path.name for path in plan.context.iterdir()}

    assert names == {wheel.name, f"{wheel.name}.sha256", "megatron-nvme"}
    assert (plan.context / "megatron-nvme").stat().st_size < 150_000


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, options=("--squash",)),
        lambda plan: replace(plan, arguments=plan.arguments | {"SERIES": "0"}),
        lambda plan: plan.dockerfile.write_text("ARG BASE_IMAGE=base:2\n"),
        lambda plan: next(plan.context.glob("*.whl")).write_bytes(b"x"),
        lambda plan: (plan.context / "megatron-nvme").write_bytes(b"x"),
    ],
    ids=["options", "arguments", "dockerfile", "wheel", "verifier"],
)
def test_the_input_hash_changes_with(plan: Plan, change: Callable[[Plan], object]) -> None:
    before = input_hash(plan, "base:1", "id")

    changed = change(plan)

    after = input_hash(changed if isinstance(changed, Plan) else plan, "base:1", "id")
    assert before != after


def test_the_input_hash_changes_with_the_base_and_with_nothing_else(
    plan: Plan, wheel: Path, tmp_path: Path
) -> None:
    before = input_hash(plan, "base:1", "id")
    again = replace(plan, context=tmp_path / "again")
    context_of_wheel(wheel, again.context)

    assert input_hash(again, "base:1", "id") == before
    assert input_hash(plan, "base:2", "id") != before
    assert input_hash(plan, "base:1", "other") != before


def test_the_verifier_runs_without_the_repository(tmp_path: Path) -> None:
    pack_tool(tmp_path / "megatron-nvme")

    done = run(sys.executable, "-I", str(tmp_path / "megatron-nvme"), "--help")

    assert done.returncode == 0, done.stderr
    assert "usage: megatron-nvme" in done.stdout


def test_only_conflicts_of_ours_count() -> None:
    lines = [
        "megatron-core 0.19.2+nvme.1 requires psutil, which is not installed.",
        "Torch 2.11.0a0 has requirement sympy>=1.13, but you have sympy 1.12.",
        "nemo-toolkit 2.0 has requirement torch>=2.11, but you have torch 2.11.0a0.",
        "",
    ]

    ours, others = bake.conflicts(lines, {"megatron-core", "torch"})

    assert ours == lines[:2]
    assert others == lines[2:3]


def test_a_copy_behind_the_installation_is_found(tmp_path: Path) -> None:
    stock = {"megatron/core/__init__.py": "", "megatron/training/__init__.py": ""}
    own = write_files(tmp_path / "own", stock)
    later = write_files(tmp_path / "later", stock)
    bridge = write_files(tmp_path / "bridge", {"megatron/bridge/__init__.py": ""})
    path = [str(own), str(own), str(bridge), str(later)]

    found = bake.other_copies(path, own)

    assert found == [f"{later}/megatron/core", f"{later}/megatron/training"]
    assert bake.other_copies(path[:3], own) == []


def test_a_file_that_only_its_owner_reads_is_found(tmp_path: Path) -> None:
    record = "megatron/core/__init__.py,,\nmegatron/core/x.py,,\n"
    files = {
        "megatron/core/__init__.py": "",
        "megatron/core/x.py": "",
        "m.dist-info/RECORD": record,
    }
    write_files(tmp_path, files)
    dist = Distribution.at(tmp_path / "m.dist-info")
    assert bake.unreadable(tmp_path, dist) == []

    (tmp_path / "megatron/core/x.py").chmod(0o600)
    (tmp_path / "megatron/core").chmod(0o750)

    found = "\n".join(bake.unreadable(tmp_path, dist))
    assert f"DAMAGED: {tmp_path}/megatron/core: not readable" in found
    assert f"DAMAGED: {tmp_path}/megatron/core/x.py: not readable" in found
    assert "__init__" not in found


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.build"])
def test_the_linter_has_nothing_to_say(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")

    done = run(str(hadolint), str(ROOT / name))

    assert (done.returncode, done.stdout) == (0, "")


def test_the_two_dockerfiles_differ_in_where_the_wheel_comes_from_and_in_nothing_else() -> None:
    plain, inside = ((ROOT / name).read_text() for name in ("Dockerfile", "Dockerfile.build"))

    assert image.default_base(ROOT / "Dockerfile") == image.default_base(ROOT / "Dockerfile.build")
    lines = set(inside.partition("AS wheel")[2].splitlines())
    missing = [line for line in plain.partition("FROM ")[2].splitlines()[1:] if line not in lines]
    assert missing == [
        "ARG SHA256",
        "RUN --mount=type=bind,target=/context \\",
        '    megatron-nvme install /context --sha256 "${SHA256}" \\',
        '      megatron-nvme.wheel-sha256="${SHA256}" \\',
    ]


def test_every_build_command_of_the_documentation_runs(fake: Fake) -> None:
    text = (ROOT / "docs" / "image.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("    python3 build.py image")]
    assert len(lines) >= 4
    fake.add("podman", "buildah")
    for line in lines:
        done = fake.image(*shlex.split(line, comments=True)[3:])
        assert done.returncode == 0, (line, done.stderr)
