"""The Dockerfile, built for real: what comes of it runs, and what is wrong fails the build."""

from __future__ import annotations

import shlex
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from buildtools.containers import Build
from buildtools.image import INPUT_LABEL, context_of_wheel, fill_context
from buildtools.manifest import HELPER, NAME
from buildtools.paths import ROOT
from tests.image.conftest import BASE, VOLUME, Bakery
from tests.image.rootfs import LINKS, SITE, STOCK

IMAGE = "localhost/megatron-nvme:0.19.2-nvme.1"


def test_a_stock_copy_of_the_base_is_replaced_whatever_its_pip_is_told(baked: str) -> None:
    assert "installed megatron_core-0.19.2+nvme.1-" in baked
    assert "VERIFIED: all " in baked
    assert "image  megatron-nvme:0.19.2-nvme.1\nid     sha256:" in baked


def test_conflicts_of_the_base_are_reported_and_do_not_count(baked: str) -> None:
    assert "not about megatron-core: unrelated 1 requires nowhere" in baked
    assert "pip check: megatron-core, numpy, packaging, psutil, torch: content" in baked


def test_transformer_engine_and_apex_are_reported_and_not_required(baked: str) -> None:
    assert "transformer_engine.pytorch not usable: ModuleNotFoundError" in baked
    assert "apex not usable: ModuleNotFoundError" in baked


def test_the_labels_say_what_is_inside(bakery: Bakery, baked: str) -> None:
    image = bakery.engine.find(IMAGE)

    assert image is not None
    assert image.labels["org.opencontainers.image.version"] == "0.19.2+nvme.1"
    assert image.labels["org.opencontainers.image.licenses"].startswith("BSD-3-Clause AND ")
    assert image.labels["megatron-nvme.upstream"].startswith("megatron-core 0.19.2 sdist-sha256:")
    for name in ("series-sha256", "wheel-sha256", "input-sha256"):
        assert len(image.labels[f"megatron-nvme.{name}"]) == 64


def test_the_same_input_is_not_built_again(
    bakery: Bakery, baked: str, lived_in: str, wheel: Path
) -> None:
    printed = bakery.image("--base", lived_in, "--wheel", str(wheel))

    assert printed.startswith("megatron-nvme:0.19.2-nvme.1 is up to date\n")
    assert printed.splitlines()[1:] == baked.splitlines()[-len(printed.splitlines()) + 1 :]


@pytest.mark.parametrize("user", ["0:0", "1000:1000"], ids=["root", "not_root"])
def test_the_image_works_for(bakery: Bakery, baked: str, user: str) -> None:
    verbs = "megatron-nvme doctor && megatron-nvme smoke"

    status, printed = bakery.run(IMAGE, "bash", "-c", verbs, user=user)

    assert status == 0, printed
    assert "\nVERIFIED: all " in printed
    assert "\nmegatron.core 0.19.2+nvme.1\nhelpers_cpp /usr/local/lib/" in printed


def test_a_copy_that_comes_at_run_time_is_named(bakery: Bakery, baked: str) -> None:
    command = "mkdir -p /srv/another/megatron/core && echo > /srv/another/megatron/core/__init__.py"

    status, printed = bakery.run(
        IMAGE, "bash", "-c", f"{command} && PYTHONPATH=/srv/another megatron-nvme doctor"
    )

    assert status == 1
    assert (
        "SHADOWED: `import megatron.core` takes /srv/another/megatron/core/__init__.py" in printed
    )


def test_every_run_command_of_the_documentation_runs(bakery: Bakery, baked: str) -> None:
    text = (ROOT / "docs" / "image.md").read_text()
    lines = [line.strip() for line in text.splitlines() if line.startswith("    docker run ")]
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line, comments=True)
        at = words.index("megatron-nvme:0.19.2-nvme.1")
        assert words[:3] == ["docker", "run", "--rm"]
        options, command = dict(zip(words[3:at:2], words[4:at:2], strict=True)), words[at + 1 :]
        environment = options.get("--env", "LC_ALL=C")
        status, printed = bakery.run(
            IMAGE, "env", environment, *command, user=options.get("--user", "0")
        )
        assert status == 0, (line, printed)


def _rewritten(wheel: Path, out: Path, left_out: str) -> Path:
    """Copy a wheel without one member, also without its row in RECORD."""
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out / wheel.name, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("/RECORD"):
                rows = content.decode().splitlines(keepends=True)
                content = "".join(row for row in rows if left_out not in row).encode()
            if left_out not in name:
                new.writestr(name, content)
    return out / wheel.name


