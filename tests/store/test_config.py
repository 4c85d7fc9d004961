"""What cannot be streamed is refused by name, with the reason and what to do instead."""

from __future__ import annotations

import argparse
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store import arguments, config

SOUND: dict[str, Any] = {
    **arguments._DEFAULTS,
    "stream_optimizer_state_to_disk": True,
    "defer_main_param_initialization": True,
    "use_distributed_optimizer": True,
    "optimizer": "adam",
    "bf16": True,
    "fp16": False,
    **{name: False for name, _, _ in config._REFUSED},
}


FIELD = "stream_optimizer_state"


def _config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**(SOUND | changes))


def test_a_field_that_upstream_renamed_is_not_passed_over() -> None:
    renamed = _config()
    del renamed.optimizer_cpu_offload

    with pytest.raises(AttributeError, match="optimizer_cpu_offload"):
        config.validate_optimizer_config(renamed)


def test_a_sound_configuration_passes_and_a_stock_one_is_not_looked_at() -> None:
    config.validate_optimizer_config(_config())
    config.validate_optimizer_config(
        _config(
            stream_optimizer_state_to_disk=False,
            defer_main_param_initialization=False,
            optimizer_cuda_graph=True,
        )
    )
    for optimizer in ("sgd", "muon", "soap"):
        config.validate_optimizer_config(
            _config(optimizer=optimizer, use_distributed_optimizer=False)
        )


def config_refusal(changes: dict[str, Any]) -> str:
    """Return why a configuration is refused."""
    with pytest.raises(ValueError, match="stream") as caught:
        config.validate_optimizer_config(_config(**changes))
    return str(caught.value)


def arguments_refusal(changes: dict[str, Any]) -> str:
    """Return why arguments are refused."""
    with pytest.raises(ValueError, match="--stream-optimizer-state") as caught:
        arguments.validate_arguments(SimpleNamespace(**(ARGUMENTS | changes)))
    return str(caught.value)


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"defer_main_param_initialization": False}, "needs defer_main_param_initialization"),
    ({"stream_optimizer_state_to_disk": False}, "needs stream_optimizer_state_to_disk"),
    ({"optimizer": "sgd"}, "--optimizer sgd under the distributed optimizer"),
    ({"bf16": False}, "needs 16-bit params"),
    ({"bf16": False, "fp16": True, f"{FIELD}_main_storage": "split"}, "split needs --bf16"),
    ({f"{FIELD}_dir": "a,b,a"}, "-dir a,b,a: expected different directories"),
    ({f"{FIELD}_dir": "/a,/b/../a"}, "expected different directories"),
    ({f"{FIELD}_dir": "a,"}, "separated by single commas"),
    ({f"{FIELD}_dir": ",a"}, "separated by single commas"),
    ({f"{FIELD}_dir": "a,,b"}, "separated by single commas"),
    ({f"{FIELD}_dir": ","}, "separated by single commas"),
    *(
        ({f"{FIELD}_bucket_numel": value}, f"-bucket-numel {value}: expected a positive number")
        for value in (0, -1, 1.5, True, None, "1")
    ),
    *(
        ({f"{FIELD}_chunk_mb": value}, f"-chunk-mb {value}: expected a positive number of MiB")
        for value in (0, -8, 0.5, True, None)
    ),
    *(
        ({f"{FIELD}_{budget}_gb": value}, f"-{budget}-gb {value}: expected a number of GB, or auto")
        for budget in ("host", "device")
        for value in (-1, float("nan"), float("inf"), True, None, "1", "all")
    ),
    *(
        ({f"{FIELD}_ahead_gb": value}, f"-ahead-gb {value}: expected a number of GB")
        for value in (-0.5, float("nan"), "auto")
    ),
    (
        {f"{FIELD}_moment_dtype": "fp8"},
        "-moment-dtype fp8: expected one of fp32, bf16, fp16, fp8e4",
    ),
    ({f"{FIELD}_main_storage": "bf16"}, "-main-storage bf16: expected one of fp32, split"),
    ({f"{FIELD}_io": "uring"}, "-io uring: expected one of auto, direct, buffered"),
    ({f"{FIELD}_engine": "async"}, "-engine async: expected one of threads, sync"),
    ({"use_precision_aware_optimizer": True}, "leave out --use-precision-aware-optimizer"),
    ({"optimizer_cpu_offload": True}, "leave out --optimizer-cpu-offload"),
    ({"optimizer_cuda_graph": True}, "leave out --optimizer-cuda-graph"),
    ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "leave out --reuse-grad-buf-for-mxfp8"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_CONFIGS)
