"""Sizes that Megatron would refuse at its start are refused, with the sizes that go."""

from __future__ import annotations

import re

import pytest
from megatron.core.optimizer.nvme_state_store.__main__ import main
from megatron.core.optimizer.nvme_state_store.plan.hf import hf_architecture
from megatron.core.optimizer.nvme_state_store.plan.megatron import megatron_architecture
from megatron.core.optimizer.nvme_state_store.plan.megatron_words import megatron_flags
from megatron.core.optimizer.nvme_state_store.plan.model import model_of, model_of_numbers
from megatron.core.optimizer.nvme_state_store.plan.ranks import Parallel
from megatron.core.optimizer.nvme_state_store.plan.splits import (
    Stages,
    rank_of,
    refuse_impossible,
    refuse_split,
    stages_of,
)

from tests.store.plans import DEEPSEEK_V3, LLAMA_8B, PLAIN, QWEN3_30B

LLAMA = hf_architecture(LLAMA_8B)[0]
MIXTURE = hf_architecture(QWEN3_30B)[0]
SIZES = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--num-layers 2 --hidden-size 100 --num-attention-heads 3",
            "3 attention heads (--num-attention-heads, num_attention_heads): expected a divisor of",
        ),
        (
            SIZES + "--group-query-attention --num-query-groups 5",
            "5 groups of keys and values (--num-query-groups, num_key_value_heads): expected a "
            "divisor of the 32 attention heads: 1, 2, 4, 8, 16, 32",
        ),
        (SIZES + "--group-query-attention --num-query-groups 0", "0 groups of keys and values"),
    ],
)
def test_sizes_that_do_not_go_with_each_other_are_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        refuse_impossible(megatron_architecture(megatron_flags(words.split()))[0])


def test_a_size_of_heads_may_be_told_instead() -> None:
    words = "--num-layers 2 --hidden-size 100 --num-attention-heads 3 --kv-channels 32"
    refuse_impossible(megatron_architecture(megatron_flags(words.split()))[0])
    refuse_impossible(LLAMA)
    refuse_impossible(hf_architecture(DEEPSEEK_V3)[0])


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(tp=3), "--tp 3: expected a divisor of 32, attention heads: 1, 2, 4, 8, 16, 32"),
        (Parallel(dp=8, ep=4), "--ep 4: expected 1, the model has no experts"),
    ],
)
def test_a_dense_model_is_not_split_so(parallel: Parallel, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        refuse_split(LLAMA, parallel)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            Parallel(dp=9, ep=9),
            "--ep 9: expected a divisor of 128, experts: 1, 2, 4, 8, 16, 32, 64",
        ),
        (Parallel(dp=5, etp=5), "--etp 5: expected a divisor of 768, inner width of an expert"),
    ],
)
def test_a_mixture_is_not_split_so(parallel: Parallel, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        refuse_split(MIXTURE, parallel)


def test_groups_may_be_fewer_than_ranks_if_they_divide_them() -> None:
    """As in Megatron: a multiple or a divisor."""
    refuse_split(MIXTURE, Parallel(tp=8, etp=8))
    words = SIZES + "--group-query-attention --num-query-groups 4 --ffn-hidden-size 12288"
    six = megatron_architecture(megatron_flags(words.replace("32", "24", 2).split()))[0]
    with pytest.raises(ValueError, match="--tp 6: expected a divisor or a multiple of the 4 gr"):
        refuse_split(six, Parallel(tp=6))


def test_an_inner_width_is_split_evenly() -> None:
    words = SIZES + "--ffn-hidden-size 1001"
    with pytest.raises(ValueError, match="--tp 2: expected a divisor of 1001, inner width of an M"):
        refuse_split(megatron_architecture(megatron_flags(words.split()))[0], Parallel(tp=2))


def test_layers_go_to_stages_evenly_or_as_told() -> None:
    assert Stages().layers_of(32, 4) == (8, 8, 8, 8)
    assert Stages(first=4, last=3).layers_of(61, 8) == (4, 9, 9, 9, 9, 9, 9, 3)
    assert Stages(last=1).layers_of(61, 4) == (20, 20, 20, 1)
    assert Stages(embedding=1, loss=1).layers_of(62, 4) == (15, 16, 16, 15)
    assert Stages(has_layout=True).layers_of(61, 4) == (16, 15, 15, 15)
    assert Stages(has_layout=True).warnings != Stages().warnings == []


@pytest.mark.parametrize(
    ("stages", "layers", "pp", "message"),
    [
        (Stages(), 61, 4, "--pp 4: expected a divisor of the 61 layers: 1, 61; or uneven stages"),
        (Stages(), 2, 4, "--pp 4: expected at most 2, a layer each"),
        (Stages(first=5), 61, 4, "--pp 4: expected the 56 layers"),
        (Stages(first=1, last=1), 8, 2, "--pp 2: expected the 6 layers"),
        (Stages(first=9), 8, 2, "--pp 2: expected the -1 layers"),
        (Stages(embedding=1), 32, 4, "of the 32 layers and 1 that embedding and loss count as: 1,"),
        (Stages(virtual_layers=3), 32, 4, "virtual-pipeline-stage 3: expected a divisor of the 8"),
        (Stages(virtual_stages=5), 32, 4, "per-pipeline-rank 5: expected a divisor of the 8"),
    ],
)
def test_layers_that_stages_cannot_have_are_refused(
    stages: Stages, layers: int, pp: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        stages.layers_of(layers, pp)


def test_stages_are_told_in_megatrons_words() -> None:
    words = (
        "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 3 "
        "--account-for-embedding-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2 "
        "--pipeline-model-parallel-layout Et|tL"
    )
    expected = Stages(4, 3, embedding=1, has_layout=True, virtual_stages=2)
    assert stages_of(megatron_flags(words.split())) == expected


def test_the_largest_stage_counts() -> None:
    model = model_of(LLAMA)
    even = rank_of(model, LLAMA, Stages(), Parallel(pp=2), "adam")
    uneven = rank_of(model, LLAMA, Stages(last=10), Parallel(pp=2), "adam")
    layer = (8_030_261_248 - 2 * 128256 * 4096 - 4096) // 32
    assert even.params == 16 * layer + 128256 * 4096 + 4096
    assert uneven.params == 22 * layer + 128256 * 4096


def test_experts_ranks_need_experts() -> None:
    model = model_of_numbers(10**9)
    with pytest.raises(ValueError, match="--ep 2: expected --expert-params N with it"):
        rank_of(model, None, Stages(), Parallel(dp=2, ep=2), "adam")


def test_the_command_line_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Of both kinds of description, and with stages told beside them."""
    assert main(["plan", "--tp", "3", "--", *(SIZES + "--vocab-size 9").split()]) == 2
    assert "--tp 3: expected a divisor of 32, attention heads" in capsys.readouterr().err
    assert main(["plan", *PLAIN, "--dp", "2", "--ep", "2"]) == 2
    capsys.readouterr()
    uneven = ["--", *SIZES.split(), "--decoder-first-pipeline-num-layers", "2"]
    assert main(["plan", "--pp", "3", *uneven]) == 0
    assert main(["plan", "--pp", "3", "--", *SIZES.split()]) == 2
