"""The smallest real training run: a two-layer GPT through Megatron's own entry points.

`train` is a case for `tests.rank_pool`: it parses arguments, initializes, builds model and
optimizer (loading a checkpoint if told to), steps, saves, and returns what there is to compare, as
plain data: losses, gradient norms, and a digest of every tensor of the training state. Two runs are
the same run if their states are equal.

The data of an iteration depends on the iteration and the data-parallel rank only, so that a resumed
run sees what an uninterrupted one sees.

Megatron is imported inside the functions: pytest imports this module, and must stay without it.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_VOCABULARY = 255

# Fusions that need compiled kernels of Apex or Transformer Engine are off. The learning rate
# decays, so that a scheduler that is not resumed changes the result.
ARGUMENTS = shlex.split(f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --transformer-impl local
    --attention-dropout 0 --hidden-dropout 0
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style linear --train-iters 20
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion
    --tokenizer-type NullTokenizer --vocab-size {_VOCABULARY} --mock-data
    --eval-iters 0 --save-interval 1000 --log-interval 1 --ckpt-format torch_dist
""")

REPLICATED = ("--bf16",)
"""Each rank steps all params, in their shapes."""
BF16 = (*REPLICATED, "--use-distributed-optimizer")
FP16 = ("--fp16", "--use-distributed-optimizer")
MOE = shlex.split("""
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear
""")


@dataclass(frozen=True, slots=True)
class State:
    """Everything a run leaves behind on one rank, in comparable form.

    `tensors` maps `model/NAME`, `main/PLACE` and `MOMENT/PLACE` to sha256 digests; a PLACE names
    chained optimizer, param group and position. `scalars` has the step of each param group, the
    loss scaler's state and the scheduler's.
    """

    tensors: dict[str, str]
    scalars: dict[str, Any]

    def differences(self, other: State) -> list[str]:
        """Return the names whose values differ or that only one of the states has."""
        ours, theirs = {**self.tensors, **self.scalars}, {**other.tensors, **other.scalars}
        missing = object()
        return sorted(
            name
            for name in ours.keys() | theirs.keys()
            if ours.get(name, missing) != theirs.get(name, missing)
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What `train` returns from one rank.

    `losses` is empty on pipeline stages that compute none. `initial` is the state of the model
    before the first step and, with `load`, after loading. `device_nbytes` is what stays on the
    device after the last step, `max_device_nbytes` the peak of the steps.
    """

    first_iteration: int
    initial: State
    final: State
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    num_zeros: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    num_params: int = 0
    device_nbytes: int = 0
    max_device_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """One tensor of the optimizer's state and the name to compare it under."""

    name: str
    tensor: torch.Tensor


def inner_optimizers(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers that own mains, however deeply they are chained, with their names.

    A chain of one is no level of its own: a streamed run has one more around everything.
    """
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        if optimizer.optimizer is not None:  # a model or a part of it may be frozen
            yield "", optimizer
        return
    if len(chained) == 1:
        yield from inner_optimizers(chained[0])
        return
    for index, each in enumerate(chained):
        for name, inner in inner_optimizers(each):
            yield f"{index}.{name}" if name else f"{index}", inner


def resident_tensors(optimizer: Any) -> Iterator[OptimizerTensor]:
    """Yield mains and moments of an optimizer that keeps them in `param_groups` and `state`."""
    for name, inner in inner_optimizers(optimizer):
        for group_index, group in enumerate(inner.optimizer.param_groups):
            for index, main in enumerate(group["params"]):
                place = f"{name or 0}/{group_index}/{index}"
                yield OptimizerTensor(f"main/{place}", main)
                state = inner.optimizer.state.get(main, {})
                for key, value in sorted(state.items()):
                    if isinstance(value, torch.Tensor):
                        yield OptimizerTensor(f"{key}/{place}", value)


def digest(tensor: torch.Tensor) -> str:
    """Return the sha256 of dtype, shape and bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + flat.numpy().tobytes()).hexdigest()


def digest_of_param(param: torch.Tensor) -> str:
    """Return the digest of a model param; of a quantised one, of its bytes and their scales."""
    for data, scales in (("_rowwise_data", "_rowwise_scale_inv"), ("_data", "_scale_inv")):
        if getattr(param, data, None) is not None:
            return f"{digest(getattr(param, data))} {digest(getattr(param, scales))}"
    return digest(param)


def state_of(
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    optimizer_tensors: Callable[[Any], Iterator[OptimizerTensor]] = resident_tensors,
) -> State:
    """Take the digests of a training state."""
    tensors = {
        f"model/{chunk}.{name}": digest_of_param(param)
        for chunk, module in enumerate(model)
        for name, param in module.named_parameters()
    }
    tensors |= {each.name: digest(each.tensor) for each in optimizer_tensors(optimizer)}
    scalars: dict[str, Any] = {"scheduler": scheduler.num_steps}
    for name, inner in inner_optimizers(optimizer):
        for index, group in enumerate(inner.optimizer.param_groups):
            if group["params"]:  # a rank without a shard of a group does not count its steps
                scalars[f"step/{name or 0}/{index}"] = group.get("step")
        if inner.grad_scaler is not None:
            scaler = inner.grad_scaler.state_dict()
            scalars[f"scaler/{name or 0}"] = {key: _as_number(scaler[key]) for key in scaler}
    return State(tensors, scalars)


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def train(
    arguments: Sequence[str],
    until: int,
    *,
    save: str | None = None,
    load: str | None = None,
    after_setup: Callable[[Sequence[Any], Any], None] | None = None,
    optimizer_tensors: Callable[[Any], Iterator[OptimizerTensor]] = resident_tensors,
) -> Run:
    """Train up to iteration `until` as one rank, and return the state.

    Args:
        arguments: Megatron's command line, beyond `ARGUMENTS`.
        until: number of the iteration after the last one.
        save: directory to write a checkpoint of the end into.
        load: directory to resume from.
        after_setup: called with model chunks and optimizer before the first step, for faults.
        optimizer_tensors: tells where the optimizer's tensors are.

    Returns:
        The comparable outcome.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
    from megatron.core.enums import ModelType
    from megatron.training import get_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.checkpointing import save_checkpoint
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    if save is not None:
        # Its process; a save starts one that imports torch (4 s), where there is none. Now, as
        # `init_persistent_async_worker` does, this process has no threads and no sockets.
        get_write_results_queue(mp_mode="fork")
    directories = [*(("--save", save) if save else ()), *(("--load", load) if load else ())]
    sys.argv = ["gpt.py", *ARGUMENTS, *arguments, *directories]
    parse_and_validate_args()
    initialize_megatron()
    model, optimizer, scheduler = setup_model_and_optimizer(
        model_type=ModelType.encoder_or_decoder, model_provider_func=build_model
    )
    if after_setup is not None:
        after_setup(model, optimizer)
    run = Run(
        first_iteration=get_args().iteration,
        initial=state_of(model, optimizer, scheduler, optimizer_tensors),
        final=State({}, {}),
    )
    torch.cuda.reset_peak_memory_stats()
    for iteration in range(run.first_iteration, until):
        _step(iteration, model, optimizer, scheduler, run)
    max_device_nbytes = torch.cuda.max_memory_allocated()
    _gather_params(model, until - run.first_iteration)
    device_nbytes = torch.cuda.memory_allocated()
    if save is not None:
        save_checkpoint(until, model, optimizer, scheduler, 0, checkpointing_context={})
    return Run(
        first_iteration=run.first_iteration,
        initial=run.initial,
        final=state_of(model, optimizer, scheduler, optimizer_tensors),
        losses=run.losses,
        grad_norms=run.grad_norms,
        num_zeros=run.num_zeros,
        skipped=run.skipped,
        num_params=sum(param.numel() for chunk in model for param in chunk.parameters()),
        device_nbytes=device_nbytes,
        max_device_nbytes=max_device_nbytes,
    )


def build_model(pre_process: bool = True, post_process: bool = True, **kwargs: Any) -> Any:
    """Build one pipeline stage; the provider that `setup_model_and_optimizer` calls."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = kwargs.get("config") or core_transformer_config_from_args(args)
    use_te = args.transformer_impl == "transformer_engine"
    spec = get_gpt_layer_with_transformer_engine_spec if use_te else get_gpt_layer_local_spec
    layer = spec(num_experts=args.num_experts, moe_grouped_gemm=args.moe_grouped_gemm)
    vp_stage = kwargs.get("vp_stage")
    mtp = None
    if args.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, layer, use_te, vp_stage=vp_stage)
    return GPTModel(
        config,
        layer,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )


