"""Megatron's arguments by name: what its own parser would refuse is refused, in a plan's words.

What a plan does not need is passed over; what is misspelt would be passed over, too, and the plan
be of another model, if names were not compared with those of the parser.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from .megatron_names import MEGATRON, NAMES, WITH_ONE_VALUE, WITHOUT_VALUE

CHOICES: Mapping[str, tuple[str, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
}
"""Of what a plan reads, where a wrong word would change the count in silence."""


def megatron_flags(words: Sequence[str]) -> dict[str, str]:
    """Return Megatron's arguments by name; several values are joined by spaces.

    Raises:
        ValueError: the first word is no flag, Megatron knows no such flag, or it takes another
            number of values.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            _refuse_unknown(name)
            found[name] = [value] if is_joined else []  # the last one counts, as in argparse
        elif not name:
            raise ValueError(f"-- {word}: expected Megatron's arguments, such as --num-layers 32")
        else:
            found[name].append(word)
    for name, values in found.items():
        _refuse_number_of_values(name, values)
        if name in CHOICES and values[0] not in CHOICES[name]:
            expected = ", ".join(CHOICES[name])
            raise ValueError(f"-- --{name} {values[0]}: expected one of {expected}")
    return {name: " ".join(values) for name, values in found.items()}


def _refuse_unknown(name: str) -> None:
    if name in NAMES:
        return
    if name == "data-parallel-size":
        raise ValueError(f"-- --{name}: Megatron has none, it follows from the ranks; use --dp N")
    near = difflib.get_close_matches(name.replace("_", "-"), sorted(NAMES), n=3)
    advice = f"did you mean {' or '.join(f'--{each}' for each in near)}?" if near else ""
    raise ValueError(
        f"-- --{name}: expected an argument of Megatron {MEGATRON}; "
        + (advice or "leave out what only your own script knows")
    )


def _refuse_number_of_values(name: str, values: Sequence[str]) -> None:
    given = " ".join((f"-- --{name}", *values))
    if name in WITHOUT_VALUE and values:
        raise ValueError(f"{given}: expected no value, --{name} stands alone")
    if name in WITH_ONE_VALUE and len(values) != 1:
        raise ValueError(f"{given}: expected one value, got {len(values)}")


class WholeNumbers:
    """Whole numbers among Megatron's arguments."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        self._flags = flags

    def get(self, name: str, default: int = 0) -> int:
        """Return a number, or the default if it is not given.

        Raises:
            ValueError: it is none.
        """
        text = self._flags.get(name)
        if text is None or text == "None":
            return default
        if not text.isdecimal():
            raise ValueError(f"-- --{name} {text}: expected a whole number")
        return int(text)

    def need(self, name: str) -> int:
        """Return a positive number.

        Raises:
            ValueError: it is not given, zero, or none.
        """
        value = self.get(name)
        if not value:
            raise ValueError(
                f"-- --{name}: expected it among Megatron's arguments, a positive number"
            )
        return value


def in_effect(flags: Mapping[str, str], names: Sequence[str]) -> Iterator[str]:
    """Yield those of these flags that are given and not switched off, with their values."""
    for name in names:
        if flags.get(name, "0") not in ("0", "None"):
            yield f"--{name} {flags[name]}".strip()
