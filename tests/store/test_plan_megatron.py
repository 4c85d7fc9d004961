"""Params are counted from Megatron's arguments as Megatron makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron.core.optimizer.nvme_state_store import errors
from megatron.core.optimizer.nvme_state_store.plan_megatron import (
    megatron_architecture,
    megatron_flags,
)
from megatron.core.optimizer.nvme_state_store.plan_model import model_of

from buildtools.paths import ROOT

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
