"""`python -m megatron.core.optimizer.nvme_state_store COMMAND`: tools around the store."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from . import plan, probe


class _Command(Protocol):
    """What the module of a command has."""

    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int: ...


_COMMANDS: dict[str, _Command] = {"plan": plan, "probe": probe}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron.core.optimizer.nvme_state_store")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        text = module.DESCRIPTION
        module.add_arguments(commands.add_parser(name, help=text, description=text))
    parsed = parser.parse_args(arguments)
    return _COMMANDS[parsed.command].run(parsed)


if __name__ == "__main__":
    sys.exit(main())
