"""Writes the names of Megatron's arguments into the planner.

    .work/env/test/bin/python -m tests.store.megatron_names

A plan is made without Megatron, so it cannot ask the parser. This does, of the Megatron that is
installed; `test_plan_megatron_names.py` compares.
"""

from __future__ import annotations

import textwrap
import tomllib
from argparse import SUPPRESS, ArgumentParser, _HelpAction
from typing import Any

from buildtools.paths import ROOT

PATH = ROOT.joinpath(
    *("megatron_overlay", "megatron", "core", "optimizer", "nvme_state_store", "plan"),
    "megatron_names.py",
)
_HEAD = '''"""The names of Megatron's arguments, and how many values each takes.

Written by `python -m tests.store.megatron_names`.
"""

from __future__ import annotations

'''
_TAIL = '''
WITHOUT_VALUE = frozenset(_WITHOUT_VALUE.split())
WITH_VALUES = frozenset(_WITH_VALUES.split())
"""Any number of them."""
WITH_ONE_VALUE = frozenset(_WITH_ONE_VALUE.split())
NAMES = WITHOUT_VALUE | WITH_VALUES | WITH_ONE_VALUE
'''


def parser_arguments() -> dict[str, Any]:
    """Return how many values each of Megatron's arguments takes, and which are accepted."""
    from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser(allow_abbrev=False, argument_default=SUPPRESS)
    add_megatron_arguments(parser)
    return {
        name[2:]: {"nargs": action.nargs, "choices": [*map(str, action.choices or ())]}
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and not isinstance(action, _HelpAction)
    }


def render(arguments: dict[str, Any]) -> str:
    """Return the module."""
    with (ROOT / "upstream.toml").open("rb") as file:
        version = tomllib.load(file)["upstream"]["version"]
    names: dict[str, list[str]] = {"_WITHOUT_VALUE": [], "_WITH_VALUES": [], "_WITH_ONE_VALUE": []}
    for name, each in sorted(arguments.items()):
        kinds = {0: "_WITHOUT_VALUE", None: "_WITH_ONE_VALUE"}
        names[kinds.get(each["nargs"], "_WITH_VALUES")].append(name)
    tables = "".join(
        f'{kind} = """\n{textwrap.fill(" ".join(found), 100, break_on_hyphens=False)}\n"""\n'
        for kind, found in names.items()
    )
    return f'{_HEAD}MEGATRON = "{version}"\n{tables}{_TAIL}'


if __name__ == "__main__":
    PATH.write_text(render(parser_arguments()), encoding="utf-8")