@pytest.fixture
def build(wheel: Path, tmp_path: Path) -> Build:
    """A build that would succeed."""
    context = tmp_path / "context"
    arguments = {"BASE_IMAGE": BASE, "INPUT": "0", **context_of_wheel(wheel, context)}
    return Build(ROOT / "Dockerfile", context, "localhost/wrong:1", arguments, tuple(VOLUME))


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        (NAME, f"NOT PATCHED: it holds no {NAME}"),
        (HELPER, "the compiled dataset helper is missing"),
    ],
)
def test_a_wheel_that_is_unsound_fails_the_build(
    bakery: Bakery, build: Build, wheel: Path, tmp_path: Path, left_out: str, reason: str
) -> None:
    fill_context(_rewritten(wheel, tmp_path / "wheel", left_out), build.context)

    status, printed = bakery.build(build)

    assert status != 0
    assert reason in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"SHA256": "0" * 64}, "THESE PACKAGES DO NOT MATCH THE HASHES"),
        ({"VERSION": "0.19.3"}, "the label version would say '0.19.3', the wheel is '0.19.2+nvme"),
        ({"VERSION": ""}, "build with `build.py image`, which gives the labels"),
    ],
    ids=["another_hash", "another_label", "no_arguments"],
)
def test_arguments_that_are_not_the_wheels_fail_the_build(
    bakery: Bakery, build: Build, arguments: Mapping[str, str], reason: str
) -> None:
    status, printed = bakery.build(replace(build, arguments={**build.arguments, **arguments}))

    assert status != 0
    assert reason in printed


def _shadowing(bakery: Bakery) -> str:
    files = {"opt/checkout/megatron/core/__init__.py": ""}
    return bakery.base("shadowing", files, "--env", "PYTHONPATH=/opt/checkout")


def _behind(bakery: Bakery) -> str:
    files = {"opt/later/megatron/training/__init__.py": "", f"{SITE}/z.pth": "/opt/later\n"}
    return bakery.base("behind", files)


def _twice(bakery: Bakery) -> str:
    files = {f"{SITE}/{name}": text for name, text in STOCK.items()}
    older = {name.replace("0.19.2", "0.18.0"): text for name, text in files.items()}
    return bakery.base("twice", files | older)


def _elsewhere(bakery: Bakery) -> str:
    files = {f"{place}/{n}": text for place in (SITE, "opt/later") for n, text in STOCK.items()}
    return bakery.base("elsewhere", files | {f"{SITE}/z.pth": "/opt/later\n"})


def _without_psutil(bakery: Bakery) -> str:
    return bakery.base("without-psutil", {}, without=f"/{LINKS}/psutil-*")


def _without_torch(bakery: Bakery) -> str:
    return bakery.base("without-torch", {}, without=f"/{LINKS}/torch")


def _for_one_user(bakery: Bakery) -> str:
    return bakery.base("for-one-user", {}, "--user", "1000")


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (_shadowing, "SHADOWED: `import megatron.core` takes /opt/checkout/megatron/core/"),
        (_behind, "DAMAGED: a second megatron-core: /opt/later/megatron/training"),
        (_twice, "DAMAGED: a second installation is recorded in"),
        (_elsewhere, "DAMAGED: a second megatron-core: /opt/later (megatron-core 0.19.2 is"),
        (_without_psutil, "megatron-core 0.19.2+nvme.1 requires psutil, which is not installed."),
        (_without_torch, "smoke: imports failed:"),
        (_for_one_user, "is not writable for user 1000"),
    ],
)
def test_a_base_that_is_unfit_fails_the_build(
    bakery: Bakery, build: Build, base: Callable[[Bakery], str], reason: str
) -> None:
    arguments = {**build.arguments, "BASE_IMAGE": base(bakery)}

    status, printed = bakery.build(replace(build, arguments=arguments))

    assert status != 0, printed
    assert reason in printed


def test_the_wheel_can_be_built_inside(bakery: Bakery, baked: str) -> None:
    compiler = ("/usr/bin", "/usr/include", "/usr/lib/gcc", "/usr/lib/x86_64-linux-gnu")
    assert shutil.which("g++"), "what builds the wheel builds it in the image too"
    mounts = [word for path in compiler for word in ("--volume", f"{path}:{path}:ro")]

    printed = bakery.image("--inside", "--base", BASE, "--tag", "inside:1", options=mounts)

    assert "VERIFIED: all " in printed
    image = bakery.engine.find("localhost/inside:1")
    assert image is not None
    assert len(image.labels[INPUT_LABEL]) == 64
