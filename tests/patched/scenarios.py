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

    `bucket_numel` is the cap of a bucket; `native_fp32` keeps these params of the model in
    FP32; `after_setup` runs in both. With `is_torch` Megatron takes the optimizers that it
    takes where neither Transformer Engine nor Apex is installed. If there are `trainable`
    names, all params without one of them are frozen. `config` changes fields of the config from
    which the inner optimizer is made, `whole` those for which Megatron has no flag. With
    `is_resumed` the streamed run is saved, and loaded in fresh processes; what `after_setup`
    changes starts anew then. `streaming` are more flags of the store, of the resumed run
    `resumed_with` if it is given; `DIR` in them is its directory. `shows` says what the row is in
    the table of combinations.
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
    whole: Mapping[str, Any] = field(default_factory=dict)
    is_resumed: bool = True
    streaming: Sequence[str] = ()
    resumed_with: Sequence[str] | None = None
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


def set_fields_without_a_flag(changes: Mapping[str, Any]) -> None:
    """Give the config of the whole run fields that no argument sets; frameworks set them."""
    from megatron.core.optimizer import OptimizerConfig

    check = OptimizerConfig.__post_init__

    def change_and_check(self: Any) -> None:
        vars(self).update(changes)
        check(self)

    OptimizerConfig.__post_init__ = change_and_check


