"""Trains a small GPT with Megatron's `pretrain()`, and proves that resuming changes nothing.

    python examples/train_gpt.py [--ranks N] [--steps N] [--text FILE] [--work-dir DIR] [--keep]
                                 [-- any Megatron arguments]

The *launcher* (standard library only) starts ranks three times for each entry of RUNS: for all
steps, for the first half with a checkpoint at its end, and for the rest in fresh processes from
that checkpoint. It exits with 0 if the loss fell and resuming gave the same losses bit for bit.
A *rank* is an ordinary Megatron training script, so for something of your own
`torchrun examples/train_gpt.py --data-path ... <Megatron arguments>` works too. Without a GPU it
runs on emulated CUDA (CPU tensors, gloo). The text to train on is the documentation in CPython.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tokens are the text's bytes; NullTokenizer takes the last of the vocabulary for end of document.
MODEL_AND_TRAINING = shlex.split("""
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --transformer-impl local --bf16
    --seq-length 128 --max-position-embeddings 128 --tokenizer-type NullTokenizer --vocab-size 257
    --optimizer adam --use-distributed-optimizer --lr 3e-3 --lr-decay-style constant
    --micro-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --split 100,0,0 --num-workers 0
    --eval-iters 0 --eval-interval 1000000 --log-interval 1 --ckpt-format torch_dist
    --use-cpu-initialization --deterministic-mode --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion
""")


_STREAMING = "--stream-optimizer-state"


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train, by the Megatron arguments it adds; ``{work}`` is the work directory."""

    name: str
    megatron_args: tuple[str, ...] = ()


RUNS = (
    Run("stock"),
    Run(
        "streamed",
        (
            *("--stream-optimizer-state-to-disk", "--stream-optimizer-state-dir", "{work}/state"),
            *("--stream-optimizer-state-bucket-numel", "100000"),
        ),
    ),
)


# ---------------------------------------------------------------------------------- the launcher


@dataclass(frozen=True, slots=True)
class Record:
    """What the ranks of a run wrote down: exact floats, so that runs compare bit for bit."""

    losses: dict[int, list[list[float]]]  # step -> [loss sum, tokens] of each rank and microbatch
    states: list[str]  # digest of weights, main params and moments before the last step, by rank
    peak_bytes: int
    streamed_bytes: int
    about: str

    def mean_loss(self, step: int) -> float:
        """Loss per token at `step`, over all ranks."""
        return sum(loss for loss, _ in self.losses[step]) / sum(n for _, n in self.losses[step])


def read_record(record_dir: Path) -> Record:
    """Merges what the ranks wrote, in rank order."""
    text = "".join(file.read_text() for file in sorted(record_dir.iterdir()))
    entries = [json.loads(line) for line in text.splitlines()]
    losses: dict[int, list[list[float]]] = {}
    for entry in entries:
        if "step" in entry:
            losses.setdefault(entry["step"], []).append(entry["loss"])
    return Record(
        losses,
        states=[entry["state"] for entry in entries if "state" in entry],
        peak_bytes=max(entry.get("peak_bytes", 0) for entry in entries),
        streamed_bytes=sum(entry.get("streamed_bytes", 0) for entry in entries),
        about=entries[0]["about"],
    )


