"""Between FP32 on the device and the bytes of a segment; `formats` says what these are.

Everything runs in order of the current stream, in pieces of `PIECE_NUMEL` elements, and never
makes the host wait: no value comes to the host and no constant goes to the device.

    per element        passes   temporaries of a piece
    bf16, encode          1     none
      with noise          7     4 bytes: the noise, then in its place the sum
    scaled, encode        7     4 bytes: the quotient; later two masks
      -sqrt               8     4 bytes: the root, then in its place the quotient
        with noise       23     16 bytes: quotient, unit, floor; the unit goes before two of noise
    scaled, decode        2     none
      -sqrt               3     none
    `split_main`          4     1 byte: the bit
    `join_main`           5     3 bytes: the bit, and whether it was rounded up
    `rounds_to`           6     5 bytes: the rounding, three masks

64M elements on an H200 (Nov 2026): scaled, encode 1.5-2.5 ms, with noise 5 ms (bf16: 1.3 ms), the
others 0.5-0.9 ms; of encode it is the host, which launches kernels.

[Note: Noise]
Stochastic rounding needs a number for each element that any rank, device and resumed run can make
again, and that costs few passes. So blocks and the columns within a block are hashed, 1/64 of the
work, and an element's number is the product of two hashes, of which the column's is odd: over the
blocks it takes each value as often as another. A seed makes all of them anew.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .formats import BLOCK_NUMEL, SPLIT, Format

PIECE_NUMEL = 2**23
"""Elements that are encoded at once: bounds temporaries to 42 MB (134 MB with noise), and what one
pass writes is still in an H200's L2 cache when the next reads it. Half as many take twice the time,
for launches."""
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp16-sqrt": torch.float16,
    "fp8e4m3": torch.float8_e4m3fn,
    "fp8e4m3-sqrt": torch.float8_e4m3fn,
    "fp8e5m2": torch.float8_e5m2,
    "fp8e5m2-sqrt": torch.float8_e5m2,
}
_BITS = {1: torch.int8, 2: torch.int16}
_SMALLEST_FP32, _SMALLEST_BF16 = 2.0**-149, 2.0**-133
_SMALLEST_ROOT = 2.0**-74
"""A power of two whose square is a number of FP32; that of 2^-75 rounds to zero."""
_MULTIPLIERS = (0x7FEB352D, -0x7B935975, 0x2C1B3C6D)
"""Of the rounds of the hash: odd, and half of their bits are set."""
_NOISE_BITS = 24
"""As many as an FP32 number from 0 to 1 holds exactly."""
_FP32_EXPONENT = 0x7F800000
_LARGEST_BF16_BITS = 0x7F7F0000
_GATHER_BITS = 0x0102040810204080
"""Times eight bytes of 0 or 1: moves byte i of them to bit i of the highest byte, without carry."""


@dataclass(frozen=True)
class _Piece:
    """Elements ``[start, stop)``, in blocks of ``width``."""

    start: int
    stop: int
    width: int

    @property
    def elements(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def blocks(self) -> slice:
        return slice(self.start // BLOCK_NUMEL, -(-self.stop // BLOCK_NUMEL))


@dataclass(frozen=True)
class _Noise:
    """Random numbers of a segment's elements; see [Note: Noise].

    Attributes:
        blocks: hash of each block, shape (blocks, 1), int32.
        columns: odd hash of each column of a block, shape (BLOCK_NUMEL,), int32.
    """

    blocks: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, seed: int, numel: int, device: torch.device) -> _Noise:
        """Make the noise of a segment of ``numel`` elements."""
        numbers = BLOCK_NUMEL - (-numel // BLOCK_NUMEL)
        hashes = torch.arange(numbers, dtype=torch.int32, device=device)
        keys = struct.unpack("<3i", hashlib.blake2b(b"%d" % seed, digest_size=12).digest())
        for key, multiplier in zip(keys, _MULTIPLIERS, strict=True):
            hashes.bitwise_xor_(key).mul_(multiplier)
            # Shifts of int32 repeat the sign, which would take the highest bit away.
            hashes.bitwise_xor_((hashes >> 16).bitwise_and_(0xFFFF))
        return cls(hashes[BLOCK_NUMEL:].unsqueeze(1), hashes[:BLOCK_NUMEL].bitwise_or_(1))

    def of_piece(self, piece: _Piece) -> torch.Tensor:
        """Return random bits, shape (blocks, width), int32."""
        return self.blocks[piece.blocks] * self.columns[: piece.width]


def encode(
    format: Format, values: torch.Tensor, stored: torch.Tensor, seed: int | None = None
) -> None:
    """Write a segment's bytes.

    Args:
        format: any but ``split``, which needs the model's shard: see `split_main`.
        values: the elements, shape (n,), FP32, contiguous; not negative if ``format.is_sqrt``.
        stored: shape (format.nbytes(n),), uint8, contiguous, on the same device. The gap before the
            second part stays as it is.
        seed: None to round to nearest. Else, for a format of second moments, values are rounded up
            or down at random, so that the mean of what is decoded is the value. The choice depends
            on the seed and the element's index alone.
    """
    codes = _codes(format, stored, values.numel())
    noise = None if seed is None else _Noise.of(seed, values.numel(), values.device)
    if not format.is_scaled and (noise is None or codes.dtype == values.dtype):
        codes.copy_(values)
        return
    assert noise is None or format.is_sqrt or not format.is_scaled, "not for first moments"
    for piece in _pieces(values.numel()):
        blocks = values[piece.elements].view(-1, piece.width)
        code = codes[piece.elements].view(-1, piece.width)
        make_noise = None if noise is None else functools.partial(noise.of_piece, piece)
        if format.is_scaled:
            scales = _scales(format, stored, values.numel())[piece.blocks]
            _encode_blocks(format, blocks, code, scales, make_noise)
        elif make_noise is not None:
            _dither_upper_halves(blocks, code, make_noise())


def decode(format: Format, stored: torch.Tensor, out: torch.Tensor) -> None:
    """Read a segment's bytes.

    Args:
        format: any but ``split``, which needs the model's shard: see `join_main`.
        stored: shape (format.nbytes(n),), uint8, contiguous.
        out: gets the elements; shape (n,), FP32, contiguous, on the same device.
    """
    codes = _codes(format, stored, out.numel())
    if not format.is_scaled:
        out.copy_(codes)
        return
    scales = _scales(format, stored, out.numel())
    for piece in _pieces(out.numel()):
        blocks = out[piece.elements].view(-1, piece.width)
        blocks.copy_(codes[piece.elements].view(-1, piece.width))
        blocks.mul_(scales[piece.blocks].float().unsqueeze(1))
        if format.is_sqrt:
            blocks.square_()


def split_parts(stored: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the two parts of a ``split`` segment.

    Args:
        stored: shape (SPLIT.nbytes(numel),), uint8, contiguous.
        numel: elements of the segment.

    Returns:
        Low halves, shape (numel,), int16; bits, shape (ceil(numel / 8),), uint8.
    """
    assert stored.numel() == SPLIT.nbytes(numel)
    low = stored[: SPLIT.values_nbytes(numel)].view(torch.int16)
    return low, stored[SPLIT.second_start(numel) :]


