"""A plan has the bytes of a real store, published counts of params, and flags that keep it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.__main__ import main
from megatron.core.optimizer.nvme_state_store.budgets import Budgets
from megatron.core.optimizer.nvme_state_store.config import StoreConfig
from megatron.core.optimizer.nvme_state_store.formats import main_format, moment_format
from megatron.core.optimizer.nvme_state_store.layout import make_layout
from megatron.core.optimizer.nvme_state_store.plan_choices import ALL_FORMATS
from megatron.core.optimizer.nvme_state_store.plan_hf import hf_architecture
from megatron.core.optimizer.nvme_state_store.plan_megatron import (
    megatron_architecture,
    megatron_flags,
)
from megatron.core.optimizer.nvme_state_store.plan_memory import Machine, stream
from megatron.core.optimizer.nvme_state_store.plan_model import (
    Kind,
    model_of,
    model_of_numbers,
)
from megatron.core.optimizer.nvme_state_store.plan_ranks import Parallel, largest_rank
from megatron.core.optimizer.nvme_state_store.working_set import WorkingSet

from tests.store.failing_file import start_process

ADAM = ("exp_avg", "exp_avg_sq")
PREFIX = "--stream-optimizer-state-"
PLAIN = ["--params", "2e9"]
FULL = [*PLAIN, "--gpu", "h200", "--host-gb", "128", "--disk-gb", "100", "--activation-gb", "50"]
FAST = ["--pcie-gb-per-s", "50", "--disk-gb-per-s", "2"]

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return what makes a plan of arguments, as JSON."""

    def make(*arguments: object) -> dict[str, Any]:
        assert main(["plan", "--json", *map(str, arguments)]) == 0
        made: dict[str, Any] = json.loads(capsys.readouterr().out)
        return made

    return make


def only(plan: dict[str, Any], main_storage: str = "fp32", moment_dtype: str = "fp32") -> Any:
    """Return the one choice with these formats, or the one with nothing in memory."""
    formats = (main_storage, moment_dtype)
    return next(
        each for each in plan["choices"] if (each["main_storage"], each["moment_dtype"]) == formats
    )


# -------------------------------------------------------------------------------------- known cases


def test_744_billion_params_on_32_gpus_have_279_gb_of_state_on_each(plan: Plan) -> None:
    """What a published run says of GLM-5.2 on 8 nodes of GB300: more than a GPU has."""
    made = plan("--params", "744e9", "--dp", 1, "--tp", 8, "--pp", 4, "--gpu", "gb300")

    assert made["parallel"]["world"] == 32
    assert only(made)["disk_bytes"] == pytest.approx(279e9, rel=1e-3)
    assert made["stock"]["device"]["state"] == 279e9
    assert made["stock"]["fits"] is False


def test_what_was_not_told_is_not_called_fitting(plan: Plan) -> None:
    """Each choice is judged by what it needs itself."""
    made = plan("--params", "8e9", "--dp", 8, "--gpu", "h100", "--host-gb", 4000, "--all")

    on_disk = [each for each in made["choices"] if each["disk_bytes"] and not each["lacks"]]
    in_memory = [each for each in made["choices"] if not each["disk_bytes"] and not each["lacks"]]
    assert on_disk and in_memory
    assert {each["fits"] for each in on_disk} == {None}
    assert {each["fits"] for each in in_memory} == {True}


def test_experts_are_split_over_their_own_ranks(plan: Plan) -> None:
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


# ----------------------------------------------------------------------------------- params by name

