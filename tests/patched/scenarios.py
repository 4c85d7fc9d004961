"""Ways to train, each stock and streamed: the rows of `docs/compatibility.md` that stream.

A scenario that is not on Megatron's command line is brought about by `prepare`, in the process of
the case alone, where stock and streamed run see the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests import gpt, streaming
from tests.gpt import Run

UNTIL = 10
Setup = Callable[[Sequence[Any], Any], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A way to train, stock and streamed.

    `bucket_numel` is the cap of a bucket; `native_fp32` keeps these params of the model in FP32;
    `after_setup` runs in both. With `is_torch` Megatron takes the optimizers that it takes where
    neither Transformer Engine nor Apex is installed. If there are `trainable` names, all params
    without one of them are frozen. `config` changes fields of the config from which the inner
    optimizer is made. `shows` says what the row is in the table of combinations.
    """

    name: str
    world_size: int
    arguments: Sequence[str]
    bucket_numel: int = 20_000
    native_fp32: Sequence[str] = ()
    after_setup: Setup | None = None
    is_torch: bool = False
    trainable: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    shows: str = ""

    def is_trained(self, name: str) -> bool:
        """Return whether the param of this name trains."""
        return not self.trainable or any(each in name for each in self.trainable)


def keep_in_fp32(names: Sequence[str]) -> None:
    """Let params whose name contains one of ``names`` stay FP32 in a 16-bit model.

    Models do so by converting them back after `Float16Module` has cast everything; here the
    casts of the module class are taken, in a process that is this case's own.
    """
    from megatron.core.models.gpt import GPTModel

    def kept(cast: Callable[..., Any]) -> Callable[..., Any]:
        def cast_all_but(self: Any) -> Any:
            originals = {
                name: param.data.clone().float()
                for name, param in self.named_parameters()
                if any(each in name for each in names)
            }
            cast(self)
            for name, param in self.named_parameters():
                if name in originals:
                    param.data = originals[name]
            return self

        return cast_all_but

    for cast in ("bfloat16", "half"):
        setattr(GPTModel, cast, kept(getattr(GPTModel, cast)))