def complete_adaptive_muon() -> None:
    """Give upstream's class what the package's step asks for since 0.3.0; upstream wants 0.2.0."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon

    assert not hasattr(TensorParallelAdaptiveMuon, "scale_mode")
    TensorParallelAdaptiveMuon.scale_mode = "spectral"
    TensorParallelAdaptiveMuon.extra_scale_factor = 1.0


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
    if "adaptive_muon" in scenario.arguments:
        complete_adaptive_muon()
    if scenario.whole:
        set_fields_without_a_flag(scenario.whole)
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
        more = scenario.streaming
        if kwargs.get("load") and scenario.resumed_with is not None:
            more = scenario.resumed_with
        arguments += streaming.flags(directory, scenario.bucket_numel)
        arguments += [each.replace("DIR", directory) for each in more]
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


def offload_and_restore(model: Sequence[Any], optimizer: Any) -> None:
    """What RL frameworks do between training and inference."""
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()


TINY = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --make-vocab-size-divisible-by 16"
OVERFLOWING = ("--initial-loss-scale", str(2**19), "--hysteresis", "1")
# The first steps overflow, so that state which is made in the first step is made later.
OVERFLOWING_AT_FIRST = ("--initial-loss-scale", str(2**22), "--hysteresis", "1")
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
MUON = ("--optimizer", "muon")
LAYER_WISE = (*gpt.BF16, *MUON)
PING_PONG = (*LAYER_WISE, "--no-use-layer-wise-param-layout")
EP2 = (*gpt.MOE, "--expert-model-parallel-size", "2")
VPP = (*PP2, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
COUNT_ZEROS = "--log-num-zeros-in-grad"
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
        "offloaded",
        2,
        NATIVE.arguments,
        native_fp32=NATIVE.native_fp32,
        after_setup=offload_and_restore,
        shows="offload_to_cpu and restore_from_cpu before the first step, some params in FP32",
    ),
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
        is_resumed=False,
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

WHOLE_PARAMS = [
    Scenario(
        "adam-replicated", 2, gpt.REPLICATED, 1000, shows="Adam without the distributed optimizer"
    ),
    Scenario(
        "adam-replicated-fp16",
        1,
        ["--fp16", *OVERFLOWING],
        native_fp32=("layernorm",),
        shows="the same in FP16 with skipped steps, some params in FP32",
    ),
    Scenario(
        "adam-replicated-ep2-tp2",
        4,
        [*gpt.REPLICATED, *EP2, *TP2, "--sequence-parallel", "--expert-tensor-parallel-size", "1"],
        shows="the same with EP 2, TP 2 and ETP 1",
    ),
    Scenario(
        "sgd-replicated",
        2,
        [*gpt.REPLICATED, "--optimizer", "sgd", "--lr", "1"],
        shows="SGD with momentum, without the distributed optimizer",
    ),
    Scenario(
        "muon-replicated",
        1,
        [*gpt.REPLICATED, *MUON],
        shows="Muon without the distributed optimizer, Adam beside it",
    ),
    Scenario(
        "muon-replicated-experts",
        2,
        [*gpt.REPLICATED, *MUON, *EP2],
        shows="the same with experts (EP 2)",
    ),
    Scenario("muon", 2, LAYER_WISE, shows="Muon, layer-wise; sharded Adam beside it"),
    Scenario(
        "muon-one-bucket",
        4,
        [*LAYER_WISE, "--muon-nesterov", "--muon-no-split-qkv", "--ddp-num-buckets", "1"],
        bucket_numel=10**6,
        shows="the same in one bucket, with Nesterov's momentum",
    ),
    Scenario(
        "muon-native-fp32",
        2,
        [*PING_PONG, *gpt.MOE, "--moe-router-dtype", "fp32"],
        native_fp32=("layernorm", "router.weight"),
        shows="Muon and Adam, layer-wise without a param layout, experts, some params in FP32",
    ),
    Scenario(
        "muon-lion",
        2,
        [*LAYER_WISE, "--muon-scalar-optimizer", "lion"],
        shows="Muon, layer-wise; sharded Lion beside it",
    ),
    Scenario(
        "muon-lion-ping-pong",
        2,
        [*PING_PONG, "--muon-scalar-optimizer", "lion"],
        shows="Muon and Lion, layer-wise without a param layout",
    ),
    Scenario(
        "muon-tp2",
        4,
        [*LAYER_WISE, *TP2, "--muon-tp-mode", "distributed"],
        shows="Muon with TP 2 and DP 2, orthogonalised together by the TP ranks (distributed)",
    ),
    Scenario(
        "muon-tp2-duplicated",
        2,
        [*gpt.REPLICATED, *MUON, *TP2, "--muon-tp-mode", "duplicated"],
        shows="the same without the distributed optimizer (duplicated)",
    ),
    Scenario("muon-tp2-blockwise", 2, [*LAYER_WISE, *TP2], shows="the same, each rank its block"),
    # The two TP ranks have other experts, so other buckets of them.
    Scenario(
        "muon-tp2-experts",
        4,
        [
            *(*PING_PONG, *gpt.MOE, *TP2, "--sequence-parallel", "--muon-tp-mode", "duplicated"),
            *("--expert-tensor-parallel-size", "1", "--num-experts", "3", "--moe-layer-freq", "1"),
        ],
        shows="Muon with TP 2 and ETP 1: TP ranks that have other experts",
    ),
    Scenario(
        "muon-ep2",
        4,
        [*PING_PONG, *EP2],
        shows="Muon with EP 2 and DP 4, without a param layout",
    ),
    Scenario("muon-ep2-layout", 4, [*LAYER_WISE, *EP2], shows="the same with a param layout"),
    Scenario("muon-pp2", 2, [*LAYER_WISE, *PP2], shows="Muon with PP 2, tied embeddings"),
    Scenario(
        "muon-virtual-pipeline",
        4,
        [*LAYER_WISE, *VPP, *OVERLAPPED, "--global-batch-size", "8"],
        shows="Muon with PP 2 and virtual stages, DP 2, overlapped",
    ),
    Scenario(
        "muon-overlapped",
        2,
        [*LAYER_WISE, *OVERLAPPED, "--ddp-bucket-size", "20000"],
        shows="Muon, gradient reduction and param gather overlapped",
    ),
    Scenario(
        "muon-ping-pong-overlapped",
        2,
        [*PING_PONG, *OVERLAPPED, "--ddp-bucket-size", "20000"],
        shows="the same without a param layout",
    ),
    Scenario(
        "muon-cp2",
        4,
        [*LAYER_WISE, "--context-parallel-size", "2"],
        shows="Muon with CP 2 and DP 2 (attention within a rank's part: the local one knows no CP)",
    ),
    Scenario(
        "muon-shared-experts",
        2,
        [*PING_PONG, *EP2, "--moe-shared-expert-intermediate-size", "64"],
        shows="Muon with shared experts, EP 2",
    ),
    Scenario(
        "muon-mtp-detached",
        2,
        [*PING_PONG, *MTP, "--mtp-detach-heads", "--clip-grad", "0.05", COUNT_ZEROS],
        shows="Muon without a param layout, detached MTP heads clipped by a norm of their own",
    ),
    Scenario(
        "muon-mtp",
        2,
        [*LAYER_WISE, *MTP, "--muon-scale-mode", "unit_rms_norm"],
        shows="Muon with multi-token prediction",
    ),
    Scenario(
        "muon-partly-frozen",
        4,
        LAYER_WISE,
        trainable=("linear_proj.weight", "linear_fc2.bias"),
        shows="Muon, LoRA-style: a few params train; some ranks have none of them",
    ),
    Scenario(
        "adaptive-muon",
        2,
        [*gpt.BF16, "--optimizer", "adaptive_muon"],
        shows="AdaptiveMuon (elementwise second moments)",
    ),
    Scenario(
        "adaptive-muon-rows",
        2,
        [*gpt.BF16, "--optimizer", "adaptive_muon"],
        whole={"adaptive_muon_moment2_method": "normuon"},
        shows="the same with second moments of rows and columns",
    ),
    Scenario(
        "lion-alone", 2, [*gpt.BF16, "--optimizer", "lion"], shows="Lion, layer-wise, beside Adam"
    ),
    Scenario(
        "soap",
        2,
        [*gpt.BF16, "--optimizer", "soap"],
        shows="SOAP, layer-wise: four more matrices of other shapes for each param",
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
        "overlapped-with-the-step",
        4,
        [*gpt.BF16, *VPP, *OVERLAPPED, "--global-batch-size", "8"],
        whole={"overlap_param_gather_with_optimizer_step": True},
        shows="the param gather of the first model chunk overlapped with the step of the others",
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

HOST_GB = "--stream-optimizer-state-host-gb"
DEVICE_GB = "--stream-optimizer-state-device-gb"
THREE_TIERS = (
    *(HOST_GB, "0.0003", DEVICE_GB, "0.0001"),
    *("--stream-optimizer-state-dir", "DIR/one,DIR/two"),
)
"""Of 0.0008 GB of state of one rank; the rest is striped over two directories."""
SPLIT = ("--stream-optimizer-state-main-storage", "split")

ENGINE = [
    Scenario(
        "host-tier",
        2,
        gpt.BF16,
        # Nobody could make this directory.
        streaming=[HOST_GB, "1", "--stream-optimizer-state-dir", "/proc/nothing"],
        shows="all state in the host tier, no directory",
    ),
    Scenario(
        "device-tier", 2, gpt.BF16, streaming=[DEVICE_GB, "1"], shows="all state in the device tier"
    ),
    Scenario(
        "three-tiers",
        1,
        gpt.BF16,
        streaming=THREE_TIERS,
        shows="device, host and disk tier, two directories",
    ),
    Scenario(
        "other-tiers",
        2,
        gpt.BF16,
        streaming=THREE_TIERS,
        resumed_with=["--stream-optimizer-state-ahead-gb", "1"],
        shows="the same, resumed from disk with a host slot for each bucket",
    ),
    Scenario(
        "auto-tiers",
        2,
        gpt.BF16,
        streaming=[HOST_GB, "auto", DEVICE_GB, "auto"],
        shows="tiers of what is free",
    ),
    Scenario(
        "sync-engine",
        2,
        gpt.BF16,
        streaming=[
            *("--stream-optimizer-state-engine", "sync", "--stream-optimizer-state-io", "buffered"),
            *("--stream-optimizer-state-chunk-mb", "1"),
        ],
        resumed_with=["--stream-optimizer-state-engine", "threads"],
        shows="the synchronous engine and buffered I/O, resumed with threads",
    ),
    Scenario(
        "split",
        2,
        gpt.BF16,
        streaming=[*SPLIT, *THREE_TIERS],
        resumed_with=SPLIT,
        shows="main params without what the BF16 params have (split)",
    ),
    Scenario(
        "split-tp2-experts",
        2,
        [*gpt.BF16, *gpt.MOE, *TP2, "--sequence-parallel"],
        native_fp32=("layernorm",),
        streaming=[*SPLIT, HOST_GB, "0.0002"],
        shows="the same with TP 2 and experts, some params in FP32",
    ),
    Scenario(
        "muon-tiers",
        4,
        [*LAYER_WISE, *TP2, "--muon-tp-mode", "distributed"],
        streaming=[*SPLIT, *THREE_TIERS],
        shows="Muon with TP 2 and DP 2, split, in all tiers",
    ),
]
"""How the state is stored and moved makes no difference."""

GROUPS = {
    "Optimizers": OPTIMIZERS,
    "Whole params": WHOLE_PARAMS,
    "Parallelism": PARALLELISM,
    "Models": MODELS,
    "Shards and buckets": BUCKETS,
    "Storage and engine": ENGINE,
}
SCENARIOS = [scenario for group in GROUPS.values() for scenario in group]


def by_name(name: str) -> Scenario:
    """Return the scenario of this name."""
    (scenario,) = (each for each in SCENARIOS if each.name == name)
    return scenario