LLAMA_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
    **{"vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192},
}
QWEN2_05B = {
    **{"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24},
    **{"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864},
    **{"vocab_size": 151936, "tie_word_embeddings": True},
}
QWEN3_8B = {
    **{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288},
    **{"vocab_size": 151936, "tie_word_embeddings": False},
}
QWEN3_30B = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144},
    **{"moe_intermediate_size": 768, "num_experts": 128, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False},
}
MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
    **{"num_local_experts": 8, "vocab_size": 32000, "tie_word_embeddings": False},
}
DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432},
    **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280},
    **{"tie_word_embeddings": False, "num_nextn_predict_layers": 1},
}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_8B, 8_030_261_248),
        (QWEN2_05B, 494_032_768),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_30B, 30_532_122_624),
        (MIXTRAL, 46_702_792_704),
        # Less the router's corrections, which no optimizer steps: one for each expert of 58 layers.
        (DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_count_is_the_published_one(config: dict[str, Any], published: int) -> None:
    architecture, _ = hf_architecture(config)
    assert model_of(architecture).numel() == published


def test_megatrons_arguments_describe_the_same_models() -> None:
    common = (
        "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    )
    untied = "--untie-embeddings-and-output-weights --group-query-attention "
    llama = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size=14336 --num-attention-heads 32 "
        "--num-query-groups 8 --vocab-size 128256 --lr 1e-5 --data-path a b"
    )
    deepseek = (
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
        "--vocab-size 129280 --num-query-groups 128 --qk-layernorm"
    )
    for words, config in ((llama, LLAMA_8B), (deepseek, DEEPSEEK_V3)):
        flags = megatron_flags((common + untied + words).split())
        assert model_of(megatron_architecture(flags)[0]) == model_of(hf_architecture(config)[0])


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


def test_what_is_not_understood_is_warned_of() -> None:
    config = {**LLAMA_8B, "mamba_d_state": 16, "vision_config": {"a": 1}, "rope_theta": 1e6}
    config["layer_types"] = ["linear_attention", "full_attention"]

    (warning,) = hf_architecture(config)[1]

    assert "mamba_d_state" in warning
    assert "vision_config" in warning
    assert "linear_attention" in warning
    assert "rope_theta" not in warning
    assert hf_architecture(LLAMA_8B)[1] == []


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


# ------------------------------------------------------------------------------ the same as a store


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Let a working set pin memory in name, and return the bytes at each address."""
    registered: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> int:
        registered[address] = nbytes
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: registered.pop(address) * 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    return registered


@pytest.mark.parametrize(("main_storage", "moment_dtype"), ALL_FORMATS)
@pytest.mark.parametrize("ahead", [0, 700_000])
def test_a_plan_has_the_bytes_of_a_real_store(
    main_storage: str, moment_dtype: str, ahead: int, tmp_path: Path, pinned: dict[int, int]
) -> None:
    """Files, pinned memory and slots of a working set on a rank with many params."""
    numels = [3000, 64, 128_000, 1, 90_001, 17, 40_960] * 3
    config = StoreConfig(
        (tmp_path / "a", tmp_path / "b"),
        bucket_numel=8192,
        moment_dtype=moment_dtype,
        main_storage=main_storage,
        host_bytes=1_000_000,
        device_bytes=600_000,
        ahead_bytes=ahead,
        io="buffered",
    )
    rank = largest_rank(model_of_numbers(sum(numels)), Parallel(), "adam")
    planned = stream(rank, config, "fp32", "te", Machine(1))

    formats = [main_format(main_storage)]
    formats += [moment_format(key, moment_dtype) for key in ADAM]
    layout = make_layout(numels, config.bucket_numel, ADAM, formats)
    budgets = Budgets(600_000, 1_000_000)
    made = WorkingSet(config, layout, budgets, "rank00000", torch.device("cpu"))
    try:
        assert made.pipeline is not None
        made.staging.allocate()
        on_device = [*made.staging._slots, *made.staging._decoded]
        slots = sum(each.nbytes for each in on_device if each is not None)
        files = sum(volume.file.nbytes for volume in made.homes.open_volumes())
        bucket = layout.slot_nbytes
        # The plan takes the entries as one: they pad at most 63 elements each.
        assert planned.device.slots == pytest.approx(slots, abs=16_384)
        assert planned.state_nbytes == pytest.approx(layout.nbytes, rel=0.02)
        assert planned.disk_nbytes == pytest.approx(files, abs=bucket)
        assert planned.host_nbytes == pytest.approx(sum(pinned.values()), abs=bucket)
        assert planned.device.state == pytest.approx(made.homes.placement.device_nbytes, abs=bucket)
    finally:
        made.close()


@pytest.mark.parametrize("ahead", [0, 700_000, 10**9])
def test_a_share_of_one_entry_has_the_bytes_of_a_real_store_exactly(
    ahead: int, tmp_path: Path, pinned: dict[int, int]
) -> None:
    config = StoreConfig((tmp_path,), bucket_numel=8192, host_bytes=10**6, io="buffered")
    config = StoreConfig(**{**vars(config), "ahead_bytes": ahead})
    planned = stream(
        largest_rank(model_of_numbers(300_001), Parallel(), "adam"),
        config,
        "fp32",
        "te",
        Machine(1),
    )
    layout = make_layout([300_001], config.bucket_numel, ADAM)
    budgets = Budgets(0, 10**6)
    made = WorkingSet(config, layout, budgets, "rank00000", torch.device("cpu"))
    try:
        assert made.pipeline is not None
        made.staging.allocate()
        assert planned.device.slots == sum(each.nbytes for each in made.staging._slots)
        assert planned.disk_nbytes == sum(v.file.nbytes for v in made.homes.open_volumes())
        assert planned.host_nbytes == sum(pinned.values())
    finally:
        made.close()


# ----------------------------------------------------------------------------------- what is chosen


def test_what_is_suggested_fits_and_is_lossless_if_that_fits(plan: Plan) -> None:
    suggested = plan(*FULL, *FAST)["suggested"]

    assert suggested["fits"]
    assert suggested["moment_dtype"] == "fp32"
    assert "--stream-optimizer-state-to-disk" in suggested["flags"]


def test_lossy_formats_are_suggested_if_nothing_else_fits(plan: Plan) -> None:
    made = plan(*PLAIN, "--disk-gb", 15)

    assert made["suggested"]["moment_dtype"] in ("bf16", "fp16")
    assert made["suggested"]["disk_bytes"] <= 15e9
    assert only(made)["lacks"] == ["disk"]


def test_the_flags_that_are_suggested_make_the_plan_that_is_shown(plan: Plan) -> None:
    suggested = plan(*FULL, *FAST)["suggested"]
    words = [word for flag in suggested["flags"] for word in flag.split()]

    again = plan(*FULL, *FAST, "--", *words)

    names = ("device", "host_bytes", "disk_bytes", "step_seconds")
    for name in names:
        formats = (suggested["main_storage"], suggested["moment_dtype"])
        assert only(again, *formats)[name] == suggested[name]


def test_a_row_without_room_says_for_what(plan: Plan) -> None:
    made = plan(*PLAIN, "--gpu-gb", 13, "--host-gb", 9, "--disk-gb", 1)

    assert only(made)["lacks"] == ["GPU", "host", "disk"]
    assert made["suggested"] is None


def test_a_host_tier_that_a_start_would_refuse_does_not_fit(plan: Plan) -> None:
    """Slots count, although nothing would be on disk."""
    made = plan(*PLAIN, "--host-gb", "25.9", f"{PREFIX}host-gb", 24)
    assert only(made)["lacks"] == ["host"]
    with pytest.raises(ValueError, match="would pin"):
        stream(
            largest_rank(model_of_numbers(2 * 10**9), Parallel(), "adam"),
            StoreConfig((), host_bytes=24 * 10**9, device_bytes=None),
            "fp32",
            "te",
            Machine(1, gpu_bytes=80 * 10**9, host_bytes=25_900_000_000),
        )


def test_auto_is_what_a_start_would_find(plan: Plan) -> None:
    made = plan(*PLAIN, "--host-gb", 20, f"{PREFIX}host-gb", "auto")
    # 20 GB less 8 that stay free, less four slots of 0.6; 15 buckets of 0.6 fit.
    assert only(made)["host_tier_bytes"] == pytest.approx(9.6e9, abs=0.61e9)


def test_a_node_has_so_many_ranks_of_bytes_and_they_share_its_disk(plan: Plan) -> None:
    one = only(plan(*PLAIN, *FAST))
    four = only(plan("--params", "8e9", "--dp", 4, "--gpus-per-node", 4, *FAST))

    assert four["disk_bytes"] == one["disk_bytes"]
    assert four["node_disk_bytes"] == 4 * one["node_disk_bytes"]
    assert four["step_seconds"] == pytest.approx(4 * one["step_seconds"])


def test_slots_for_the_whole_disk_tier_are_never_read_and_hide_all_writes(plan: Plan) -> None:
    ahead = (f"{PREFIX}ahead-gb", 30)
    made = only(plan(*PLAIN, *FAST, *ahead, "--forward-backward-s", 60))

    assert made["read_bytes_per_step"] == 0
    assert made["exposed_seconds"] < 1
    assert made["host_bytes"] == made["disk_bytes"]


def test_what_does_not_fit_into_forward_and_backward_is_exposed(plan: Plan) -> None:
    """Twice the slots are hidden if there is time, and what the disk does in that time else."""
    slots = 4 * 0.6e9
    step, long, short = (
        only(plan(*PLAIN, *FAST, "--forward-backward-s", seconds)) for seconds in (1, 60, 1)
    )
    assert step["step_seconds"] == pytest.approx(48e9 / 2e9, rel=0.01)
    assert long["exposed_seconds"] == pytest.approx((48e9 - 2 * slots) / 2e9, rel=0.01)
    assert short["exposed_seconds"] == pytest.approx(48e9 / 2e9 - 1, rel=0.01)


def test_wear_is_what_is_written_in_a_day_of_steps(plan: Plan) -> None:
    made = only(plan(*PLAIN, *FAST, "--forward-backward-s", 36))

    seconds = 36 + made["exposed_seconds"]
    assert made["node_written_bytes_per_day"] == pytest.approx(24e9 * 86400 / seconds, rel=0.01)


def test_without_rates_no_time_is_predicted(plan: Plan) -> None:
    made = only(plan(*PLAIN))
    assert made["step_seconds"] is None
    assert made["node_written_bytes_per_day"] is None


def test_sgd_is_not_sharded_and_bf16_gradients_are_copied(plan: Plan) -> None:
    made = plan(*PLAIN, "--dp", 2, "--optimizer", "sgd", "--grads", "bf16")

    assert made["rank"]["main_params"] == 2e9
    assert made["stock"]["device"]["state"] == 16e9
    assert made["stock"]["device"]["grads"] == 4e9 + 8e9
    suggested = made["suggested"]["flags"]
    assert "--use-distributed-optimizer" not in suggested


# ------------------------------------------------------------------------------------ in and output


def test_a_probe_gives_the_rates_of_a_disk(plan: Plan, tmp_path: Path) -> None:
    """Of several directories: buckets are striped evenly, so the slowest decides."""
    reports = [
        {"directory": "a", "error": "", "mixed_gbps": 3.0, "read_gbps": 4.0, "write_gbps": 1.0},
        {"directory": "b", "error": "", "mixed_gbps": 1.0, "read_gbps": 2.0, "write_gbps": 9.0},
    ]
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(reports))
    pcie = ("--pcie-gb-per-s", 50)
    directories = (f"{PREFIX}dir", "/a,/b")

    made = only(plan(*PLAIN, *pcie, *directories, "--probe", file))

    assert made["step_seconds"] == pytest.approx(48e9 / 2e9, rel=0.01)

    reports[1]["error"] = "no space"
    file.write_text(json.dumps(reports))
    assert main(["plan", *PLAIN, "--probe", str(file)]) == 2


def test_the_text_has_table_flags_and_wear(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *FULL, *FAST, "--host-gb", "20", "--endurance-tb", "7000"]) == 0

    text = capsys.readouterr().out
    assert text.startswith("model   2.000 B params")
    assert (
        "stock   86.0 GB a GPU = params 4.0 + grads 8.0 + state 24.0 + reserve 50.0: fits" in text
    )
    assert "stream only if its memory is wanted" in text
    assert "    --stream-optimizer-state-to-disk \\\n" in text


def test_all_shows_every_format_once_for_each_choice_of_tiers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag, count in (("--all", 10), ("--inner=te", 5)):
        assert main(["plan", *PLAIN, flag]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.split()[2:3] == ["disk"] for line in lines) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 descriptions of the model: expected one of --params"),
        ([*PLAIN, "--hf-config", "x"], "2 descriptions of the model"),
        (["--hf-config", "/nowhere"], "--hf-config /nowhere: expected a readable config.json"),
        ([*PLAIN, "--expert-params", "3e9"], "--expert-params 3000000000: expected a part"),
        ([*PLAIN, "--tp", "0"], "--tp 0: expected a positive number"),
        ([*PLAIN, "--dp", "2", "--ep", "3"], "--ep 3: expected ep x etp = 3 x 1 to divide"),
        ([*PLAIN, "--gpu", "h200", "--gpu-gb", "1"], "--gpu h200 and --gpu-gb 1: expected one"),
        ([*PLAIN, f"{PREFIX}host-gb", "auto"], "auto: expected --host-gb with it"),
        ([*PLAIN, f"{PREFIX}moment-dtype", "int8"], "moment-dtype int8: expected one of fp32"),
        ([*PLAIN, f"{PREFIX}bucket-numel", "0"], "bucket-numel 0: expected a positive number"),
        ([*PLAIN, "--probe", "/nowhere"], "--probe /nowhere: expected what `probe DIR... --json`"),
        ([*PLAIN, "--", "--optimizer", "soap"], "--optimizer soap: expected one of adam, muon"),
        ([*PLAIN, "--", "32"], "-- 32: expected Megatron's arguments"),
        (["--", "--num-layers", "2"], "-- --hidden-size: expected it among Megatron's"),
        (["--", "--num-layers", "x"], "-- --num-layers x: expected a whole number"),
    ],
)
def test_wrong_input_is_named_with_what_is_accepted(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--params", "many"], ["--params", "1.5"], ["--host-gb", "-1"], ["--gpu", "x"]]
)
def test_a_value_that_cannot_be_parsed_is_named(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])

    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", None, "expected hidden_size, a positive whole number"),
        ("vocab_size", "many", "vocab_size many: expected a whole number"),
    ],
)
def test_a_config_without_a_size_says_which(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_architecture({**LLAMA_8B, name: value})


def test_a_layer_frequency_is_a_number_or_a_list_and_never_code() -> None:
    words = ["--num-layers=4", "--hidden-size=64", "--num-attention-heads=4", "--num-experts=2"]
    for text, expected in (("2", (True, False) * 2), ("[0]+[1]*3", (False, True, True, True))):
        architecture, _ = megatron_architecture(megatron_flags([*words, "--moe-layer-freq", text]))
        assert architecture.moe_layers == expected
    for text in ("[1]", "0", "print(1)", "a b"):
        with pytest.raises(ValueError, match=r"--moe-layer-freq .*: expected a number, or a list"):
            megatron_architecture(megatron_flags([*words, "--moe-layer-freq", text]))


def test_without_matplotlib_a_picture_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert main(["plan", *PLAIN, "--png", str(tmp_path / "plan.png")]) == 2
    assert "expected matplotlib, which is not installed" in capsys.readouterr().err


def test_the_picture_stacks_stock_and_every_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each bar ends at what the table says for its GPU."""
    figure, axes = MagicMock(), MagicMock()
    pyplot = SimpleNamespace(subplots=lambda **_: (figure, axes), close=lambda _: None)
    doubles = {"matplotlib": MagicMock(), "matplotlib.pyplot": pyplot}
    monkeypatch.setattr(importlib, "import_module", doubles.__getitem__)

    assert main(["plan", *PLAIN, "--gpu", "h200", "--png", str(tmp_path / "plan.png")]) == 0

    ends = [float(call.args[2]) for call in axes.text.call_args_list]
    lines = capsys.readouterr().out.splitlines()
    assert ends[0] == 36.0
    assert ends[1:] == [float(line.split()[3]) for line in lines if " disk " in line[:25]]
    figure.savefig.assert_called_once()


def test_it_runs_without_torch_and_megatron() -> None:
    """In a Python without site-packages."""
    script = (
        "from nvme_state_store.__main__ import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    process = start_process(script, "plan", *PLAIN, "--", "--lr", "1")
    out, err = process.communicate()

    assert process.returncode == 0, err
    assert out.startswith("model   2.000 B params")
