"""What cannot be streamed is refused by name, with the reason and what to do instead."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store import arguments, config

SOUND: dict[str, Any] = {
    "stream_optimizer_state_to_disk": True,
    "defer_main_param_initialization": True,
    "stream_optimizer_state_dir": None,
    "stream_optimizer_state_bucket_numel": 1000,
    "use_distributed_optimizer": True,
    "optimizer": "adam",
    "bf16": True,
    "fp16": False,
    **{name: False for name, _, _ in config._REFUSED},
}


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
    ({"stream_optimizer_state_dir": "a,b"}, "give one"),
    ({"stream_optimizer_state_bucket_numel": 0}, "expected a positive number"),
    ({"stream_optimizer_state_bucket_numel": 1.5}, "expected a positive number"),
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
    "stream_optimizer_state_to_disk": True,
    "stream_optimizer_state_dir": None,
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
        {"stream_optimizer_state_to_disk": False, "stream_optimizer_state_dir": "/x"},
        "--stream-optimizer-state-dir has no effect without",
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
    parsed = arguments.add_arguments(argparse.ArgumentParser()).parse_args([])

    assert set(vars(parsed)) == {
        "stream_optimizer_state_to_disk",
        "stream_optimizer_state_dir",
        "stream_optimizer_state_bucket_numel",
    }


def test_the_default_directory_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/local")
    assert str(config.default_directory()).startswith("/local/megatron_optimizer_state_")
    monkeypatch.delenv("SCRATCH")
    assert str(config.default_directory()).startswith("/scratch/megatron_optimizer_state_")
    assert config.store_config(_config(stream_optimizer_state_dir="/x")).directory == Path("/x")
