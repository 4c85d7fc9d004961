"""In which form the state is stored: how many bytes a segment takes, and what they are.

A segment of n elements begins with its n values. Formats that need more have a second part, which
begins at the next multiple of 64 bytes. All numbers are little-endian.

    format            values                         second part
    fp32              FP32                  4n       -
    bf16              BF16                  2n       -
    fp16              FP16 / scale          2n       one BF16 scale per block        2 ceil(n / 64)
    fp8e4m3           E4M3FN / scale         n       one BF16 scale per block        2 ceil(n / 64)
    fp8e5m2           E5M2 / scale           n       one BF16 scale per block        2 ceil(n / 64)
    ...-sqrt          of sqrt(v)                     as without
    split             low half of FP32      2n       one bit per element               ceil(n / 8)

**Scaled formats.** A block is 64 elements, the last one of a segment may be shorter. Its scale is
its largest magnitude over the largest of the format, rounded *up* to BF16 so that nothing exceeds
the format. It is 0 if all of the block is 0: zero bytes are zeros in every format but ``split``. A
value is ``code * scale``, and of a ``-sqrt`` format, for second moments, the square of that:

* A value that isn't 0 never becomes 0, but the smallest code: an update divided by the root of a
  second moment that vanished would explode. For the same reason a scale that isn't 0 is so large
  that the smallest code decodes to a number of FP32.
* One value that is not finite (or is negative, for a ``-sqrt`` format) makes the scale infinite or
  NaN, and so each of the values of its block infinite or NaN when it is decoded. A finite one may
  become infinite only within 2% of the largest number of FP32.

**Split**, for main params only: the BF16 model param has the upper half already. It is the main
param rounded to nearest, ties to even, so with ``low`` as an unsigned number the true upper half is
``high`` if low < 0x8000, ``high - 1`` if low > 0x8000, and one of them if low == 0x8000. The bit
of an element, counted from the lowest of a byte, is the lowest bit of the true upper half. In a tie
it says whether it was rounded up (odd) or not (even); elsewhere it repeats what ``low`` says, which
spares comparisons. All FP32 numbers come back bit for bit, a NaN as some NaN.

**Rounding.** First moments are rounded to nearest. A moving average that is rounded so stands still
when a step moves it by less than half a unit in the last place. ``exp_avg_sq`` moves by at most
(1 - beta2) of itself a step when gradients shrink: with beta2 0.999 all formats but ``fp32`` would
lose some or all of that, and keep the largest gradients they have seen. So second moments are
rounded up or down at random, such that the mean of what is decoded is the value (`is_dithered`):

* A value that a code has stays, and a block's largest value never exceeds the format. A value that
  isn't 0 becomes at least the smallest code here, too, and is larger in the mean than it was.
* ``bf16`` rounds a value above its largest number down to that, and infinity to NaN.
* What is random has a price: with beta2 0.999 the standard deviation of a second moment by it is 2%
  of it in ``fp16``, 6% in ``bf16``, 53% in ``fp8e4m3`` and 72% in ``fp8e5m2``, so that the mean
  step of the latter two is 8% and 15% longer.
* The choice is a function of the optimizer step, the bucket and the place in it: the same on each
  rank, in each run, and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_NUMEL = 64
"""Elements that share a scale. Slices start at multiples of it (``layout.ALIGN_NUMEL``), so that a
block never spans two of them."""
PART_ALIGN_BYTES = 64
"""Alignment of the second part of a segment."""
MAIN_STORAGES = ("fp32", "split")
"""What ``main_format`` accepts."""
MOMENT_DTYPES = ("fp32", "bf16", "fp16", "fp8e4m3", "fp8e5m2")
"""What ``moment_format`` accepts."""
_FIRST_MOMENTS = {"exp_avg", "momentum_buffer"}
_SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq"}


@dataclass(frozen=True)
class Format:
    """How the elements of a segment are stored.

    Attributes:
        name: of the format.
        value_nbytes: bytes of the value of one element.
        group_numel: elements that share an item of the second part; zero if there is none.
        group_nbytes: bytes of that item.
        is_sqrt: values are the square roots of the elements.
    """

    name: str
    value_nbytes: int
    group_numel: int = 0
    group_nbytes: int = 0
    is_sqrt: bool = False

    @property
    def is_scaled(self) -> bool:
        """Whether blocks have scales."""
        return self.group_numel == BLOCK_NUMEL

    def values_nbytes(self, numel: int) -> int:
        """Return the bytes of the values of ``numel`` elements."""
        return numel * self.value_nbytes

    def second_start(self, numel: int) -> int:
        """Return the offset of the second part in a segment of ``numel`` elements, in bytes."""
        return -(-self.values_nbytes(numel) // PART_ALIGN_BYTES) * PART_ALIGN_BYTES

    def nbytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` stored elements."""
        if not self.group_numel:
            return self.values_nbytes(numel)
        return self.second_start(numel) + -(-numel // self.group_numel) * self.group_nbytes


FP32 = Format("fp32", 4)
BF16 = Format("bf16", 2)
SPLIT = Format("split", 2, group_numel=8, group_nbytes=1)
_SCALED = tuple(
    Format(name + suffix, value_nbytes, BLOCK_NUMEL, 2, is_sqrt=bool(suffix))
    for name, value_nbytes in (("fp16", 2), ("fp8e4m3", 1), ("fp8e5m2", 1))
    for suffix in ("", "-sqrt")
)
FORMATS = {each.name: each for each in (FP32, BF16, *_SCALED, SPLIT)}
"""All formats by name."""


def main_format(main_storage: str) -> Format:
    """Return the format of main params.

    Raises:
        ValueError: there is no such storage.
    """
    if main_storage not in MAIN_STORAGES:
        raise ValueError(
            f"--stream-optimizer-state-main-storage {main_storage}: expected one of "
            f"{', '.join(MAIN_STORAGES)}"
        )
    return FORMATS[main_storage]


def moment_format(key: str, moment_dtype: str) -> Format:
    """Return the format of a tensor of the optimizer's state.

    Args:
        key: its name in the optimizer's state. What is no moment of Adam's or momentum's kind
            stays FP32: a rounded factor of a matrix is none any more.
        moment_dtype: what the user chose for moments.

    Raises:
        ValueError: there is no such dtype.
    """
    if moment_dtype not in MOMENT_DTYPES:
        raise ValueError(
            f"--stream-optimizer-state-moment-dtype {moment_dtype}: expected one of "
            f"{', '.join(MOMENT_DTYPES)}"
        )
    if key in _FIRST_MOMENTS:
        return FORMATS[moment_dtype]
    if key in _SECOND_MOMENTS:
        # BF16 has the exponents of FP32: roots would gain it nothing.
        return FORMATS.get(f"{moment_dtype}-sqrt", FORMATS[moment_dtype])
    return FP32


def is_dithered(key: str) -> bool:
    """Return whether a tensor of the optimizer's state is rounded at random."""
    return key in _SECOND_MOMENTS
