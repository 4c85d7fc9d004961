"""One rank of `moe.py`: trains a mixture of experts, and tells times, peaks and losses.

    torchrun benchmarks/moe_rank.py [--save-to DIR] [-- any Megatron arguments]

The shape is Qwen3-30B-A3B's, all experts of a layer spread over the ranks; weights and tokens are
random. Everything is Megatron's own: arguments, layers (Transformer Engine's where it is
installed), train_step, save_checkpoint. Prints one JSON line. Without a GPU it runs on emulated
CUDA, where the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import workload
from benchmarks.measurement import summed_reports

MODEL = shlex.split("""
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --kv-channels 128
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --qk-layernorm
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 1000000 --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall
    --tokenizer-type NullTokenizer --vocab-size 151935
""")
TRAINING = shlex.split("""
    --bf16 --use-distributed-optimizer --optimizer adam --lr 1e-4 --lr-decay-style constant
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --mock-data --eval-iters 0 --save-interval 1000000 --ckpt-format torch_dist
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm --logging-level 20
""")
WITH_TRANSFORMER_ENGINE = ("--transformer-impl", "transformer_engine", "--moe-grouped-gemm")
WITHOUT = ("--transformer-impl", "local", "--no-rope-fusion")
LOG_LINE = "NVMe streaming step"
CHECKPOINT_BYTES = 14
"""Of a param: itself in BF16, main param and two moments."""


class LineCounter(logging.Handler):
    """Counts the lines that the store writes after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record."""
        self.count += LOG_LINE in record.getMessage()


def megatron_arguments(world_size: int, micro_batches: int, more: list[str]) -> list[str]:
    """Return Megatron's command line; later arguments take precedence."""
    has_layers = importlib.util.find_spec("transformer_engine") and torch.cuda.is_available()
    return [
        *MODEL,
        *TRAINING,
        *(WITH_TRANSFORMER_ENGINE if has_layers else WITHOUT),
        *("--expert-model-parallel-size", str(world_size)),
        *("--global-batch-size", str(world_size * micro_batches)),
        *more,
    ]


def build_model(pre_process: bool = True, post_process: bool = True, **kwargs: Any) -> Any:
    """Build the model; the provider that `setup_model_and_optimizer` calls."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = kwargs.get("config") or core_transformer_config_from_args(args)
    layers = get_gpt_decoder_block_spec(config, args.transformer_impl == "transformer_engine")
    return GPTModel(
        config,
        layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )


def batches(iteration: int) -> Iterator[torch.Tensor]:
    """Yield micro batches of tokens that depend on the iteration and the rank only."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    generator = torch.Generator()
    generator.manual_seed(1000 * iteration + parallel_state.get_data_parallel_rank())
    shape = (args.micro_batch_size, args.seq_length + 1)
    while True:
        yield torch.randint(0, args.vocab_size, shape, generator=generator)


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """Run the model on the next micro batch; Megatron's `forward_step_func`."""
    tokens = next(data).cuda()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.size(1), device="cuda").unsqueeze(0).expand_as(inputs)
    return model(inputs, positions, None, labels=labels), _mean_loss


def _mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


