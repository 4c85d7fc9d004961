"""A format says exactly how many bytes a segment takes, and which tensors it is for."""

from __future__ import annotations

import dataclasses

import pytest
from megatron.core.optimizer.nvme_state_store.formats import (
    BLOCK_NUMEL,
    FORMATS,
    MAIN_STORAGES,
    MOMENT_DTYPES,
    PART_ALIGN_BYTES,
    is_dithered,
    main_format,
    moment_format,
)
from megatron.core.optimizer.nvme_state_store.layout import ALIGN_NUMEL

NUMELS = [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 4096, 10_001]


def test_a_block_never_spans_two_slices() -> None:
    """Slices start at multiples of it."""
    assert BLOCK_NUMEL == ALIGN_NUMEL


@pytest.mark.parametrize(
    ("name", "numel", "nbytes"),
    [
        ("fp32", 65, 260),
        ("bf16", 65, 130),
        # Values of 65 elements end at byte 130 or 65; two blocks, so two scales.
        ("fp16", 65, 192 + 4),
        ("fp8e4m3", 65, 128 + 4),
        ("fp8e5m2", 65, 128 + 4),
        ("fp8e4m3", 64, 64 + 2),
        ("fp8e4m3", 1, 64 + 2),
        # 65 bits are nine bytes.
        ("split", 65, 192 + 9),
        ("split", 64, 128 + 8),
    ],
)
def test_sizes_are_as_documented(name: str, numel: int, nbytes: int) -> None:
    assert FORMATS[name].nbytes(numel) == nbytes


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("numel", NUMELS)
def test_the_second_part_is_aligned_and_behind_the_values(name: str, numel: int) -> None:
    """And nothing lies between them that alignment does not need."""
    each = FORMATS[name]
    gap = each.second_start(numel) - each.values_nbytes(numel)
    assert each.second_start(numel) % PART_ALIGN_BYTES == 0
    assert 0 <= gap < PART_ALIGN_BYTES
    assert each.nbytes(0) == 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_more_elements_never_take_fewer_bytes(name: str) -> None:
    """A slot that is sized by the largest bucket holds all of them."""
    sizes = [FORMATS[name].nbytes(numel) for numel in range(300)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("name", [each for each in sorted(FORMATS) if each.endswith("-sqrt")])
def test_roots_take_the_bytes_of_values(name: str) -> None:
    plain = FORMATS[name.removesuffix("-sqrt")]
    assert FORMATS[name] == dataclasses.replace(plain, name=name, is_sqrt=True)


def test_formats_are_known_by_their_own_names() -> None:
    assert all(name == each.name for name, each in FORMATS.items())


@pytest.mark.parametrize("storage", MAIN_STORAGES)
def test_main_params_take_what_was_chosen(storage: str) -> None:
    assert main_format(storage).name == storage


@pytest.mark.parametrize(
    ("moment_dtype", "first", "second"),
    [
        ("fp32", "fp32", "fp32"),
        ("bf16", "bf16", "bf16"),
        ("fp16", "fp16", "fp16-sqrt"),
        ("fp8e4m3", "fp8e4m3", "fp8e4m3-sqrt"),
        ("fp8e5m2", "fp8e5m2", "fp8e5m2-sqrt"),
    ],
)
def test_second_moments_are_stored_as_roots_where_range_is_short(
    moment_dtype: str, first: str, second: str
) -> None:
    """BF16 needs no roots, and what is no moment stays FP32."""
    assert moment_format("exp_avg", moment_dtype).name == first
    assert moment_format("momentum_buffer", moment_dtype).name == first
    assert moment_format("exp_avg_sq", moment_dtype).name == second
    assert moment_format("max_exp_avg_sq", moment_dtype).name == second
    for key in ("GG_0", "Q_0", "step", "exp_avg_sq_2"):
        assert moment_format(key, moment_dtype).name == "fp32"


def test_second_moments_alone_are_rounded_at_random() -> None:
    assert is_dithered("exp_avg_sq") and is_dithered("max_exp_avg_sq")
    assert not any(map(is_dithered, ("main", "exp_avg", "momentum_buffer", "GG_0")))


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    """Also for a key that would ignore the dtype; and no inner name is one to choose."""
    for key in ("exp_avg", "GG_0"):
        for name in ("fp8", "split", "fp16-sqrt", ""):
            with pytest.raises(ValueError, match=f"{name}: expected .*{', '.join(MOMENT_DTYPES)}"):
                moment_format(key, name)
    for name in ("bf16", "SPLIT"):
        with pytest.raises(ValueError, match=f"{name}: expected .*{', '.join(MAIN_STORAGES)}"):
            main_format(name)