def freeze_all_but(scenario: Scenario) -> None:
    """Freeze params when the model is made, in a process that is this case's own."""
    from megatron.core.models.gpt import GPTModel

    construct = GPTModel.__init__

    def construct_frozen(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        for name, param in self.named_parameters():
            param.requires_grad = scenario.is_trained(name)

    GPTModel.__init__ = construct_frozen


def make_inner_optimizer_of(changes: Mapping[str, Any]) -> None:
    """Change the config of what `DistributedOptimizer` wraps.

    So does upstream itself for the optimizer of the params beside Muon's, which is the only way to
    Lion there (`_get_megatron_emerging_optimizer`: a copy of the config that names it). SGD it does
    not wrap at all, for its checkpoints; here it does, since streamed state has its own.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    build = optimizer._get_megatron_optimizer_based_on_param_groups

    def build_changed(config: Any, *args: Any, **kwargs: Any) -> Any:
        changed = copy.copy(config)
        vars(changed).update(changes)
        return build(changed, *args, **kwargs)

    optimizer._get_megatron_optimizer_based_on_param_groups = build_changed
    if changes.get("optimizer") == "sgd":
        distrib_optimizer.Adam = (distrib_optimizer.Adam, optimizer.SGD)  # what it asserts


def allow_local_attention_under_context_parallelism() -> None:
    """Let the local attention see its own part of the sequence only, instead of refusing that.

    The model is another one then, but its optimizer shards over the same groups.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    construct = DotProductAttention.__init__

    def construct_alone(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        construct(self, alone, *args, **kwargs)

    DotProductAttention.__init__ = construct_alone


def allow_local_norm_under_sequence_parallelism() -> None:
    """Let torch's norm have sharded sequences: its gradients are reduced as for Apex's norm."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    construct = WrappedTorchNorm.__new__

    def construct_alone(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = construct(cls, alone, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = construct_alone


def prepare(scenario: Scenario) -> None:
    """Bring what a scenario is about into this process, which is the scenario's own."""
    if scenario.native_fp32:
        keep_in_fp32(scenario.native_fp32)
    if scenario.trainable:
        freeze_all_but(scenario)
    if scenario.config:
        make_inner_optimizer_of(scenario.config)
    if "--context-parallel-size" in scenario.arguments:
        allow_local_attention_under_context_parallelism()
    if "--sequence-parallel" in scenario.arguments:
        allow_local_norm_under_sequence_parallelism()
    if scenario.is_torch:
        from megatron.core import optimizer

        assert not optimizer.USING_PYTORCH_OPTIMIZER
        optimizer.USING_PYTORCH_OPTIMIZER = True


def train(scenario: Scenario, directory: str | None = None, **kwargs: Any) -> Run:
    """Train a scenario as one rank; streamed if there is a directory."""
    prepare(scenario)
    arguments = [*scenario.arguments]
    if directory is not None:
        arguments += streaming.flags(directory, scenario.bucket_numel)
        kwargs["optimizer_tensors"] = streaming.streamed_tensors
    kwargs.setdefault("after_setup", scenario.after_setup)
    return gpt.train(arguments, kwargs.pop("until", UNTIL), **kwargs)


def change_hyperparameters(model: Sequence[Any], optimizer: Any) -> None:
    """Give each step another lr, weight decay, betas and eps through the master groups."""
    step = optimizer.step
    count = iter(range(100))

    def changed_step() -> Any:
        number = next(count)
        for position, group in enumerate(optimizer.param_groups):
            group["lr"] *= 1 + 0.1 * position
            group["weight_decay"] = 0.01 * number * position
            group["betas"] = (0.9 - 0.01 * number, 0.99 - 0.01 * position)
            group["eps"] = 1e-8 * (1 + number)
        return step()

    optimizer.step = changed_step


TINY = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --make-vocab-size-divisible-by 16"
OVERFLOWING = ("--initial-loss-scale", str(2**19), "--hysteresis", "1")
# The first steps overflow, so that state which is made in the first step is made later.
OVERFLOWING_AT_FIRST = ("--initial-loss-scale", str(2**22), "--hysteresis", "1")
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
EP2 = (*gpt.MOE, "--expert-model-parallel-size", "2")
VPP = (*PP2, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather")

# Gradient norms of this model are about 1: 0.05 clips every step.
DP1 = Scenario("dp1", 1, gpt.BF16, shows="Adam (FusedAdam with decoupled weight decay)")
# The router's weight is a matrix, so that it decays.
NATIVE = Scenario(
    "native-fp32",
    2,
    [*gpt.BF16, *gpt.MOE, "--moe-router-dtype", "fp32"],
    native_fp32=("layernorm", "router.weight"),
    shows="some params in FP32, resident beside the streamed ones",
)
FP16 = Scenario(
    "fp16-overflow",
    1,
    [*gpt.FP16, *OVERFLOWING],
    native_fp32=("final_layernorm",),
    shows="FP16 with skipped steps",
)

OPTIMIZERS = [
    DP1,
    Scenario(
        "fused-adam-l2",
        2,
        gpt.BF16,
        config={"decoupled_weight_decay": False},
        shows="Adam (FusedAdam), decoupled_weight_decay off",
    ),
    Scenario(
        "torch-adamw",
        2,
        [*gpt.BF16, *TINY.split()],
        1000,
        ("layernorm",),
        is_torch=True,
        shows="Adam (torch's AdamW, without Transformer Engine and Apex)",
    ),
    Scenario(
        "torch-adam",
        2,
        [*gpt.BF16, *TINY.split()],
        1000,
        ("layernorm",),
        is_torch=True,
        config={"decoupled_weight_decay": False},
        shows="Adam (torch's Adam), decoupled_weight_decay off",
    ),
    Scenario(
        "lion",
        2,
        gpt.BF16,
        native_fp32=("layernorm",),
        config={"optimizer": "lion"},
        shows="Lion under the distributed optimizer (no flag of Megatron's selects it alone)",
    ),
    Scenario(
        "lion-overflow",
        1,
        [*gpt.FP16, *OVERFLOWING_AT_FIRST],
        config={"optimizer": "lion"},
        shows="the same with skipped first steps",
    ),
    Scenario(
        "lion-ep2-dp4",
        4,
        [*gpt.BF16, *EP2],
        config={"optimizer": "lion"},
        shows="the same with experts",
    ),
    Scenario(
        "sgd",
        2,
        gpt.BF16,
        native_fp32=("layernorm",),
        config={"optimizer": "sgd", "sgd_momentum": 0.0},
        shows="the engine with an optimizer without state (SGD, which Megatron itself refuses)",
    ),
    Scenario(
        "sgd-momentum",
        2,
        gpt.BF16,
        native_fp32=("layernorm",),
        config={"optimizer": "sgd", "sgd_momentum": 0.9},
        shows="the engine with state that the first step makes (SGD with momentum, likewise)",
    ),
    Scenario(
        "sgd-momentum-overflow",
        1,
        [*gpt.FP16, *OVERFLOWING_AT_FIRST, "--lr", "1"],
        config={"optimizer": "sgd", "sgd_momentum": 0.9},
        shows="the same with skipped first steps",
    ),
    Scenario(
        "hyperparameters",
        2,
        gpt.BF16,
        after_setup=change_hyperparameters,
        shows="lr, weight decay, betas and eps changed for each group at each step",
    ),
    Scenario(
        "decoupled-lr",
        2,
        [
            *(*gpt.BF16, "--untie-embeddings-and-output-weights"),
            *("--decoupled-lr", "5e-3", "--decoupled-min-lr", "1e-3"),
        ],
        shows="param groups with decoupled lr, untied embeddings",
    ),
    FP16,
    Scenario(
        "bf16-grads",
        2,
        [*gpt.BF16, "--grad-reduce-in-bf16", "--log-num-zeros-in-grad"],
        shows="gradients reduced in BF16",
    ),
    NATIVE,
]

BUCKETS = [
    Scenario("dp2-one-bucket", 2, gpt.BF16, bucket_numel=10**6, shows="one bucket"),
    Scenario(
        "dp2-many-buckets",
        2,
        [*gpt.BF16, "--clip-grad", "0.05"],
        bucket_numel=1000,
        shows="many buckets, clipped gradients",
    ),
    Scenario(
        "smallest-buckets",
        1,
        [*gpt.BF16, *TINY.split()],
        bucket_numel=1,
        shows="buckets of 64 elements",
    ),
    Scenario(
        "empty-shards",
        4,
        [*gpt.BF16, *TINY.split(), "--ddp-num-buckets", "1"],
        shows="ranks without any part of a param group",
    ),
]

PARALLELISM = [
    Scenario("tp2", 2, [*gpt.BF16, *TP2], shows="TP 2"),
    Scenario("pp2", 2, [*gpt.BF16, *PP2], shows="PP 2, embeddings tied across stages"),
    Scenario("tp2-pp2", 4, [*gpt.BF16, *TP2, *PP2], shows="TP 2 with PP 2"),
    Scenario(
        "virtual-pipeline",
        2,
        [*gpt.BF16, *VPP, "--global-batch-size", "4"],
        shows="PP 2 with virtual stages",
    ),
    Scenario(
        "virtual-pipeline-overlapped",
        4,
        [*gpt.BF16, *VPP, *OVERLAPPED, "--global-batch-size", "8"],
        shows="PP 2 with virtual stages, DP 2, overlapped",
    ),
    Scenario(
        "cp2",
        2,
        [*gpt.BF16, "--context-parallel-size", "2"],
        shows="CP 2 (attention within a rank's part: the local one knows no CP)",
    ),
    Scenario(
        "cp2-tp2",
        4,
        [*gpt.BF16, *TP2, "--context-parallel-size", "2"],
        shows="CP 2 with TP 2 (likewise)",
    ),
    Scenario(
        "ep2-dp4",
        4,
        [*gpt.BF16, *EP2, "--overlap-grad-reduce"],
        shows="EP 2, DP 4, gradient reduction overlapped",
    ),
    Scenario(
        "ep2-tp2",
        4,
        [*gpt.BF16, *EP2, *TP2, "--sequence-parallel", "--expert-tensor-parallel-size", "1"],
        shows="EP 2 with TP 2 and ETP 1 (sequence parallelism in name: the local spec has none)",
    ),
    Scenario(
        "etp2",
        4,
        [*gpt.BF16, *gpt.MOE, *TP2, "--sequence-parallel", "--expert-tensor-parallel-size", "2"],
        shows="ETP 2 with TP 2 (likewise)",
    ),
    Scenario(
        "ep2-pp2",
        4,
        [*gpt.BF16, *EP2, *PP2],
        shows="EP 2 with PP 2",
    ),
    Scenario(
        "overlapped",
        2,
        [*gpt.BF16, *OVERLAPPED, "--ddp-bucket-size", "20000"],
        shows="gradient reduction and param gather overlapped",
    ),
    Scenario(
        "optimizer-instances",
        4,
        [*gpt.BF16, "--num-distributed-optimizer-instances", "2"],
        shows="several distributed-optimizer instances",
    ),
]

MODELS = [
    Scenario("mtp", 2, [*gpt.BF16, *MTP], shows="multi-token prediction"),
    # Tied, upstream's last stage has an output weight that nothing uses.
    Scenario(
        "mtp-pp2",
        2,
        [*gpt.BF16, *PP2, *MTP, "--untie-embeddings-and-output-weights"],
        shows="multi-token prediction with PP 2, untied embeddings",
    ),
    Scenario(
        "shared-experts",
        2,
        [*gpt.BF16, *EP2, "--moe-shared-expert-intermediate-size", "64"],
        shows="shared experts with EP 2",
    ),
    Scenario(
        "partly-frozen",
        2,
        gpt.BF16,
        trainable=("linear_proj.weight", "linear_fc2.bias"),
        shows="LoRA-style: a few params train, the others are frozen",
    ),
    Scenario(
        "partly-frozen-experts",
        2,
        [*gpt.BF16, *EP2],
        trainable=("local_experts.1.linear_fc2",),
        shows="the same, only in some experts",
    ),
    # One param of eight elements: all ranks but the first have none of it.
    Scenario(
        "nothing-on-some-ranks",
        4,
        [*gpt.BF16, *TINY.split()],
        trainable=("final_layernorm.bias",),
        shows="one small param trains: some ranks have no part of it",
    ),
    Scenario(
        "nothing-on-a-pipeline-stage",
        2,
        [*gpt.BF16, *PP2],
        trainable=("final_layernorm",),
        shows="a pipeline stage that is frozen as a whole",
    ),
]

GROUPS = {
    "Optimizers": OPTIMIZERS,
    "Parallelism": PARALLELISM,
    "Models": MODELS,
    "Shards and buckets": BUCKETS,
}
SCENARIOS = [scenario for group in GROUPS.values() for scenario in group]


RESUMED = (
    *("torch-adam", "lion", "lion-ep2-dp4", "sgd", "sgd-momentum", "sgd-momentum-overflow"),
    *("partly-frozen-experts", "tp2-pp2", "optimizer-instances"),
)
"""Of these, runs that were saved and loaded are compared, too: with an uninterrupted stock run."""


def by_name(name: str) -> Scenario:
    """Return the scenario of this name."""
    (scenario,) = (each for each in SCENARIOS if each.name == name)
    return scenario