class Training:
    """Model and optimizer of one rank; each phase notes what it took.

    Attributes:
        result: what is printed.
    """

    def __init__(self) -> None:
        """Make model and optimizer, of the arguments that Megatron has parsed."""
        from megatron.core.enums import ModelType
        from megatron.training.training import setup_model_and_optimizer

        torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        self.model, self.optimizer, self.scheduler = setup_model_and_optimizer(
            model_type=ModelType.encoder_or_decoder, model_provider_func=build_model
        )
        self.result: dict[str, Any] = {
            "params": sum(p.numel() for chunk in self.model for p in chunk.parameters()),
            "inner": sorted(set(workload.inner_names(self.optimizer))),
            "construction_s": round(_seconds_since(start), 2),
            **_peaks("construction"),
        }

    def stores(self) -> list[Any]:
        """Return the stores of this rank; none in a stock run."""
        return [
            store
            for each in self.optimizer.chained_optimizers
            if (store := getattr(each, "_nvme_state_store", None)) is not None
        ]

    def steps(self, count: int) -> None:
        """Train; note seconds, losses and what the stores did, of each step."""
        lines = LineCounter()
        logging.getLogger("megatron.core.optimizer.nvme_state_store.store").addHandler(lines)
        torch.cuda.reset_peak_memory_stats()
        seconds, losses, reports, exposed = [], [], [], []
        for iteration in range(count):
            start = time.monotonic()
            losses += [loss.hex() for loss in self._step(iteration)]
            seconds.append(round(_seconds_since(start), 4))
            steps = [store.last_step for store in self.stores()]
            reports.append(summed_reports(steps))
            exposed.append(round(sum(step.seconds for step in steps), 4))
        self.result |= {
            "step_s": seconds,
            "losses": losses,
            "reports": reports,
            "exposed_s": exposed,
            "log_lines": lines.count,
            "stores": len(self.stores()),
            "weights": self._fingerprint(),
            **_peaks("step"),
        }
        for tier in ("disk", "host", "device"):
            held = sum(getattr(each.placement, f"{tier}_nbytes") for each in self.stores())
            self.result[f"{tier}_tier_gb"] = round(held / 1e9, 3)

    def _step(self, iteration: int) -> list[float]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.core.utils import get_model_config
        from megatron.training.training import train_step

        config = get_model_config(self.model[0])
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        for chunk in self.model:
            chunk.train()
        losses, *_ = train_step(
            forward_step,
            RerunDataIterator(batches(iteration)),
            self.model,
            self.optimizer,
            self.scheduler,
            config,
            get_forward_backward_func(),
            iteration=iteration,
        )
        return [float(loss) for loss in losses.values()]

    def _fingerprint(self) -> list[int]:
        from megatron.core.optimizer.nvme_state_store.fingerprint import fingerprint

        params = [p.detach().reshape(-1) for chunk in self.model for p in chunk.parameters()]
        found: list[int] = fingerprint(params).tolist()
        return found

    def save(self, directory: Path, iteration: int) -> None:
        """Save a checkpoint, if the disk has room for it."""
        from megatron.training.checkpointing import save_checkpoint

        world_size = torch.distributed.get_world_size()
        needed = CHECKPOINT_BYTES * self.result["params"] * world_size
        free = torch.tensor(shutil.disk_usage(directory.parent).free, device="cuda")
        torch.distributed.broadcast(free, 0)  # or ranks would part
        if int(free) < needed:
            reason = f"it takes {needed / 1e9:.0f} GB, and {int(free) / 1e9:.0f} GB are free"
            self.result["not_saved"] = reason
            return
        torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        save_checkpoint(
            iteration, self.model, self.optimizer, self.scheduler, 0, checkpointing_context={}
        )
        self.result |= {"save_s": round(_seconds_since(start), 2), **_peaks("save")}


def _seconds_since(start: float) -> float:
    torch.cuda.synchronize()
    return time.monotonic() - start


def _peaks(phase: str) -> dict[str, float]:
    """Return what the tensors of this rank held at most, and the allocator's reserve then."""
    return {
        f"{phase}_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3),
        f"{phase}_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 3),
    }


def prepare() -> None:
    """Set the environment that Megatron wants; without a GPU, emulate one."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available():
        return
    from tests import emulated_cuda, fused_adam

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    emulated_cuda.install()
    fused_adam.install()


def main() -> None:
    """Train as one rank and print what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=16, help="of each rank in a step")
    parser.add_argument("--save-to", type=Path, help="a directory that is not there yet")
    parser.add_argument("megatron", nargs="*", metavar="-- MEGATRON_ARG")
    args = parser.parse_args()
    prepare()
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    more = [*args.megatron, "--train-iters", str(args.steps)]
    more += ["--save", str(args.save_to)] if args.save_to else []
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    sys.argv = [sys.argv[0], *megatron_arguments(world_size, args.micro_batches, more)]
    parse_and_validate_args()
    initialize_megatron()
    training = Training()
    training.steps(args.steps)
    if args.save_to:
        training.save(args.save_to, args.steps)
    training.result["rank"] = torch.distributed.get_rank()
    for store in training.stores():
        store.close()
    print(json.dumps(training.result), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # a checkpoint's writer processes import this file, too
    main()