def split_main(main: torch.Tensor, low: torch.Tensor, ties: torch.Tensor) -> None:
    """Store what main params have beyond their rounding to BF16.

    Args:
        main: a run of main params, shape (n,), FP32, contiguous; it starts at a multiple of 8 in
            its segment.
        low: gets their low halves; shape (n,), int16.
        ties: gets their bits; shape (ceil(n / 8),), uint8. Bits after the last element become 0.
    """
    lower, upper = _halves(main)
    for piece in _pieces(main.numel()):
        where = piece.elements
        low[where].copy_(lower[where])
        _pack(upper[where], ties[piece.start // 8 : -(-piece.stop // 8)])


def join_main(high: torch.Tensor, low: torch.Tensor, ties: torch.Tensor, out: torch.Tensor) -> None:
    """Make main params of the model's and of what `split_main` stored.

    Args:
        high: the model's shard, to which the main params were rounded; shape (n,), of 16 bits. May
            be the `upper_halves` of ``out``.
        low: as stored.
        ties: as stored.
        out: gets the main params; shape (n,), FP32, contiguous.
    """
    lower, upper = _halves(out)
    rounded = high.view(torch.int16)
    for piece in _pieces(out.numel()):
        where = piece.elements
        _true_high(rounded[where], ties[piece.start // 8 : -(-piece.stop // 8)], out=upper[where])
        lower[where].copy_(low[where])


def upper_halves(main: torch.Tensor) -> torch.Tensor:
    """Return a view of the upper halves of FP32 numbers, shape (n,), int16."""
    return _halves(main)[1]


def rounds_to(main: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return whether the model's shard is the rounding of main params: what ``split`` rests on.

    Args:
        main: shape (n,), FP32.
        high: shape (n,), BF16. Its NaNs need not have the same bits.

    Returns:
        Shape (), bool, on the same device.
    """
    result = torch.ones((), dtype=torch.bool, device=main.device)
    for piece in _pieces(main.numel()):
        result &= _is_rounding(main[piece.elements], high[piece.elements])
    return result


def _halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the lower and the upper halves of FP32 numbers, int16."""
    lower, upper = values.view(torch.int16).view(-1, 2).unbind(1)
    return lower, upper


def _pieces(numel: int) -> Iterator[_Piece]:
    """Cut whole blocks into pieces; the last block is a piece of its own if it is shorter."""
    whole = numel // BLOCK_NUMEL * BLOCK_NUMEL
    for start in range(0, whole, PIECE_NUMEL):
        yield _Piece(start, min(start + PIECE_NUMEL, whole), BLOCK_NUMEL)
    if whole < numel:
        yield _Piece(whole, numel, numel - whole)


def _codes(format: Format, stored: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the view of the values of a segment, shape (numel,)."""
    assert format != SPLIT, "the model's shard is needed"
    assert stored.numel() == format.nbytes(numel)
    return stored[: format.values_nbytes(numel)].view(_DTYPES[format.name])


def _scales(format: Format, stored: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the view of the scales of a segment, shape (blocks,), BF16."""
    return stored[format.second_start(numel) :].view(torch.bfloat16)


def _dither_upper_halves(values: torch.Tensor, codes: torch.Tensor, noise: torch.Tensor) -> None:
    """Encode one piece as BF16 by what its lower halves and noise carry; all of the same shape."""
    noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    noise.add_(values.view(torch.int32)).clamp_max_(_LARGEST_BF16_BITS)
    # By this, what is not finite becomes a NaN, whatever was carried: 0 * NaN, or 0 * infinity.
    noise.view(torch.float32).add_(values, alpha=0)
    codes.view(torch.int16).copy_(noise.view(torch.int16)[:, 1::2])


def _encode_blocks(
    format: Format,
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    make_noise: Callable[[], torch.Tensor] | None,
) -> None:
    """Encode one piece: values and codes of shape (blocks, width), scales of shape (blocks,)."""
    quotients = _scale_blocks(format, values, torch.finfo(codes.dtype), scales)
    bits = codes.view(_BITS[format.value_nbytes])
    if make_noise is None:
        codes.copy_(quotients)
    else:
        _dither_roots(quotients, codes, bits, make_noise)
    del quotients
    # Where a code is 0 and the value is not (as booleans, 0 < 1), set the lowest bit. The value,
    # since the quotient of two numbers of FP32 can be 0.
    bits |= bits.bitwise_and(torch.iinfo(bits.dtype).max).lt_(values != 0)


def _scale_blocks(
    format: Format, values: torch.Tensor, limits: torch.finfo, scales: torch.Tensor
) -> torch.Tensor:
    """Choose scales; return what is to be rounded to codes, FP32, at most their largest."""
    scaled = values.sqrt() if format.is_sqrt else values
    largest = torch.linalg.vector_norm(scaled, ord=math.inf, dim=1)
    nearest = (largest / limits.max).to(torch.bfloat16)
    # The product is exact. By bits: the next number up, also of a quotient that became zero.
    nearest.view(torch.int16).add_(nearest.float().mul_(limits.max) < largest)
    smallest = _SMALLEST_ROOT if format.is_sqrt else _SMALLEST_FP32
    smallest_scale = max(smallest / limits.smallest_normal / limits.eps, _SMALLEST_BF16)
    divisor = nearest.float().clamp_min_(smallest_scale)
    scales.copy_(divisor * (largest > 0))
    return torch.div(scaled, divisor.unsqueeze(1), out=scaled if format.is_sqrt else None)


def _dither_roots(
    quotients: torch.Tensor,
    codes: torch.Tensor,
    bits: torch.Tensor,
    make_noise: Callable[[], torch.Tensor],
) -> None:
    """Round roots so that the mean of their squares is right; all of shape (blocks, width).

    In units of the last place, a root r lies between n = floor(r) and n + 1. It becomes n + 1 with
    probability (r^2 - n^2) / (2 n + 1): of a root that is a code, never. To round roots themselves
    without bias would add their variance to the squares, in each step: some 1% for E5M2.

    Args:
        quotients: roots, FP32; overwritten.
        codes: get the result.
        bits: the same memory as integers: of the next code up they are one more.
        make_noise: returns random bits, int32.
    """
    limits = torch.finfo(codes.dtype)
    # By bits: the power of two below, at least that of subnormal codes, times eps.
    unit = quotients.view(torch.int32).bitwise_and(_FP32_EXPONENT)
    unit.clamp_min_(_fp32_bits(limits.smallest_normal))
    unit.sub_(_fp32_bits(1.0) - _fp32_bits(limits.eps))
    unit = unit.view(torch.float32)
    floor = quotients.div_(unit).floor()
    codes.copy_(unit.mul_(floor))
    del unit
    gained = quotients.square_().addcmul_(floor, floor, value=-1)
    # From 0 to 2, times n + 1/2.
    threshold = make_noise().bitwise_and_(2**_NOISE_BITS - 1) * 2.0 ** (1 - _NOISE_BITS)
    threshold.mul_(floor.add_(0.5))
    bits += gained > threshold


def _fp32_bits(number: float) -> int:
    """Return the bits of a positive FP32 number."""
    return int.from_bytes(struct.pack("<f", number), "little")


def _pack(halves: torch.Tensor, bits: torch.Tensor) -> None:
    """Pack the lowest bit of each int16, shape (n,), into bytes, shape (ceil(n / 8),)."""
    odd = torch.zeros(8 * bits.numel(), dtype=torch.uint8, device=bits.device)
    torch.bitwise_and(halves, 1, out=odd[: halves.numel()])
    # Not a shift with ``out=bits``: torch 2.11 then shifts bytes on CUDA, and all are zero.
    odd.view(torch.int64).mul_(_GATHER_BITS)
    bits.copy_(odd.view(-1, 8)[:, 7])


def _true_high(rounded: torch.Tensor, bits: torch.Tensor, out: torch.Tensor) -> None:
    """Undo the rounding of upper halves, int16, shape (n,): each is as odd as its bit says."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    odd = (bits.unsqueeze(1) >> shifts).view(-1)[: rounded.numel()]
    torch.sub(rounded, (odd ^ rounded).bitwise_and_(1), out=out)


def _is_rounding(main: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    ours = main.to(high.dtype)
    is_same = ours.view(torch.int16) == high.view(torch.int16)
    return is_same.logical_or_(ours.isnan().logical_and_(high.isnan())).all()
