"""A plan has the bytes of a real store."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.optimizer.nvme_state_store.budgets import Budgets
from megatron.core.optimizer.nvme_state_store.config import StoreConfig
from megatron.core.optimizer.nvme_state_store.formats import main_format, moment_format
from megatron.core.optimizer.nvme_state_store.layout import make_layout
from megatron.core.optimizer.nvme_state_store.plan.choices import ALL_FORMATS
from megatron.core.optimizer.nvme_state_store.plan.machine import Machine
from megatron.core.optimizer.nvme_state_store.plan.memory import stream
from megatron.core.optimizer.nvme_state_store.plan.model import model_of_numbers
from megatron.core.optimizer.nvme_state_store.plan.ranks import Parallel, largest_rank
from megatron.core.optimizer.nvme_state_store.working_set import WorkingSet

from tests.store.plans import ADAM, PLAIN, PREFIX, only, plan


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


def test_a_host_tier_that_a_start_would_refuse_does_not_fit() -> None:
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


def test_auto_is_what_a_start_would_find() -> None:
    made = plan(*PLAIN, "--host-gb", 20, f"{PREFIX}host-gb", "auto")
    # 20 GB less 8 that stay free, less four slots of 0.6; 15 buckets of 0.6 fit.
    assert only(made)["host_tier_bytes"] == pytest.approx(9.6e9, abs=0.61e9)


def test_the_stores_of_a_rank_share_its_slots() -> None:
    """Of a mixture of experts: both together have what a model of one store has."""
    for arguments in (["--params", "4e9"], ["--params", "4e9", "--expert-params", "3e9"]):
        made = only(plan(*arguments, "--dp", "8", "--ep", "8" if len(arguments) > 2 else "1"))
        assert made["device"]["slots"] == pytest.approx(2.4e9, rel=0.01)
        assert made["host_bytes"] == pytest.approx(2.4e9, rel=0.01)
