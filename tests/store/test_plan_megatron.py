"""Params are counted from Megatron's arguments as Megatron makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store import errors
from megatron.core.optimizer.nvme_state_store.plan.hf import hf_architecture
from megatron.core.optimizer.nvme_state_store.plan.megatron import megatron_architecture
from megatron.core.optimizer.nvme_state_store.plan.megatron_words import megatron_flags
from megatron.core.optimizer.nvme_state_store.plan.model import model_of

from buildtools.paths import ROOT
from tests.store.plans import DEEPSEEK_V3, LLAMA_8B

VOCAB, POSITIONS = 512, 64
COMMON = (
    f"--num-layers 3 --hidden-size 64 --num-attention-heads 4 --vocab-size {VOCAB} "
    f"--max-position-embeddings {POSITIONS} "
)
GATED = "--swiglu --ffn-hidden-size 256 --disable-bias-linear --position-embedding-type rope "
GROUPS = "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --normalization RMSNorm "
)
MODELS = (
    COMMON,
    COMMON + GATED + GROUPS + "--normalization RMSNorm --qk-layernorm",
    COMMON + GATED + GROUPS + "--add-qkv-bias --kv-channels 32",
    COMMON + GATED + "--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq [0]+[1]*2 "
    "--moe-shared-expert-intermediate-size 40",
    COMMON + "--position-embedding-type rope --num-experts 4",
    COMMON + GATED + LATENT + "--q-lora-rank 24 --qk-layernorm",
    COMMON + GATED + LATENT,
)
_NAMES = {
    **{"num-experts": "num_moe_experts", "disable-bias-linear": "add_bias_linear"},
    **{"swiglu": "gated_linear_unit"},
}
_OF_THE_MODEL = {
    *("vocab-size", "max-position-embeddings", "position-embedding-type"),
    *("untie-embeddings-and-output-weights", "group-query-attention", "multi-latent-attention"),
}


def _config(flags: dict[str, str]) -> Any:
    """Return Megatron's config of a transformer for its own arguments."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    is_latent = "multi-latent-attention" in flags
    fields: dict[str, Any] = {"use_cpu_initialization": True}
    if is_latent:
        fields["q_lora_rank"] = None
    for name, text in flags.items():
        if name in _OF_THE_MODEL:
            continue
        value: Any = text or name != "disable-bias-linear"
        if text.isdecimal():
            value = int(text)
        elif name == "moe-layer-freq":
            value = [0, 1, 1]
        fields[_NAMES.get(name, name.replace("-", "_"))] = value
    if "num-experts" in flags:
        fields["moe_router_load_balancing_type"] = "none"
    return (MLATransformerConfig if is_latent else TransformerConfig)(**fields)


def count_params() -> list[int]:
    """Make each model, on the CPU, and count its params."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    # Megatron without Transformer Engine knows no latent attention's core, which has no params.
    plain = DotProductAttention.__init__

    def make(
        self: Any, *args: Any, k_channels: Any = 0, v_channels: Any = 0, **kwargs: Any
    ) -> None:
        plain(self, *args, **kwargs)

    DotProductAttention.__init__ = make
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    counts = []
    for words in MODELS:
        flags = megatron_flags(words.split())
        config = _config(flags)
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False),
            vocab_size=VOCAB,
            max_sequence_length=POSITIONS,
            position_embedding_type=flags.get("position-embedding-type", "learned_absolute"),
            share_embeddings_and_output_weights="untie-embeddings-and-output-weights" not in flags,
        )
        counts.append(sum(param.numel() for param in model.parameters()))
    return counts


def test_the_count_is_that_of_megatrons_own_model(tmp_path: Path) -> None:
    """In a process of its own: Megatron's groups and this double of its attention stay there."""
    written = tmp_path / "counts.json"
    script = (
        "import json, pathlib, sys; from tests.store.test_plan_megatron import count_params; "
        "pathlib.Path(sys.argv[1]).write_text(json.dumps(count_params()))"
    )
    site = str(Path(errors.__file__).parents[4])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((site, str(ROOT)))}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-W", "ignore", "-c", script, str(written)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]

    planned = [
        model_of(megatron_architecture(megatron_flags(words.split()))[0]).numel()
        for words in MODELS
    ]
    assert planned == json.loads(written.read_text())


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


@pytest.mark.parametrize(
    ("more", "warning"),
    [
        (
            "--num-query-groups 2",
            "--num-query-groups 2: without --group-query-attention it changes",
        ),
        ("--moe-shared-expert-intermediate-size 8", "8: without --num-experts it changes nothing"),
        ("--kv-lora-rank 8", "--kv-lora-rank 8: without --multi-latent-attention it changes nothi"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1: not understood, the count may be wrong"),
        ("--attention-output-gate", "--attention-output-gate: not understood"),
        ("--experimental-attention-variant dsa", "dsa: not understood, the count may be wrong"),
    ],
)
def test_what_is_ignored_or_not_counted_is_warned_of(more: str, warning: str) -> None:
    _, warnings = megatron_architecture(megatron_flags((COMMON + more).split()))
    assert len(warnings) == 1
    assert warning in warnings[0]


def test_what_is_off_is_not_warned_of() -> None:
    more = "--mtp-num-layers 0 --group-query-attention --num-query-groups 2"
    assert megatron_architecture(megatron_flags((COMMON + more).split()))[1] == []


def test_older_words_for_rotary_positions_are_understood() -> None:
    words = COMMON + "--use-rotary-position-embeddings"
    assert megatron_architecture(megatron_flags(words.split()))[0].positions == 0


def test_a_layer_frequency_is_a_number_or_a_list_and_never_code() -> None:
    words = ["--num-layers=4", "--hidden-size=64", "--num-attention-heads=4", "--num-experts=2"]
    for text, expected in (("2", (True, False) * 2), ("[0]+[1]*3", (False, True, True, True))):
        architecture, _ = megatron_architecture(megatron_flags([*words, "--moe-layer-freq", text]))
        assert architecture.moe_layers == expected
    for text in ("[1]", "0", "print(1)", "a b"):
        with pytest.raises(ValueError, match=r"--moe-layer-freq .*: expected a number, or a list"):
            megatron_architecture(megatron_flags([*words, "--moe-layer-freq", text]))
