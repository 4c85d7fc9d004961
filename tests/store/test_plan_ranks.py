"""What the rank with the most state has: shares of stages, experts, matrices."""

from __future__ import annotations

import pytest
from megatron.core.optimizer.nvme_state_store.plan.hf import hf_architecture
from megatron.core.optimizer.nvme_state_store.plan.model import Kind, model_of, model_of_numbers
from megatron.core.optimizer.nvme_state_store.plan.ranks import Parallel, largest_rank

from tests.store.plans import ADAM, LLAMA_8B, PLAIN, QWEN2_05B, QWEN3_30B, only, plan


def test_744_billion_params_on_32_gpus_have_279_gb_of_state_on_each() -> None:
    """What a published run says of GLM-5.2 on 8 nodes of GB300: more than a GPU has."""
    made = plan("--params", "744e9", "--dp", 1, "--tp", 8, "--pp", 4, "--gpu", "gb300")

    assert made["parallel"]["world"] == 32
    assert only(made)["disk_bytes"] == pytest.approx(279e9, rel=1e-3)
    assert made["stock"]["device"]["state"] == 279e9
    assert made["stock"]["fits"] is False


def test_experts_are_split_over_their_own_ranks() -> None:
    """And their state is sharded over those that have the same ones; all of it is there once."""
    options = ("--params", "30e9", "--expert-params", "28e9", "--tp", 2, "--dp", 8)
    made = plan(*options, "--ep", 4, "--etp", 1)

    assert made["rank"] == {"params": 1e9 + 7e9, "main_params": 1e9 / 8 + 7e9 / 4}
    assert made["rank"]["main_params"] == 30e9 / 16


@pytest.mark.parametrize("sizes", [(8, 1, 1, 1), (2, 4, 2, 1), (4, 1, 2, 2)])
def test_ranks_together_have_the_state_once(sizes: tuple[int, int, int, int]) -> None:
    dp, tp, pp, cp = sizes
    parallel = Parallel(dp, tp, pp, cp, 1, tp)
    rank = largest_rank(model_of_numbers(16 * 10**9), parallel, "adam")

    assert rank.main_params * parallel.world == 16 * 10**9


def test_each_stage_of_a_pipeline_has_its_layers_and_the_largest_counts() -> None:
    """The first of four has the embedding, the last one the output layer and the last norm."""
    model = model_of(hf_architecture(LLAMA_8B)[0])
    rank = largest_rank(model, Parallel(pp=4), "adam")

    embedding = 128256 * 4096
    assert rank.params == (8_030_261_248 - 2 * embedding - 4096) // 4 + embedding + 4096


def test_a_tied_output_layer_is_on_the_last_stage_once_more() -> None:
    model = model_of(hf_architecture(QWEN2_05B)[0])
    embedding = 151936 * 896
    rest = 494_032_768 - embedding - 896
    assert largest_rank(model, Parallel(), "adam").params == 494_032_768
    assert largest_rank(model, Parallel(pp=2), "adam").params == rest // 2 + embedding + 896


def test_muon_keeps_one_moment_of_whole_matrices_and_adam_two_of_the_rest() -> None:
    model = model_of(hf_architecture(LLAMA_8B)[0])
    shares = largest_rank(model, Parallel(), "muon").shares

    assert [share.state_keys for share in shares] == [("momentum_buffer",), ADAM]
    assert sum(share.numel for share in shares) == model.numel()
    assert shares[1].numel == 2 * 128256 * 4096 + 65 * 4096
    assert max(shares[0].matrices) == 2 * 4096 * 14336


def test_experts_have_a_store_of_their_own_if_they_are_split() -> None:
    model = model_of(hf_architecture(QWEN3_30B)[0])
    assert [each.name for each in largest_rank(model, Parallel(dp=8), "adam").shares] == ["dense"]
    dense, expert = largest_rank(model, Parallel(dp=8, ep=8), "adam").shares
    assert expert.numel == model.numel(Kind.EXPERT) // 8
    assert dense.numel == -(-model.numel(Kind.DENSE, Kind.REPLICATED) // 8)


def test_sgd_is_not_sharded_and_bf16_gradients_are_copied() -> None:
    made = plan(*PLAIN, "--dp", 2, "--optimizer", "sgd", "--grads", "bf16")

    assert made["rank"]["main_params"] == 2e9
    assert made["stock"]["device"]["state"] == 16e9
    assert made["stock"]["device"]["grads"] == 4e9 + 8e9
    suggested = made["suggested"]["flags"]
    assert "--use-distributed-optimizer" not in suggested
