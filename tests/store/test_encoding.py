"""State comes back from its stored bytes: main params exactly, moments within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from megatron.core.optimizer.nvme_state_store import encoding
from megatron.core.optimizer.nvme_state_store.encoding import (
    PIECE_NUMEL,
    decode,
    encode,
    join_main,
    rounds_to,
    split_main,
    split_parts,
)
from megatron.core.optimizer.nvme_state_store.formats import (
    BF16,
    BLOCK_NUMEL,
    FORMATS,
    FP32,
    SPLIT,
    Format,
)

SCALED = [each for each in FORMATS.values() if each.is_scaled]
LINEAR = [each for each in SCALED if not each.is_sqrt]
ROOTS = [each for each in SCALED if each.is_sqrt]
NUMELS = [1, 7, 8, 9, 63, 64, 65, 128, 1000, 4096]
CPU = torch.device("cpu")
SMALLEST = 2.0**-149
SMALLEST_BF16 = 2.0**-133

HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8e4m3": 2.0**-4, "fp8e5m2": 2.0**-3}
"""Of a normal number, relative to it, at most."""
SMALLEST_CODE = {"fp16": 2.0**-24, "fp8e4m3": 2.0**-9, "fp8e5m2": 2.0**-16}
LARGEST_CODE = {"fp16": 65504.0, "fp8e4m3": 448.0, "fp8e5m2": 57344.0}
SCALE_UP = 1 + 2.0**-7
"""By what a scale may be larger than it must: BF16, rounded up."""

SEED = (77 << 64) + 5
"""As `Casts` makes them: a step, a bucket, a segment."""
SECOND_MOMENTS = [BF16, *ROOTS]
"""What is rounded at random, if there is a seed."""


def ways(formats: Sequence[Format]) -> pytest.MarkDecorator:
    """Let a test see formats, to nearest, and at random those for which that is made."""
    nearest = [pytest.param(each, None, id=each.name) for each in formats]
    random = [
        pytest.param(each, SEED, id=f"{each.name}-random")
        for each in formats
        if each in SECOND_MOMENTS
    ]
    return pytest.mark.parametrize(("each", "seed"), nearest + random)


scaled = ways(SCALED)
linear = pytest.mark.parametrize("each", LINEAR, ids=lambda each: each.name)
roots = ways(ROOTS)
second_moments = pytest.mark.parametrize("each", SECOND_MOMENTS, ids=lambda each: each.name)
AS_VALUES = [each for each in FORMATS.values() if each != SPLIT]
stored_as_values = ways(AS_VALUES)
to_nearest = pytest.mark.parametrize("each", AS_VALUES, ids=lambda each: each.name)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def through(each: Format, values: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    """Return what comes back; the bytes lie in a larger tensor, beside others that stay."""
    nbytes = each.nbytes(values.numel())
    file = torch.full((nbytes + 128,), 0xA5, dtype=torch.uint8)
    stored = file[64 : 64 + nbytes]
    before = values.clone()
    encode(each, values, stored, seed)
    assert torch.equal(bits(values), bits(before)), "what is stored is only read"
    out = torch.full((values.numel() + 8,), 7.0)
    decode(each, stored, out[4:-4])
    assert (file[:64] == 0xA5).all() and (file[64 + nbytes :] == 0xA5).all()
    assert (out[:4] == 7).all() and (out[-4:] == 7).all()
    return out[4:-4]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def spread(numel: int, low: float, high: float, seed: int = 1) -> torch.Tensor:
    """Return numbers of both signs with magnitudes evenly from 2^low to 2^high."""
    random = generator(seed)
    exponents = torch.rand(numel, generator=random, dtype=torch.float64) * (high - low) + low
    signs = torch.randint(0, 2, (numel,), generator=random) * 2 - 1
    return (signs * torch.exp2(exponents)).float()


def largest_of_block(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each element's block."""
    padded = torch.zeros(-(-values.numel() // BLOCK_NUMEL) * BLOCK_NUMEL)
    padded[: values.numel()] = values.abs()
    largest = padded.view(-1, BLOCK_NUMEL).amax(dim=1)
    return largest.repeat_interleave(BLOCK_NUMEL)[: values.numel()]


def bound(each: Format, values: torch.Tensor, seed: int | None) -> torch.Tensor:
    """Return how far a value may be off, as FP64: of roots, how far its root may."""
    name = each.name.removesuffix("-sqrt")
    exact = values.double().abs()
    largest = largest_of_block(values).double()
    smallest = SMALLEST
    if each.is_sqrt:
        exact, largest, smallest = exact.sqrt(), largest.sqrt(), 2.0**-74
    scale = SCALE_UP * largest / LARGEST_CODE[name] + SMALLEST_BF16
    step = scale * SMALLEST_CODE[name]
    # A value below the smallest code becomes it, so the whole of it, not half, is the error.
    units = 1 if seed is None else 2
    return exact * (units * HALF_ULP[name] * 1.001) + step.clamp_min(smallest)


# Values


@pytest.mark.parametrize("numel", NUMELS)
def test_fp32_is_stored_bit_for_bit(numel: int) -> None:
    values = random_bits(numel).view(torch.float32)
    assert torch.equal(bits(through(FP32, values)), bits(values))


@pytest.mark.parametrize("numel", NUMELS)
def test_bf16_is_the_nearest(numel: int) -> None:
    values = spread(numel, -126, 127)
    assert torch.equal(through(BF16, values), values.bfloat16().float())


@scaled
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize(
    ("low", "high"),
    [(-2, 2), (-30, 0), (-60, -30), (-100, -80), (-149, -120), (90, 126), (-149, 126)],
)
def test_errors_are_bounded(
    each: Format, seed: int | None, numel: int, low: float, high: float
) -> None:
    """Half a unit of the last place, or the smallest code of the block, at every magnitude."""
    values = spread(numel, low, high)
    if each.is_sqrt:
        values.abs_()
    decoded = through(each, values, seed).double()
    error = decoded - values
    if each.is_sqrt:
        # Squares of numbers below 2^-74 are rounded to multiples of 2^-149: seen as values.
        error = torch.where(values > 2.0**-140, decoded.sqrt() - values.double().sqrt(), 0)
    assert (error.abs() <= bound(each, values, seed)).all()
    assert (decoded.sign() == values.sign()).all()


@scaled
def test_a_small_value_beside_a_huge_one_is_not_lost(each: Format, seed: int | None) -> None:
    """A block that spans 2^30 keeps its signs and never has a zero that was none."""
    values = torch.full((BLOCK_NUMEL,), 2.0**-20)
    values[1::2] *= -1 if not each.is_sqrt else 1
    values[5] = 2.0**10
    decoded = through(each, values, seed)
    assert (decoded.sign() == values.sign()).all()
    assert (decoded.abs() >= values.abs() / 2).all()


@scaled
def test_nothing_but_zero_becomes_zero(each: Format, seed: int | None) -> None:
    """At the ends of FP32 and at all distances between a value and the largest of its block."""
    powers = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    blocks = torch.zeros(powers.numel() * powers.numel(), BLOCK_NUMEL)
    blocks[:, 3] = powers.repeat_interleave(powers.numel())
    blocks[:, 60] = powers.repeat(powers.numel())
    if not each.is_sqrt:
        blocks[::2] *= -1
    decoded = through(each, blocks.view(-1), seed)
    assert torch.equal(decoded.sign(), blocks.view(-1).sign())


@roots
def test_the_smallest_root_survives_any_rounding_of_its_block(
    each: Format, seed: int | None
) -> None:
    """Its code is as much as a third too small at worst, and the square may not be half."""
    blocks = torch.full((40 * 400, BLOCK_NUMEL), SMALLEST)
    blocks[:, 0] = torch.exp2(torch.arange(-140, -100, 1 / 400, dtype=torch.float64)).float()
    assert (through(each, blocks.view(-1), seed) > 0).all()


@scaled
def test_zeros_are_zero_bytes(each: Format, seed: int | None) -> None:
    """So a new file holds moments of zero."""
    for numel in NUMELS:
        stored = torch.zeros(each.nbytes(numel), dtype=torch.uint8)
        encode(each, torch.zeros(numel), stored, seed)
        assert (stored == 0).all()
        out = torch.full((numel,), 3.0)
        decode(each, stored, out)
        assert torch.equal(bits(out), torch.zeros(numel, dtype=torch.int32))


@scaled
def test_a_block_of_zeros_beside_others_is_zero(each: Format, seed: int | None) -> None:
    """And single zeros, too."""
    values = spread(3 * BLOCK_NUMEL + 5, -3, 3).abs()
    values[BLOCK_NUMEL : 2 * BLOCK_NUMEL] = 0
    values[7] = 0
    assert torch.equal(through(each, values, seed) == 0, values == 0)


@scaled
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 63, 70, 129])
def test_what_is_not_finite_stays_visible(
    each: Format, seed: int | None, bad: float, place: int
) -> None:
    """All of its block, zeros too, and no other block."""
    values = spread(2 * BLOCK_NUMEL + 3, -8, 8).abs()
    values[::5] = 0
    values[place] = bad
    decoded = through(each, values, seed)
    hit = torch.arange(values.numel()) // BLOCK_NUMEL == place // BLOCK_NUMEL
    assert torch.equal(~decoded.isfinite(), hit)