def test_a_configuration_that_cannot_stream_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    assert message in config_refusal(changes)


ARGUMENTS: dict[str, Any] = {
    **arguments._DEFAULTS,
    "stream_optimizer_state_to_disk": True,
    "ckpt_format": "torch_dist",
    "non_persistent_ckpt_type": None,
    "fp8_param_gather": False,
    "fp8_recipe": "delayed",
    "stream_ckpt_dequant": True,
    **{name: False for name, _, _ in arguments._REFUSED},
}


REFUSED_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"fp8_param_gather": True}, "add --no-stream-ckpt-dequant"),
    (
        {"fp8_param_gather": True, "fp8_recipe": "mxfp8"},
        "gathered in the memory of the gradients",
    ),
    ({"fp4_param_gather": True}, "leave out --fp4-param-gather"),
    ({"overlap_param_gather_with_optimizer_step": True}, "with --ckpt-format torch only"),
    ({"use_megatron_fsdp": True}, "Megatron-FSDP owns"),
    ({"use_torch_fsdp2": True}, "FSDP2 owns"),
    ({"qk_clip": True}, "leave out --qk-clip"),
    ({"ckpt_convert_format": "torch"}, "convert in a run without streaming"),
    ({"dist_ckpt_optim_fully_reshardable": True}, "in a format of its own"),
    ({"ckpt_format": "torch"}, "use --ckpt-format torch_dist"),
    ({"ckpt_format": "fsdp_dtensor"}, "use --ckpt-format torch_dist"),
    ({"non_persistent_ckpt_type": "local"}, "use global"),
    (
        {"fp8_param_gather": True, "fp8_recipe": "blockwise", f"{FIELD}_main_storage": "split"},
        "split cannot be used with --fp8-param-gather",
    ),
    *(
        (
            {f"{FIELD}_to_disk": False, f"{FIELD}_{name}": value},
            f"--stream-optimizer-state-{name.replace('_', '-')} has no effect without",
        )
        for name, value in {
            "dir": "/x",
            "moment_dtype": "bf16",
            "main_storage": "split",
            "host_gb": "auto",
            "device_gb": 1.0,
            "ahead_gb": 1.0,
            "bucket_numel": 1000,
            "io": "direct",
            "chunk_mb": 16,
            "engine": "sync",
        }.items()
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_ARGUMENTS)
def test_an_argument_that_would_read_evicted_state_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    assert message in arguments_refusal(changes)


@pytest.mark.parametrize("on", [True, False])
def test_the_flag_alone_switches_deferral(on: bool) -> None:
    fp8 = {"fp8_param_gather": True, "fp8_recipe": "blockwise"}
    args = SimpleNamespace(**(ARGUMENTS | fp8 | {"stream_optimizer_state_to_disk": on}))

    arguments.validate_arguments(args)

    assert args.defer_main_param_initialization is on


def test_every_flag_is_a_field_and_none_is_ignored() -> None:
    """Each without a value of its own is refused without streaming, and read with it."""
    parsed = arguments.add_arguments(argparse.ArgumentParser()).parse_args([])
    read: set[str] = set()

    class Watched(SimpleNamespace):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    config.validate_optimizer_config(Watched(**SOUND))

    fields = {name for name in read if name.startswith(FIELD)}
    assert set(vars(parsed)) == fields
    tried = {name for changes, _ in REFUSED_ARGUMENTS for name in changes if FIELD in name}
    assert tried == fields, "each is refused above where it has no effect"
    assert fields - set(arguments._DEFAULTS) == {"stream_optimizer_state_to_disk"}