def launch(command: list[str], log: Path) -> None:
    """Runs one set of ranks to its end; exits with the end of the log if it failed."""
    print(f"  {log.stem} ... ", end="", flush=True)
    start = time.monotonic()
    # Compiling would take longer than this model trains; the other is for tensor parallelism.
    environment = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    with log.open("w") as output:
        status = subprocess.run(command, env=environment, stdout=output, stderr=output)
    if status.returncode:  # after a rank's last words torch adds its own, which tell no more
        ranks, mark, torch_adds = log.read_text(errors="replace").partition("failed (exitcode:")
        tail = (ranks + mark + torch_adds.partition("\n")[0]).splitlines()[-40:]
        sys.exit("\n".join(["", f"{log.stem} failed:", *tail, f"Whole log: {log}"]))
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def straight_and_resumed(run: Run, command: list[str], steps: int, work: Path) -> dict[str, Record]:
    """Trains in one go, and again in two halves with a checkpoint between them.

    Both halves add to one record: had the second begun anew, its steps would stand there twice.
    """
    straight, resumed = work / f"{run.name}-straight", work / f"{run.name}-resumed"
    half, checkpoint = str(steps // 2), str(work / f"{run.name}-checkpoint")
    save = ["--save", checkpoint, "--save-interval", half, "--exit-interval", half]
    run_args = [argument.format(work=work) for argument in run.megatron_args]
    command = [*command, *run_args, "--record-dir"]
    launch([*command, str(straight)], work / f"{run.name}-straight.log")
    launch([*command, str(resumed), *save], work / f"{run.name}-first-half.log")
    launch([*command, str(resumed), "--load", checkpoint], work / f"{run.name}-second-half.log")
    return {path.name: read_record(path) for path in (straight, resumed)}


def report(columns: dict[str, Record]) -> bool:
    """Prints the losses; whether the first column fell by 10% and the others equal it exactly."""
    (first_name, first), *others = columns.items()
    steps = sorted(first.losses)
    print(f"\n{first.about}\n\n{'step':>6}" + "".join(f"{name:>22}" for name in columns))
    for step in sorted({*steps[:: max(1, len(steps) // 20)], steps[-1]}):
        print(f"{step:>6}" + "".join(f"{r.mean_loss(step)!r:>22}" for r in columns.values()))
    for name, title in (("peak_bytes", "peak"), ("streamed_bytes", "disk")):
        sizes = [f"{getattr(record, name) / 2**20:18.2f} MiB" for record in columns.values()]
        print(f"{title:>6}" + "".join(sizes))
    print("peak: of device memory, of one rank; disk: optimizer state read and written, of all\n")
    start, end = first.mean_loss(steps[0]), first.mean_loss(steps[-1])
    passed = end < 0.9 * start  # without learning, batches differ by about 1%
    print(f"{first_name}: loss {start:.4f} -> {end:.4f}{'' if passed else ': DID NOT FALL'}")
    for name, record in others:
        different = [step for step in steps if record.losses.get(step) != first.losses[step]]
        verdict = f"DIFFERS at steps {different}" if different else "equal bit for bit"
        print(f"{name}: {verdict} ({len(steps)} steps, every rank's loss)")
        same = record.states == first.states
        print(f"{name}: weights, main params and moments {'equal' if same else 'DIFFER'}")
        passed = passed and not different and same
    return passed


def parse_launcher_args() -> argparse.Namespace:
    """The launcher's own command line; what follows `--` is left for Megatron."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one per GPU, else 2)")
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    parser.add_argument("--text", type=Path, help="train on this file; form feeds end documents")
    parser.add_argument("--work-dir", type=Path, default=tempfile.gettempdir(), help="for scratch")
    parser.add_argument("--keep", action="store_true", help="keep logs, data and checkpoints")
    parser.add_argument("megatron_args", nargs="*", metavar="-- MEGATRON_ARG")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: expected at least 2, one for each half")
    if streaming := [each for each in args.megatron_args if each.startswith(_STREAMING)]:
        # They would reach the stock run, too, and streaming be compared with itself.
        parser.error(f"{streaming[0]}: RUNS in this file has the streaming flags of each run")
    if args.text and not args.text.is_file():
        parser.error(f"--text {args.text}: no such file")
    if not (args.text or importlib.util.find_spec("pydoc_data.topics")):
        parser.error("this Python lacks pydoc_data.topics, the text to train on: give --text FILE")
    return args


def launch_all() -> int:
    """The launcher's main; returns the exit status."""
    args = parse_launcher_args()
    # Asked of a child, so that the launcher never loads torch.
    probe = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    gpus = int(subprocess.check_output([sys.executable, "-c", probe]))
    num_ranks = args.ranks or gpus or 2
    print(f"{num_ranks} ranks on {f'{gpus} CUDA GPUs' if gpus else 'emulated CUDA (no GPU here)'}")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    work_dir = Path(tempfile.mkdtemp(prefix="train-gpt-", dir=args.work_dir)).resolve()
    text = args.text or work_dir / "topics.txt"
    if not args.text:
        from pydoc_data.topics import topics

        text.write_text("\f".join(topics.values()), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--log-dir", str(work_dir / "torchelastic")]
    command += ["--nproc-per-node", str(num_ranks), __file__, *MODEL_AND_TRAINING]
    command += ["--train-iters", str(args.steps), "--data-path", str(work_dir / "text")]
    command += ["--text", str(text.resolve()), *args.megatron_args]
    columns: dict[str, Record] = {}
    for run in RUNS:
        columns |= straight_and_resumed(run, command, args.steps, work_dir)
    passed = report(columns)
    if passed and not args.keep:
        shutil.rmtree(work_dir)
    else:
        print(f"Kept: {work_dir}")
    return 0 if passed else 1


# -------------------------------------------------------------------------------------- one rank


def provide_cuda_and_fused_adam() -> str:
    """Emulates CUDA if there is no GPU, and FusedAdam if there is none; says whose FusedAdam runs.

    Comes before Megatron's import. With Megatron's own fallback, torch.optim.AdamW, the distributed
    optimizer saves checkpoints that fail to load into a fresh process: upstream asserts that the
    optimizer to load into has stepped before.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    for package in ("transformer_engine", "apex"):
        if has_gpu and importlib.util.find_spec(package):
            return package
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if not has_gpu:
        from tests import emulated_cuda

        emulated_cuda.install()
    from tests import fused_adam

    fused_adam.install()
    return "the stand-in of tests/fused_adam.py (no Transformer Engine or Apex to be used here)"


def add_example_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds what the launcher tells a rank beside Megatron's own arguments."""
    parser.add_argument("--text", type=Path, help="write this into --data-path first")
    parser.add_argument("--record-dir", type=Path, help="where each rank writes its losses")
    return parser


def write_record(**entry: object) -> None:
    """Appends a line to this rank's record, if the launcher wants one."""
    from megatron.training import get_args

    if (args := get_args()).record_dir:
        args.record_dir.mkdir(exist_ok=True)
        with (args.record_dir / f"rank-{args.rank:05}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def build_datasets(num_samples: list[int]) -> Any:
    """Builds train, validation and test data; rank 0 first writes the text's bytes as tokens."""
    import torch
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
    from megatron.training import get_args, get_tokenizer, utils

    args, tokenizer = get_args(), get_tokenizer()
    if args.text and args.rank == 0 and not IndexedDataset.exists(args.data_path[0]):
        dtype = DType.optimal_dtype(tokenizer.vocab_size)
        writer = IndexedDatasetBuilder(f"{args.data_path[0]}.bin", dtype)
        for document in args.text.read_bytes().split(b"\f"):
            writer.add_item(torch.tensor([*document, tokenizer.eod]))
            writer.end_document()
        writer.finalize(f"{args.data_path[0]}.idx")
    torch.distributed.barrier()
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=utils.get_blend_and_blend_per_split(args)[0],
        split=args.split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # the local attention makes its own causal mask
    )
    builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
    return builder(gpt_dataset.GPTDataset, num_samples, lambda: True, config).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron's "on every rank"


def state_digest(model: Any) -> dict[str, Any]:
    """Digests weights, main params and moments of this rank; tells the bytes streamed so far."""
    from megatron.core.optimizer import ChainedOptimizer

    # pretrain() keeps the optimizer to itself.
    (chained,) = [each for each in gc.get_objects() if isinstance(each, ChainedOptimizer)]
    digest, streamed = hashlib.sha256(), 0
    tensors = [param.detach() for param in model.parameters()]
    for optimizer in chained.chained_optimizers:
        store = getattr(optimizer, "_nvme_state_store", None)
        entries = {
            id(entry.main): index for index, entry in enumerate(store.entries if store else ())
        }
        for main in (main for group in optimizer.param_groups for main in group["params"]):
            if store is None:
                state = optimizer.optimizer.state[main]
                tensors += [main.detach(), state["exp_avg"], state["exp_avg_sq"]]
            else:
                tensors += store.read_entry(entries[id(main)]).values()
        streamed += store.counters.bytes_read + store.counters.bytes_written if store else 0
    for tensor in tensors:
        digest.update(tensor.float().cpu().numpy().tobytes())
    return {"state": digest.hexdigest(), "streamed_bytes": streamed}


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """Runs the model on the next microbatch; returns token losses and how to sum them up."""
    import torch
    from megatron.training import get_args

    batch = {name: tensor.cuda() for name, tensor in next(data_iterator).items()}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def sum_up(losses: Any) -> tuple[Any, Any, dict[str, Any]]:
        loss, num_tokens = (losses.float() * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
        step = get_args().curr_iteration + 1
        last = state_digest(model) if step == get_args().train_iters else {}
        write_record(step=step, loss=[loss.item(), num_tokens.item()], **last)
        return loss, num_tokens.int(), {"lm loss": torch.stack([loss.detach(), num_tokens])}

    return losses, sum_up


def train_rank() -> None:
    """A rank's main."""
    fused_adam = provide_cuda_and_fused_adam()
    import torch
    from megatron import core
    from megatron.training import argument_utils, arguments, training

    args = arguments.parse_and_validate_args(extra_args_provider=add_example_args)
    megatron_core = f"Megatron-core {core.__version__} from {Path(core.__file__).parent}"
    write_record(about=f"{megatron_core}\nFusedAdam: {fused_adam}")
    model = argument_utils.gpt_config_from_args(args)
    config = argument_utils.pretrain_cfg_container_from_args(args, model)
    model_type = core.enums.ModelType.encoder_or_decoder
    try:
        training.pretrain(config, build_datasets, model_type, forward_step)
    finally:  # --exit-interval leaves pretrain() through SystemExit
        write_record(peak_bytes=torch.cuda.max_memory_allocated())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # a checkpoint's writer processes import this file, too
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train_rank()
    else:
        sys.exit(launch_all())