@linear
def test_an_infinite_value_keeps_the_signs_of_others(each: Format) -> None:
    """They become infinite."""
    decoded = through(each, torch.tensor([float("inf"), -1.0, 2.0]))
    assert decoded[1:].tolist() == [float("-inf"), float("inf")]


@roots
def test_a_negative_second_moment_stays_visible(each: Format, seed: int | None) -> None:
    """It has no root: something is wrong, and must not look right."""
    assert through(each, torch.tensor([1.0, -1e-30]), seed).isnan().all()


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000])
@scaled
def test_a_nan_of_any_bits_stays_visible(each: Format, seed: int | None, pattern: int) -> None:
    """CUDA's own NaN is 0x7fffffff, which rounding by adding would turn into -0."""
    values = torch.ones(70)
    bits(values)[3] = pattern
    assert not through(each, values, seed)[:BLOCK_NUMEL].isfinite().any()


@scaled
def test_a_scale_never_makes_its_largest_value_overflow(each: Format, seed: int | None) -> None:
    """Values next to every product of a scale and the format's largest code, and random ones."""
    name = each.name.removesuffix("-sqrt")
    significands = torch.arange(128, 256, dtype=torch.float64)
    exponents = torch.exp2(torch.arange(-60, 50, dtype=torch.float64))
    limits = (significands[:, None] * exponents * LARGEST_CODE[name]).view(-1)
    if each.is_sqrt:
        limits = limits.square()
        limits = limits[(limits > 2.0**-120) & (limits < 2.0**127)]
    limits = limits.float()
    around = [limits]
    for towards in (0.0, float("inf")):
        near = limits
        for _ in range(2):
            near = torch.nextafter(near, torch.tensor(towards))
            around.append(near)
    around.append(spread(limits.numel(), -60, 120).abs())
    blocks = torch.cat(around).unsqueeze(1).repeat(1, 2)
    values = torch.zeros(blocks.shape[0], BLOCK_NUMEL)
    values[:, :2] = blocks
    if not each.is_sqrt:
        values[:, 1] *= -1
    decoded = through(each, values.view(-1), seed).view(-1, BLOCK_NUMEL)[:, :2]
    assert decoded.isfinite().all()
    error = (decoded.double() / values[:, :2].double() - 1).abs()
    # The largest value of a block is a normal number of the format.
    relative = HALF_ULP[name] * (1 if seed is None else 2)
    assert error.max() <= (2.001 * relative + relative**2 if each.is_sqrt else 1.001 * relative)


