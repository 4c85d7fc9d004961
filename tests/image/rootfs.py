"""A base image out of this machine's own Python, so that none has to be downloaded.

It holds CPython 3.12, pip, a shell and what these link to. Torch and the rest are links into a
directory that each build and run mounts: the packages of the test environment, 4.7 GB of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from tests.buildtools.toy import write_files

SITE = "usr/local/lib/python3.12/site-packages"
MOUNTED = "/opt/site-packages"
"""Where the packages of the test environment are mounted."""
LINKS = "opt/packages"
"""Directory on the path of the base's Python, with a link to each mounted package."""
STOCK = {
    "megatron/core/__init__.py": "raise RuntimeError('stock')\n",
    "megatron_core-0.19.2.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.2\n"
    ),
    "megatron_core-0.19.2.dist-info/INSTALLER": "pip\n",
    "megatron_core-0.19.2.dist-info/RECORD": (
        "megatron/core/__init__.py,,\nmegatron_core-0.19.2.dist-info/METADATA,,\n"
        "megatron_core-0.19.2.dist-info/INSTALLER,,\nmegatron_core-0.19.2.dist-info/RECORD,,\n"
    ),
}
"""An installed megatron-core that is not ours."""
_COMMANDS = ("bash", "cat", "env", "id", "ls", "mkdir", "rm", "tail")
_NEVER_NEEDED = shutil.ignore_patterns(
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter",
    "turtledemo", "lib2to3", "config-3*", "*.a", "_tkinter*", "_test*",
)  # fmt: skip


def packages() -> Path:
    """Return the directory of the test environment's packages."""
    return Path(sysconfig.get_path("purelib"))


def make_rootfs(root: Path) -> None:
    """Write the files of the base image below ``root``."""
    for name in ("usr/bin", "usr/lib", "usr/lib64", "usr/local/bin", "tmp", "proc", "sys", "dev"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    _copy_python(root)
    for name in _COMMANDS:
        shutil.copy(str(shutil.which(name)), root / "usr/bin" / name)
    (root / "usr/bin/sh").symlink_to("bash")
    programs = [
        path for path in root.rglob("*") if path.suffix == ".so" or path.parent.name == "bin"
    ]
    for library in _libraries([*programs, *Path(torch.__path__[0], "lib").glob("libtorch_cpu.so")]):
        destination = root / str(library).lstrip("/")
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, destination)
    (root / LINKS).mkdir(parents=True)
    for path in packages().iterdir():
        if not path.name.startswith(("megatron", "pip", "__")) and path.suffix != ".pth":
            (root / LINKS / path.name).symlink_to(f"{MOUNTED}/{path.name}")
    write_files(root / SITE, {"packages.pth": f"/{LINKS}\n"})
    users = "root:x:0:0::/root:/bin/sh\ntrainer:x:1000:1000::/home/trainer:/bin/sh\n"
    write_files(root, {"etc/passwd": users})


def _copy_python(root: Path) -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(stdlib, root / "usr/local/lib/python3.12", ignore=_NEVER_NEEDED)
    shutil.copytree(sysconfig.get_path("include"), root / "usr/local/include/python3.12")
    shutil.copy(Path(sys.executable).resolve(), root / "usr/local/bin/python3.12")
    (root / "usr/local/bin/python3").symlink_to("python3.12")
    for library in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython3.12.so.*"):
        shutil.copy(library, root / "usr/lib" / library.name)
    for path in packages().glob("pip*"):
        shutil.copytree(path, root / SITE / path.name)


def _libraries(programs: list[Path]) -> set[Path]:
    """Return the shared libraries of the system that ``programs`` load."""
    found: set[Path] = set()
    for program in programs:
        done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
        found |= {Path(match) for match in re.findall(r"(?:=>|^)\s*(/\S+)", done.stdout, re.M)}
    system = {path for path in found if str(path).startswith(("/lib", "/usr/lib"))}
    stubs = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1")  # torch asks by name
    return system | {
        path.parent / stub for path in system for stub in stubs if (path.parent / stub).exists()
    }