def _step(iteration: int, model: Sequence[Any], optimizer: Any, scheduler: Any, run: Run) -> None:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.utils import get_model_config
    from megatron.training.training import train_step

    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    for chunk in model:
        chunk.train()
    iterators = [RerunDataIterator(batches(iteration)) for _ in model]
    losses, skipped, _, _, _, grad_norm, num_zeros, *_ = train_step(
        forward_step,
        iterators if len(iterators) > 1 else iterators[0],
        model,
        optimizer,
        scheduler,
        config,
        get_forward_backward_func(),
        iteration=iteration,
    )
    run.losses.extend(float(loss) for loss in losses.values())
    run.grad_norms.append(None if grad_norm is None else float(grad_norm))
    run.num_zeros.append(None if num_zeros is None else float(num_zeros))
    run.skipped.append(bool(skipped))


def batches(iteration: int) -> Iterator[torch.Tensor]:
    """Yield micro batches of tokens that depend on iteration and data-parallel rank only."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    generator = torch.Generator()
    generator.manual_seed(1000 * iteration + parallel_state.get_data_parallel_rank())
    shape = (args.micro_batch_size, args.seq_length)
    while True:
        yield torch.randint(0, _VOCABULARY, shape, generator=generator)


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """Run the model on the next micro batch; Megatron's `forward_step_func`."""
    tokens = next(data).cuda()
    length = tokens.size(1)
    positions = torch.arange(length, device="cuda").unsqueeze(0).expand_as(tokens)
    mask = torch.ones(1, 1, length, length, device="cuda").triu(1).bool()
    return model(tokens, positions, mask, labels=tokens), _mean_loss


def _mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def _gather_params(model: Sequence[Any], num_steps: int) -> None:
    """With overlapped param gather the model is behind its mains until the next forward."""
    from megatron.training import get_args
    from megatron.training.training import should_disable_forward_pre_hook

    if num_steps > 0 and should_disable_forward_pre_hook(get_args()):
        for chunk in model:
            chunk.disable_forward_pre_hook()
