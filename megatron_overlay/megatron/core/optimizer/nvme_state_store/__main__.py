"""`python -m megatron.core.optimizer.nvme_state_store COMMAND`: tools around the store.

For ``-m`` Python first imports every package above this one, and so Megatron's optimizers and
torch, with the warnings that they print on stderr; no code of this package runs before. The tools
need neither. Started by the path of its directory, this package runs without them:

    python .../megatron/core/optimizer/nvme_state_store COMMAND
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit status."""
    package = __package__ or _import_by_path(Path(__file__).parent)
    status: int = import_module(f"{package}.commands").main(arguments)
    return status


def _import_by_path(directory: Path) -> str:
    """Import a package by its directory, as one without parents; return its name."""
    # Python put it there; a package's own modules are not to be found under their bare names.
    sys.path[:] = [each for each in sys.path if not each or Path(each) != directory]
    name = directory.name
    spec = spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None and spec.loader is not None, "a file that is there"
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return name


if __name__ == "__main__":
    sys.exit(main())