def test_the_defaults_of_the_flags_are_those_of_the_store() -> None:
    """Whoever makes a `StoreConfig` gets what the command line gives."""
    (directory,) = (defaults := config.store_config(_config())).directories
    assert directory == config.default_directory()
    assert defaults == config.StoreConfig((directory,))


def test_what_was_asked_for_is_what_the_store_gets() -> None:
    """In bytes and elements: nothing is rounded away silently."""
    flags = (
        "--stream-optimizer-state-to-disk --stream-optimizer-state-dir /a,b "
        "--stream-optimizer-state-moment-dtype fp8e4m3 --stream-optimizer-state-main-storage split "
        "--stream-optimizer-state-host-gb 1.5 --stream-optimizer-state-device-gb auto "
        "--stream-optimizer-state-ahead-gb 2 --stream-optimizer-state-bucket-numel 4000 "
        "--stream-optimizer-state-io direct --stream-optimizer-state-chunk-mb 3 "
        "--stream-optimizer-state-engine sync"
    )
    parsed = arguments.add_arguments(argparse.ArgumentParser()).parse_args(flags.split())

    assert config.store_config(_config(**vars(parsed))) == config.StoreConfig(
        directories=(Path("/a"), Path("b")),
        bucket_numel=1000,
        moment_dtype="fp8e4m3",
        main_storage="split",
        host_bytes=1_500_000_000,
        device_bytes=None,
        ahead_bytes=2_000_000_000,
        io="direct",
        chunk_bytes=3 << 20,
        engine="sync",
    )


@pytest.mark.parametrize("budget", ["", "much", "1GB", "Auto"])
def test_a_budget_that_is_no_number_is_refused_by_the_parser(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, with the name of the flag."""
    parser = arguments.add_arguments(argparse.ArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--stream-optimizer-state-host-gb", budget])
    assert "--stream-optimizer-state-host-gb: invalid" in capsys.readouterr().err


def test_buckets_share_what_is_on_the_device() -> None:
    """The cap is that of all slots; a bucket has at least an element."""
    for numel, expected in ((1, 1), (3, 1), (8, 2), (4001, 1000)):
        chosen = config.store_config(_config(stream_optimizer_state_bucket_numel=numel))
        assert chosen.bucket_numel == expected


def test_the_stores_of_a_rank_share_what_is_set_for_a_rank() -> None:
    """A small one has buckets of some size all the same, and any has at least an element."""
    whole = config.StoreConfig(directories=(), bucket_numel=3200, ahead_bytes=1000)

    def part(numerator: int, denominator: int) -> tuple[int, int]:
        found = whole.part(Fraction(numerator, denominator))
        return found.bucket_numel, found.ahead_bytes

    assert part(1, 1) == (3200, 1000)
    assert part(3, 4) == (2400, 750)
    assert part(1, 1000) == (100, 1)
    assert part(0, 1) == (100, 0)
    assert replace(whole, bucket_numel=1).part(Fraction(1, 2)).bucket_numel == 1


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("dir", Path("/local"), "expected a string of directories"),
        ("dir", 0, "expected a string of directories"),
        ("dir", ["/local"], "not a list"),
        ("host_gb", 1e300, "expected a number of GB, or auto"),
        ("ahead_gb", 1e305, "expected a number of GB"),
    ],
)
def test_a_config_made_in_code_is_refused_by_name(name: str, value: Any, expected: str) -> None:
    """Types that no command line gives."""
    with pytest.raises(ValueError, match=expected):
        config.store_config(_config(**{f"stream_optimizer_state_{name}": value}))


def test_the_default_directory_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/local")
    assert str(config.default_directory()).startswith("/local/megatron_optimizer_state_")
    monkeypatch.delenv("SCRATCH")
    assert str(config.default_directory()).startswith("/scratch/megatron_optimizer_state_")
    for chosen in (None, ""):
        found = config.store_config(_config(stream_optimizer_state_dir=chosen))
        assert found.directories == (config.default_directory(),)
