"""Guard tests of the patches that mend upstream's distribution.

Each fails on its own assertion against a Megatron without its patch: `test_guards.py` proves it by
running them with ``--megatron-site``. They look at the distribution from outside, in processes of
their own, so that the Megatron of the test process plays no part.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _distribution(site: Path) -> importlib.metadata.Distribution:
    return next(iter(importlib.metadata.distributions(name="megatron-core", path=[str(site)])))


def _python(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with the Megatron of ``site`` first on its path, then this repository."""
    environment = os.environ | {
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_version_holds_below_a_foreign_git_checkout(megatron_site: Path, tmp_path: Path) -> None:
    """The version at run time is the one in METADATA, wherever the package lies."""
    package = tmp_path / "site" / "megatron" / "core"
    package.mkdir(parents=True)
    source = megatron_site / "megatron" / "core" / "package_info.py"
    (package / "package_info.py").write_bytes(source.read_bytes())
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost"]
    subprocess.run([*git, "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)

    code = "import runpy; print(runpy.run_path('package_info.py')['__version__'])"
    done = _python(megatron_site, "-c", code, cwd=package)

    assert done.stdout.strip() == _distribution(megatron_site).version, done.stderr


def test_wheel_carries_licence_and_notice(megatron_site: Path) -> None:
    """Upstream's licence text and the notice of modification are in the metadata directory."""
    distribution = _distribution(megatron_site)
    licences = {
        path.name: path.read_text()
        for path in distribution.files or []
        if ".dist-info/licenses/" in str(path)
    }

    assert "Redistributions in binary form must reproduce" in licences.get(
        "LICENSE.megatron-lm", ""
    )
    assert "This is a modified version of megatron-core" in licences.get("NOTICE", "")
    assert "LICENSE.megatron-nvme" in licences
    declared = set(distribution.metadata.get_all("License-File") or [])
    assert {f"licenses/{name}" for name in licences} == declared


_SAVE = """
import importlib.abc, importlib.metadata, os, re, sys, tempfile

def closure(name, seen):
    if name in seen:
        return seen
    seen.add(name)
    try:
        requires = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return seen
    for requirement in requires:
        if "extra ==" not in requirement:
            closure(re.match(r"[\\w.-]+", requirement)[0].lower(), seen)
    return seen

def dotless(name):
    return re.sub(r"[-_.]+", "-", name).lower()

declared = {dotless(name) for name in closure("megatron-core", set())}
hidden = {
    module
    for module, owners in importlib.metadata.packages_distributions().items()
    if not {dotless(owner) for owner in owners} & declared
}

class Undeclared(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"undeclared dependency {name!r}", name=name)

# Upstream also asks for versions: what is hidden is not installed.
find = importlib.metadata.Distribution.from_name

def from_name(name):
    if dotless(name) not in declared:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)

importlib.metadata.Distribution.from_name = staticmethod(from_name)

def main():
    from tests import emulated_cuda
    emulated_cuda.install()
    import torch
    from megatron.core import dist_checkpointing
    scratch = tempfile.mkdtemp(dir=".")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{os.path.abspath(scratch)}/store", rank=0, world_size=1
    )
    directory = os.path.join(scratch, "checkpoint")
    os.mkdir(directory)
    tensor = dist_checkpointing.ShardedTensor.from_rank_offsets("t", torch.ones(4))
    dist_checkpointing.save({"t": tensor}, directory)
    print("saved", ".metadata" in os.listdir(directory))

sys.meta_path.insert(0, Undeclared())

if __name__ == "__main__":
    main()
"""


def test_distributed_save_needs_nothing_undeclared(megatron_site: Path, tmp_path: Path) -> None:
    """A torch_dist save succeeds when only the declared dependencies can be imported."""
    script = tmp_path / "save.py"
    script.write_text(_SAVE)

    done = _python(megatron_site, str(script), cwd=tmp_path)

    assert done.stdout.strip().endswith("saved True"), done.stderr[-3000:]


def test_dataset_helper_needs_no_makefile(megatron_site: Path, tmp_path: Path) -> None:
    """What `initialize_megatron` calls to get the dataset helper succeeds in an installation."""
    code = (
        "from megatron.core.datasets.utils import compile_helpers; compile_helpers(); "
        "from megatron.core.datasets import helpers_cpp; print(helpers_cpp.__name__)"
    )

    done = _python(megatron_site, "-c", code, cwd=tmp_path)

    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.strip().endswith("helpers_cpp")
