"""The commands of `__main__`, and what is said of arguments that none of them has."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Protocol

from . import probe
from .plan import command as plan

PROGRAM = "python -m megatron.core.optimizer.nvme_state_store"


class _Command(Protocol):
    """What the module of a command has."""

    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int: ...


_COMMANDS: dict[str, _Command] = {"plan": plan, "probe": probe}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit status."""
    # Abbreviations would let a misspelt argument pass for another one.
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, module in _COMMANDS.items():
        text = module.DESCRIPTION
        parsers[name] = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        module.add_arguments(parsers[name])
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parsers[parsed.command].error(_about(unknown, parsers[parsed.command], parsed.command))
    return _COMMANDS[parsed.command].run(parsed)


def _about(unknown: Sequence[str], parser: argparse.ArgumentParser, command: str) -> str:
    known = [word for word in parser.format_help().replace("[", " ").split() if word[:2] == "--"]
    lines = [f"unrecognized arguments: {' '.join(unknown)}"]
    for word in unknown:
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, sorted(set(known)), n=1) if name[:2] == "--" else []
        lines += [f"instead of {name}, did you mean {each}?" for each in near]
    if command == "plan":
        lines.append("Megatron's own arguments go after --")
    return "; ".join(lines)