@scaled
def test_the_largest_float_is_finite_or_infinite_but_not_wrong(
    each: Format, seed: int | None
) -> None:
    """Scales are rounded up by at most 2^-7, so what is farther from the end stays finite."""
    least = 1 / 1.3 if seed is None else 0.5
    largest = torch.finfo(torch.float32).max
    assert through(each, torch.tensor([largest * (1 - 2.0**-6)]), seed).isfinite().all()
    assert (through(each, torch.tensor([largest]), seed) > largest * least).all()


@stored_as_values
def test_pieces_do_not_show(
    each: Format, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of one piece."""
    values = spread(1000, -20, 5).abs()
    whole = torch.zeros(each.nbytes(1000), dtype=torch.uint8)
    encode(each, values, whole, seed)
    monkeypatch.setattr(encoding, "PIECE_NUMEL", 2 * BLOCK_NUMEL)
    pieces = torch.zeros(each.nbytes(1000), dtype=torch.uint8)
    encode(each, values, pieces, seed)
    assert torch.equal(whole, pieces)
    out = torch.empty(1000)
    decode(each, whole, out)
    monkeypatch.undo()
    assert torch.equal(bits(through(each, values, seed)), bits(out))


@to_nearest
def test_a_slice_is_encoded_as_in_its_segment(each: Format) -> None:
    """Slices start at multiples of a block: what lies before does not change their values."""
    values = spread(5 * BLOCK_NUMEL + 9, -20, 5).abs()
    alone = through(each, values[2 * BLOCK_NUMEL :].clone())
    assert torch.equal(through(each, values)[2 * BLOCK_NUMEL :], alone)


@stored_as_values
def test_state_that_is_not_updated_does_not_drift(each: Format, seed: int | None) -> None:
    """A scale settles at once: what was read and written twice stays as it is.

    Noise does not move it either: a value that a code has is that code.
    """
    values = spread(100_000, -10, 5).abs()
    twice = through(each, through(each, values))
    assert torch.equal(bits(through(each, twice, seed)), bits(twice))


def test_a_long_segment_is_more_than_one_piece() -> None:
    """Nothing is left out at the seams of real pieces."""
    each = FORMATS["fp8e4m3"]
    values = torch.ones(PIECE_NUMEL + 65)
    error = through(each, values) - 1
    assert error.abs().max() < 2.0**-6


# Noise


def noise(seed: int, numel: int, device: torch.device = CPU) -> torch.Tensor:
    """Return the random bits of a segment's elements, shape (numel,), int32."""
    found = encoding._Noise.of(seed, numel, device)
    return (found.blocks * found.columns).view(-1)[:numel]


def fractions(seed: int, numel: int) -> list[torch.Tensor]:
    """Return its noise as numbers from 0 to 1, FP64: of the upper bits, and of the lower ones."""
    found = noise(seed, numel)
    lower = 2**encoding._NOISE_BITS
    return [found.double() / 2**32 + 0.5, (found & (lower - 1)).double() / lower]


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the correlation in units of what independent numbers have by chance."""
    return float(((first - 0.5) * (second - 0.5)).sum() * 12 / first.numel() ** 0.5)


def is_even(counts: torch.Tensor) -> bool:
    """Whether bins are filled as by chance: neither less evenly nor more."""
    expected = counts.sum() / counts.numel()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return bool((chi_square / counts.numel() - 1).abs() < 5 * (2 / counts.numel()) ** 0.5)


def test_noise_is_what_it_was() -> None:
    """On every machine: a change of the hash changes what a resumed run does."""
    assert noise(SEED, 1000)[::300].tolist() == [
        *(-290778006, 1706215625, -977322871, 939809402),
    ]


@pytest.mark.parametrize("part", [0, 1], ids=["upper", "lower"])
@pytest.mark.parametrize("seed", [0, SEED])
def test_noise_is_uniform_and_neighbours_are_independent(seed: int, part: int) -> None:
    """Also elements of neighbouring blocks, and all pairs of columns."""
    found = fractions(seed, 20_000 * BLOCK_NUMEL)[part]
    assert is_even(torch.histc(found, 256, 0, 1))
    for distance in (1, 2, 3, 7, 63, 64, 65, 128):
        assert abs(correlation(found[:-distance], found[distance:])) < 4.5
    pairs = (found[:-1] * 16).long() * 16 + (found[1:] * 16).long()
    assert is_even(torch.bincount(pairs, minlength=256).double())
    columns = found.view(-1, BLOCK_NUMEL) - 0.5
    between = (columns.T @ columns * 12 / columns.shape[0] ** 0.5).fill_diagonal_(0)
    assert between.abs().max() < 5.5


@pytest.mark.parametrize("distance", [1, 1 << 16, 1 << 64], ids=["segment", "bucket", "step"])
def test_noise_of_consecutive_seeds_is_independent(distance: int) -> None:
    """At the same element and at its neighbours."""
    for upper, lower in zip(
        fractions(SEED, 200_000), fractions(SEED + distance, 200_000), strict=True
    ):
        for shift in (0, 1, BLOCK_NUMEL):
            numel = upper.numel() - shift
            assert abs(correlation(upper[:numel], lower[shift:])) < 4.5


def test_noise_of_one_element_is_independent_over_steps() -> None:
    """Which is what keeps a moving average in place."""
    found = torch.stack([fractions(SEED + (step << 64), 640)[1] for step in range(2000)])
    for distance in (1, 2):
        pairs = zip(found[distance:].T, found[:-distance].T, strict=True)
        assert max(abs(correlation(*pair)) for pair in pairs) < 5
    assert ((found.mean(dim=0) - 0.5).abs() * (12 * 2000) ** 0.5).max() < 5


# Rounding at random


def decoded_by_seed(each: Format, values: torch.Tensor, seeds: range) -> torch.Tensor:
    """Return what comes back with each of the seeds, shape (seeds, n)."""
    stored = torch.zeros(each.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    out = torch.empty(len(seeds), values.numel(), device=values.device)
    for seed, row in zip(seeds, out, strict=True):
        encode(each, values, stored, seed)
        decode(each, stored, row)
    return out


def assert_unbiased(each: Format, device: torch.device) -> None:
    """Check that means are within chance, of each element as well as of all."""
    values = spread(1024, -8, 0).abs()
    values[::BLOCK_NUMEL] = 1.0
    decoded = decoded_by_seed(each, values.to(device), range(2000)).cpu().double()
    error = decoded - values
    # An element that is close to a code may not have been rounded to the other one in any try.
    one_try = 4 * HALF_ULP[each.name.removesuffix("-sqrt")] * values / len(error)
    chance = torch.maximum(error.std(dim=0) / len(error) ** 0.5, one_try)
    deviations = error.mean(dim=0) / chance
    assert deviations.square().mean() < 1.25
    assert abs(float((error / values).mean())) < 5 * float((chance / values).norm() / len(values))


@second_moments
def test_what_is_rounded_at_random_is_unbiased(each: Format) -> None:
    """Squares of roots, too; rounding to nearest would not pass."""
    assert_unbiased(each, CPU)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        original = encoding._Noise.of_piece
        patch.setattr(encoding._Noise, "of_piece", lambda *args: original(*args).fill_(2**23))
        assert_unbiased(each, CPU)


@second_moments
def test_a_value_becomes_one_of_its_two_neighbours(each: Format) -> None:
    """Of which it is itself one, if it has a code."""
    values = spread(4096, -16, 0).abs()
    decoded = decoded_by_seed(each, values, range(40))
    low, high = decoded.amin(dim=0), decoded.amax(dim=0)
    assert ((decoded == low) | (decoded == high)).all()
    assert (low < high).float().mean() > 0.5
    between = low + (high - low) / 2
    name = each.name.removesuffix("-sqrt")
    unit = 2.01 * HALF_ULP[name] * (2 if each.is_sqrt else 1)
    assert (high - low <= unit * high + 2.0**-30).all()
    assert (((values - between).abs() <= (high - low) / 2 * 1.001) | (low == high)).all()


@second_moments
def test_the_bytes_are_a_function_of_the_seed(each: Format) -> None:
    values = spread(1000, -8, 0).abs()
    again, other = (torch.zeros(each.nbytes(1000), dtype=torch.uint8) for _ in range(2))
    stored = torch.zeros_like(again)
    encode(each, values, stored, SEED)
    encode(each, values, again, SEED)
    encode(each, values, other, SEED + 1)
    assert torch.equal(stored, again)
    assert (stored != other).float().mean() > 0.1


@linear
def test_first_moments_take_no_seed(each: Format) -> None:
    with pytest.raises(AssertionError, match="first moments"):
        encode(each, torch.ones(1), torch.zeros(each.nbytes(1), dtype=torch.uint8), SEED)


def test_fp32_takes_a_seed_and_needs_none() -> None:
    values = random_bits(1000).view(torch.float32)
    assert torch.equal(bits(through(FP32, values, SEED)), bits(values))


NOT_FINITE = [0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000, -0x10000, 0x7F800000]


@pytest.mark.parametrize("pattern", NOT_FINITE)
def test_a_bf16_that_is_not_finite_stays_so_whatever_the_noise(pattern: int) -> None:
    """Noise carries over from a NaN of these bits to 0, and from infinity to a NaN at most."""
    values = torch.empty(1000)
    bits(values).fill_(pattern)
    assert not through(BF16, values, SEED).isfinite().any()


def test_the_largest_bf16_stays_and_zero_does() -> None:
    """Values above it become it; a value below the smallest one becomes that now and then."""
    largest = torch.finfo(torch.bfloat16).max
    for exact in (largest, 0.0, SMALLEST_BF16, 2.0**-126):
        assert (through(BF16, torch.full((1000,), exact), SEED) == exact).all()
    above = through(BF16, torch.full((1000,), torch.finfo(torch.float32).max), SEED)
    assert (above == largest).all()
    subnormal = through(BF16, torch.full((100_000,), SMALLEST_BF16 / 4), SEED)
    assert float((subnormal / SMALLEST_BF16).mean()) == pytest.approx(0.25, rel=0.05)


# Moving averages


def moving_average(
    each: Format, beta2: float, steps: int, *, is_random: bool, drop: float = 100.0
) -> torch.Tensor:
    """Return ``exp_avg_sq`` over what it is in FP32 after gradients shrank; 32 blocks.

    Args:
        each: its format between the steps.
        beta2: its decay.
        steps: as many.
        is_random: round at random.
        drop: by what the squares of gradients are smaller than before; infinite: there are none.
    """
    random = generator()
    before = torch.rand(2048, generator=random) * 2 + 0.1
    exact, average = before.clone(), before.clone()
    stored = torch.zeros(each.nbytes(2048), dtype=torch.uint8)
    for step in range(steps):
        squares = before / drop * torch.randn(2048, generator=random).square_()
        exact.mul_(beta2).add_(squares, alpha=1 - beta2)
        average.mul_(beta2).add_(squares, alpha=1 - beta2)
        encode(each, average, stored, step << 64 if is_random else None)
        decode(each, stored, average)
    return average / exact


SPREADS = {"bf16": 0.1, "fp16-sqrt": 0.05, "fp8e4m3-sqrt": 0.7, "fp8e5m2-sqrt": 0.9}
"""Standard deviation of a second moment by noise, relative to it, at most: measured 0.06, 0.02,
0.53 and 0.72. FP8 so takes steps that are 8% (E4M3) and 15% (E5M2) larger in the mean."""


@second_moments
def test_a_second_moment_follows_gradients_that_shrink(each: Format) -> None:
    """Their squares drop 100-fold; with beta2 0.999 a step takes 0.1% away at most."""
    ratio = moving_average(each, 0.999, 6000, is_random=True)
    assert 0.9 < float(ratio.mean()) < 1.1
    assert float(ratio.std()) < SPREADS[each.name]


@second_moments
def test_a_second_moment_to_nearest_would_stand_still(each: Format) -> None:
    """The same bound fails it: the test above can fail."""
    ratio = moving_average(each, 0.999, 3000, is_random=False)
    assert not 0.9 < float(ratio.mean()) < 1.1


@second_moments
def test_a_scale_follows_a_block_that_decays(each: Format) -> None:
    """That it is rounded up to BF16 holds nothing back: codes are of what it is then."""
    ratio = moving_average(each, 0.999, 1000, is_random=True, drop=float("inf"))
    assert 0.9 < float(ratio.mean()) < 1.1
    nearest = moving_average(each, 0.999, 1000, is_random=False, drop=float("inf"))
    assert not 0.9 < float(nearest.mean()) < 1.1


# Main params

HIGHS = [
    *(0x0000, 0x0001, 0x0002, 0x007E, 0x007F, 0x0080, 0x0081),  # zero, subnormal, smallest normal
    *(0x3F7F, 0x3F80, 0x3F81, 0x4000, 0x42FF, 0x1234, 0x5557),
    *(0x7F7E, 0x7F7F),  # the largest finite: its upper half of low halves rounds to infinity
    *(0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF),  # infinity, and NaNs
]
LOWS = [0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF]


def random_bits(numel: int, seed: int = 1) -> torch.Tensor:
    """Return int32 of which every bit is random."""
    return torch.randint(-(2**31), 2**31, (numel,), generator=generator(seed)).to(torch.int32)


def numbers(highs: torch.Tensor, lows: torch.Tensor) -> torch.Tensor:
    """Return FP32 numbers of all pairs of halves."""
    pairs = (highs[:, None].to(torch.int64) << 16) + lows
    return pairs.view(-1).to(torch.int32).view(torch.float32)


def split_and_join(
    main: torch.Tensor, *, keep_ties: bool = True, offset: int = 0, high: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what comes back; the run starts at ``offset`` of a segment with more behind it."""
    numel = main.numel()
    stored = torch.full((SPLIT.nbytes(offset + numel + 24),), 0xA5, dtype=torch.uint8)
    low, ties = split_parts(stored, offset + numel + 24)
    where = slice(offset, offset + numel)
    tie_bytes = slice(offset // 8, offset // 8 + -(-numel // 8))
    split_main(main, low[where], ties[tie_bytes])
    others = torch.cat([ties[: tie_bytes.start], ties[tie_bytes.stop :]])
    assert (others == 0xA5).all() and (low[:offset] == low[-1]).all(), "neighbours stay"
    if not keep_ties:
        ties.zero_()
    out = torch.full((numel + 2,), 7.0)
    rounded = main.bfloat16() if high is None else high
    join_main(rounded, low[where], ties[tie_bytes], out[1:-1])
    assert out[0] == 7 and out[-1] == 7
    return out[1:-1]


def is_exact(out: torch.Tensor, main: torch.Tensor) -> bool:
    """All bits are the same, but those of NaNs, which are NaNs."""
    same = (bits(out) == bits(main)) | (out.isnan() & main.isnan())
    return bool(same.all())


def test_every_low_half_is_exact() -> None:
    """With even and odd, zero, subnormal, largest and infinite upper halves of both signs."""
    highs = torch.tensor(HIGHS)
    main = numbers(torch.cat([highs, highs + 0x8000]), torch.arange(2**16))
    assert is_exact(split_and_join(main), main)


def test_every_high_half_is_exact() -> None:
    """With low halves around zero, the tie and the end: all ties there are."""
    main = numbers(torch.arange(2**16), torch.tensor(LOWS))
    assert is_exact(split_and_join(main), main)


def test_ties_need_their_bits() -> None:
    """The planted fault: without them some ties are wrong, and nothing but ties that rounded up."""
    main = numbers(torch.arange(2**16), torch.tensor([0x7FFF, 0x8000, 0x8001]))
    out = split_and_join(main, keep_ties=False)
    assert not is_exact(out, main)
    is_tie = (bits(main) & 0xFFFF) == 0x8000
    is_odd = (bits(main) >> 16) & 1 == 1
    wrong = (bits(out) != bits(main)) & ~main.isnan()
    assert (wrong & is_tie).any()
    assert torch.equal(wrong & is_tie, is_tie & is_odd & ~main.isnan())


def test_the_wrong_model_shard_is_not_exact() -> None:
    """The planted fault of a caller: weights of another step."""
    main = spread(1000, -10, 10)
    other = main.bfloat16()
    other.view(torch.int16)[500] += 2
    out = split_and_join(main, high=other)
    assert (bits(out) != bits(main)).nonzero().tolist() == [[500]]


@pytest.mark.parametrize("name", ["inf", "-inf", "nan", "-0.0", "0.0", "1e-45", "-1e-45"])
def test_special_numbers_are_exact(name: str) -> None:
    main = torch.tensor([float(name)])
    assert is_exact(split_and_join(main), main)


@pytest.mark.parametrize("numel", [1, 2, 7, 8, 9, 15, 63, 64, 65, 1001, 4096])
@pytest.mark.parametrize("offset", [0, 8, 64, 4096])
def test_runs_of_any_length_are_exact(numel: int, offset: int) -> None:
    """And leave what lies beside them alone."""
    main = random_bits(numel, seed=numel + offset).view(torch.float32)
    assert is_exact(split_and_join(main, offset=offset), main)


@pytest.mark.parametrize("start", [1, 2, 3])
def test_main_params_and_shards_may_lie_anywhere(start: int) -> None:
    """A shard of the model begins where the data-parallel split puts it."""
    main = random_bits(1000).view(torch.float32)[start:]
    model = torch.zeros(1000, dtype=torch.bfloat16)[start:]
    model.copy_(main)
    assert is_exact(split_and_join(main, high=model), main)


def test_random_bits_are_exact_over_pieces() -> None:
    main = random_bits(PIECE_NUMEL + 77).view(torch.float32)
    assert is_exact(split_and_join(main), main)


@pytest.mark.parametrize("other_nan", [0x7FC0, 0x7FFF, 0x7F81, 0xFFC0])
def test_the_nan_of_a_device_does_not_matter(other_nan: int) -> None:
    """CPU and CUDA round NaNs to different bits."""
    main = numbers(torch.tensor([0x7F80, 0x7FC0, 0xFFFF]), torch.tensor([1, 0x8000, 0xFFFF]))
    high = torch.tensor(other_nan).to(torch.int16).view(torch.bfloat16).repeat(main.numel())
    assert split_and_join(main, high=high).isnan().all()


def test_bits_are_stored_from_the_lowest_of_a_byte() -> None:
    """As the documentation of the format has it; and those behind the end are 0."""
    main = torch.zeros(11)
    bits(main)[torch.tensor([0, 3, 9])] = 0x00018000
    stored = torch.full((SPLIT.nbytes(11),), 0xFF, dtype=torch.uint8)
    low, ties = split_parts(stored, 11)
    split_main(main, low, ties)
    assert ties.tolist() == [0b1001, 0b10]
    assert low.tolist() == [-(2**15), 0, 0, -(2**15), *(0,) * 5, -(2**15), 0]
    assert stored[:2].tolist() == [0x00, 0x80]


def test_rounds_to_says_whether_split_may_be_used() -> None:
    """One wrong bit anywhere shows; bits of NaNs are no difference, but -0 is."""
    main = random_bits(1000).view(torch.float32)
    high = main.bfloat16()
    assert rounds_to(main, high).shape == ()
    assert bool(rounds_to(main, high))
    for index in (0, 500, 999):
        other = high.clone()
        other.view(torch.int16)[index] ^= 1
        assert bool(rounds_to(main, other)) == bool(main[index].isnan())
    nan = torch.tensor([float("nan")])
    assert bool(rounds_to(nan, -nan.bfloat16()))
    assert not bool(rounds_to(torch.zeros(1), nan.bfloat16()))
    assert not bool(rounds_to(torch.zeros(1), -torch.zeros(1).bfloat16()))


def adam(steps: int, *, is_split: bool, keep_ties: bool = True) -> torch.Tensor:
    """Return main params after AdamW with a BF16 model; some are ties before each step."""
    random = generator()
    target = torch.randn(515, generator=random)
    main = torch.randn(515, generator=random)
    optimizer = torch.optim.AdamW([main], lr=1e-2)
    stored = torch.zeros(SPLIT.nbytes(515), dtype=torch.uint8)
    low, ties = split_parts(stored, 515)
    for _ in range(steps):
        # Every third number becomes the tie above it, of even and odd upper halves.
        bits(main)[::3] = (bits(main)[::3] & -0x10000) | 0x8000
        model = main.bfloat16()
        if is_split:
            split_main(main, low, ties)
            if not keep_ties:
                ties.zero_()
            main.fill_(float("nan"))
            join_main(model, low, ties, main)
        main.grad = model.float() - target + 0.1 * torch.randn(515, generator=random)
        optimizer.step()
    return main


def test_a_thousand_steps_of_adam_are_bit_identical_to_fp32() -> None:
    """The arithmetic contract; without the bits of ties the same run differs."""
    expected = adam(1000, is_split=False)
    assert torch.equal(bits(adam(1000, is_split=True)), bits(expected))
    assert not torch.equal(
        bits(adam(50, is_split=True, keep_ties=False)), bits(adam(50, is_split=False))
    )


# The device, whose kernels are others: torch 2.11's shift into bytes is wrong on CUDA alone


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of CUDA; it is also left out where all tests of this file are asked for."""
    has_none = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    marked: Callable[..., None] = pytest.mark.gpu(has_none(test))
    return marked


@on_device
@stored_as_values
def test_the_bytes_are_those_of_the_cpu(each: Format, seed: int | None) -> None:
    """And what is decoded. Of roots few differ: a CPU's may do so in the last bit (MKL)."""
    values = spread(100_037, -40, 40).abs()
    values[64:128] = 0
    here = torch.zeros(each.nbytes(values.numel()), dtype=torch.uint8)
    there = here.cuda()
    encode(each, values, here, seed)
    encode(each, values.cuda(), there, seed)
    if each.is_sqrt:
        assert (there.cpu() != here).float().mean() < 1e-3
        there.copy_(here)
    assert torch.equal(there.cpu(), here)
    out = torch.empty_like(values)
    out_there = out.cuda()
    decode(each, here, out)
    decode(each, there, out_there)
    assert torch.equal(bits(out_there.cpu()), bits(out))


@on_device
@second_moments
def test_what_is_rounded_at_random_is_unbiased_there(each: Format) -> None:
    """A kernel of CUDA's takes another way than a CPU's from noise to codes."""
    assert_unbiased(each, torch.device("cuda"))


@on_device
def test_a_bf16_that_is_not_finite_stays_so_there() -> None:
    values = torch.tensor(NOT_FINITE, dtype=torch.int32, device="cuda").view(torch.float32)
    assert not decoded_by_seed(BF16, values, range(200)).isfinite().any()


@on_device
def test_noise_is_the_same_there() -> None:
    numel = 100_037
    here = noise(SEED, numel)
    assert torch.equal(noise(SEED, numel, torch.device("cuda")).cpu(), here)


@on_device
@scaled
def test_what_is_not_finite_stays_visible_there(each: Format, seed: int | None) -> None:
    """A NaN of CUDA's own bits, too."""
    values = torch.ones(4 * BLOCK_NUMEL, device="cuda")
    values[70] = float("inf")
    bits(values)[200] = 0x7FFFFFFF
    stored = torch.zeros(each.nbytes(values.numel()), dtype=torch.uint8, device="cuda")
    encode(each, values, stored, seed)
    out = torch.empty_like(values)
    decode(each, stored, out)
    is_finite = out.isfinite().view(-1, BLOCK_NUMEL)
    assert is_finite.all(dim=1).tolist() == [True, False, True, False]
    assert is_finite.any(dim=1).tolist() == [True, False, True, False]


@on_device
def test_all_numbers_of_fp32_are_exact_in_split_storage() -> None:
    """All 2^32, rounded by the device."""
    numel = 2**26
    stored = torch.zeros(SPLIT.nbytes(numel), dtype=torch.uint8, device="cuda")
    low, ties = split_parts(stored, numel)
    out = torch.empty(numel, device="cuda")
    for start in range(-(2**31), 2**31, numel):
        main = torch.arange(start, start + numel, dtype=torch.int32, device="cuda")
        main = main.view(torch.float32)
        high = main.bfloat16()
        split_main(main, low, ties)
        join_main(high, low, ties, out)
        assert is_exact(out, main), start
        assert bool(rounds_to(main, high)), start


@on_device
@ways(list(FORMATS.values()))
def test_the_host_never_waits_and_temporaries_are_bounded(each: Format, seed: int | None) -> None:
    """Torch itself reports synchronising calls, copies between host and device among them."""
    limit = 5.5 if seed is None or not each.is_sqrt else 16.5
    numel = 3 * PIECE_NUMEL + 77
    values = torch.rand(numel, device="cuda")
    high, out = values.bfloat16(), torch.empty_like(values)
    stored = torch.zeros(each.nbytes(numel), dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if each == SPLIT:
            low, ties = split_parts(stored, numel)
            split_main(values, low, ties)
            join_main(high, low, ties, out)
            rounds_to(values, high)
        else:
            encode(each, values, stored, seed)
            decode(each, stored, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before <= limit * PIECE_NUMEL
