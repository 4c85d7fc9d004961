"""The benchmarks' arithmetic, without a GPU: rates, limits of a small file, verdicts, tables."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.nvme_state_store.memory import address_of

from benchmarks import engine, figures, memory, processes, roofline, shared_disk, step
from benchmarks.cases import CASES
from benchmarks.measurement import streaming_fields
from benchmarks.raw_disk import PATTERNS, DiskProbe
from benchmarks.tables import group_table, markdown, peak_table, verdict_table
from benchmarks.transfers import Transfer, bytes_within, common_window, gigabytes_per_second
from benchmarks.verdicts import (
    Judge,
    Verdict,
    at_least_of_balanced_limit,
    at_least_of_limit,
    at_most_of_case,
    at_most_seconds,
    exposed_of_iteration,
    exposed_of_unbudgeted,
    peak_of_allowed,
    verdict,
)

OF_CASE = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.raw_disk.SETTLE_S", 0.02)


def result(**changes: Any) -> dict[str, Any]:
    """Return what a process of `step.py` prints: 20 GB of I/O in 10 s, where the disk has 2.5."""
    disk = {"mixed": 2.4, "balanced": 2.0}, {"mixed": 2.6, "balanced": 2.0}
    copies = {"duplex": 100.0}
    return {
        "params": 1000,
        "moment_dtype": None,
        "step_s": [8.0, 9.0],
        "iteration_s": [8.0, 9.0],
        "back_to_back_s": 10.0,
        "forward_backward_s": 0.0,
        "calls_read_gb": 10.0,
        "calls_wrote_gb": 10.0,
        "reports": [{"bytes_uploaded": 1e10, "bytes_downloaded": 1e10}] * 2,
        "limits": [{"disk": each, "copies": copies} for each in disk],
        "init_peak_gb": 11.0,
        "step_peak_gb": 12.0,
        "between_steps_gb": 10.0,
        "model_gb": 9.0,
        "slots_gb": 2.4,
        "disk_gb": 10.0,
        "device_gb": 0.6,
        "weights_after": {"1": "a", "3": "c"},
        "rank": 0,
        **changes,
    }


def judged(judge: Judge, *ranks: dict[str, Any], **others: Any) -> tuple[Any, Any]:
    """Return value and verdict of a bar."""
    results = {"mine": ranks or (result(),), **others}
    found = verdict("mine", results, judge).judgement
    assert found is not None
    return found.value, found.is_met


# -------------------------------------------------------------------------------------------- rates


def test_a_transfer_counts_by_the_part_of_it_that_lies_in_the_window() -> None:
    transfers = [
        Transfer("read", 0.0, 2.0, 100),
        Transfer("read", 3.0, 4.0, 8),
        Transfer("write", 9, 10, 5),
    ]

    assert bytes_within(transfers, 1.0, 3.5) == pytest.approx(50 + 4)
    rates = gigabytes_per_second(transfers, 0.0, 4.0)
    assert rates == {
        "read": pytest.approx(108 / 4e9),
        "write": 0.0,
        "total": pytest.approx(108 / 4e9),
    }


def test_the_common_window_is_where_every_kind_is_busy() -> None:
    transfers = [Transfer("up", 0.0, 4.0, 1), Transfer("down", 1.0, 3.0, 1)]

    assert common_window(transfers) == (1.0, 3.0)
    with pytest.raises(ValueError, match="empty"):
        gigabytes_per_second(transfers, 3.0, 3.0)


def test_a_probe_measures_every_pattern_and_leaves_no_file(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for each in directories:
        each.mkdir()

    with DiskProbe(directories, 4 << 20, threads=2, chunk_bytes=1 << 16) as probe:
        sizes = [path.stat().st_size for path in tmp_path.glob("*/*")]
        limit = probe.measure(0.05)

    assert sizes == [2 << 20] * 2
    assert limit.file_bytes == 4 << 20
    assert all((getattr(limit, name) or 0) > 0 for name in PATTERNS)
    assert not list(tmp_path.glob("*/*"))


def test_in_a_mixed_pattern_nobody_reads_what_is_being_written(tmp_path: Path) -> None:
    with DiskProbe([tmp_path], 1 << 20, threads=2, chunk_bytes=1 << 16) as probe:
        seen: list[tuple[str, int]] = []
        probe._transfer = lambda kind, index, *_: seen.append((kind, index))  # type: ignore[method-assign]
        with probe._mapped() as memory:
            probe._run("mixed", memory, end_s=time.monotonic() + 0.01)
            probe._run("balanced", memory, end_s=time.monotonic() + 0.01)

    assert {index for kind, index in seen if kind == "read"} <= set(range(8))
    assert {index for kind, index in seen if kind == "write"} <= set(range(8, 16))


def test_a_thread_walks_over_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that it had in hand a moment ago is in the processor's cache."""
    monkeypatch.setattr("benchmarks.raw_disk.MEMORY_BYTES", 6 << 16)
    with DiskProbe([tmp_path], 1 << 20, threads=2, chunk_bytes=1 << 16) as probe:
        seen: dict[int, list[int]] = {}

        def note(kind: str, index: int, view: memoryview, done: Any) -> None:
            seen.setdefault(threading.get_ident(), []).append(address_of(view))

        probe._transfer = note  # type: ignore[method-assign]
        with probe._mapped() as memory:
            probe._run("read", memory, passes=2)
            assert [len(each) for each in memory] == [3, 3]

    walked = [used for used in seen.values() if len(used) > 3]
    assert walked and all(used[3:] == used[:-3] for used in walked)
    assert not set(walked[0]) & set(walked[-1]) or len(walked) == 1
    assert all(len(set(used)) == 3 for used in walked)


def test_ports_are_nobody_elses_while_ranks_use_them() -> None:
    """Neither another run's, nor those that the kernel gives to any connection."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with processes.reserved_ports() as first, processes.reserved_ports() as second:
        assert abs(first - second) >= processes.PORTS
        assert max(first, second) + processes.PORTS <= ephemeral


def test_a_port_that_is_claimed_or_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with processes.reserved_ports() as claimed, processes.reserved_ports() as used:
        pass
    order = [claimed, used, max(claimed, used) - processes.PORTS * 50]

    class Chosen:
        def sample(self, blocks: range, count: int) -> list[int]:
            return order

    monkeypatch.setattr("random.SystemRandom", Chosen)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", used + 3))
        with processes.reserved_ports() as first, processes.reserved_ports() as second:
            assert [first, second] == [order[0], order[2]]
            with pytest.raises(processes.NotRunError, match="free ports"):
                processes.reserved_ports().__enter__()


@pytest.mark.parametrize(
    ("threads", "chunk", "nbytes", "match"),
    [(3, 4096, 1 << 20, "even"), (2, 1000, 1 << 20, "multiple"), (2, 4096, 4096, "too few")],
)
def test_a_probe_refuses_what_it_cannot_measure(
    threads: int, chunk: int, nbytes: int, match: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=match):
        DiskProbe([tmp_path], nbytes, threads, chunk)


def test_a_probe_without_direct_io_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(path, flags, mode)

    monkeypatch.setattr("os.open", no_direct)
    with DiskProbe([tmp_path], 1 << 20, threads=2, chunk_bytes=1 << 16) as probe:
        assert not probe.measure(0.02, ["read"]).is_direct


def test_the_roofline_prints_and_writes_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--no-device --gb 0.004 --chunk-mb 1 --threads 2 --seconds 0.02 --rounds 2"
    argv = ["roofline.py", "--directory", f"{tmp_path}/d", "--json", f"{tmp_path}/found.json"]
    monkeypatch.setattr(sys, "argv", [*argv, *options.split()])

    roofline.main()

    rounds = json.loads((tmp_path / "found.json").read_text())["rounds"]
    assert [sorted(each) for each in rounds] == [["disk"]] * 2
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "| GB/s | round 1 | round 2 |"
    assert len(printed) == 2 + len(PATTERNS)


# ------------------------------------------------------------------------------------------- memory


def test_memory_groups_of_both_versions_are_read(tmp_path: Path) -> None:
    first = memory.MemoryGroup(tmp_path, memory._VERSION_1)
    (tmp_path / "memory.stat").write_text("cache 3000\nrss 2000\nanon 5000\nfile 7000\n")
    (tmp_path / "memory.failcnt").write_text("4\n")
    (tmp_path / "memory.events").write_text("low 0\nmax 9\noom_kill 0\n")
    (tmp_path / "memory.peak").write_text("6000\n")
    first.set_limit(8000)

    told = {"path": str(tmp_path), "anonymous": 2000, "file": 3000, "limit": 8000, "failcnt": 4}
    assert first.summary() == told
    assert memory.MemoryGroup(tmp_path, memory._VERSION_2).summary() == {
        **{"path": str(tmp_path), "anonymous": 5000, "file": 7000, "peak": 6000},
        **{"low": 0, "max": 9, "oom_kill": 0},
    }


def test_without_a_memory_controller_there_is_no_group(tmp_path: Path) -> None:
    with (
        pytest.raises(memory.NoMemoryGroupError, match="controller is not on"),
        memory.memory_group(1 << 30, tmp_path),
    ):
        pytest.fail("entered")
    with (
        pytest.raises(memory.NoMemoryGroupError, match="can be made below"),
        memory.memory_group(1 << 30, tmp_path / "missing"),
    ):
        pytest.fail("entered")
    assert not list(tmp_path.glob("state-store*"))


def test_the_kernel_counts_what_is_written(tmp_path: Path) -> None:
    before = memory.transferred()
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    after = memory.transferred()

    assert after["written"] - before["written"] >= 1 << 20
    memory.wait_for_quiet(0.01)


# ----------------------------------------------------------------------------------------- verdicts


def test_the_fraction_is_the_least_time_over_the_time() -> None:
    found = verdict("mine", {"mine": [result()]})

    assert found.moved_gb == {"disk": 20.0, "copies": 20.0}
    assert found.fraction == pytest.approx(20 / 2.5 / 10)
    assert found.balanced_fraction == pytest.approx(20 / 2.0 / 10)
    assert (found.step_s, found.exposed_s) == (10.0, 8.5)


def test_of_several_limits_the_one_that_binds_counts() -> None:
    slow_bus = [each | {"copies": {"duplex": 4.0}} for each in result()["limits"]]

    found = verdict("mine", {"mine": [result(limits=slow_bus, back_to_back_s=8.0)]})

    assert found.fraction == pytest.approx(max(20 / 2.5, 20 / 4) / 8)


def test_ranks_share_the_disk_and_have_a_bus_each() -> None:
    ranks = [result(), result(back_to_back_s=16.0)]

    found = verdict("mine", {"mine": ranks})

    assert found.step_s == 16.0
    assert {each.kind: each.moved_gb for each in found.bounds} == {
        "disk mixed": 40.0,
        "disk balanced": 40.0,
        "copies": 40.0,
    }
    assert {each.kind: each.rate for each in found.bounds} == {
        "disk mixed": pytest.approx(2.5),
        "disk balanced": 2.0,
        "copies": 200.0,
    }
    assert found.fraction == pytest.approx(40 / 2.5 / 16)


def test_a_step_is_compared_with_the_limits_around_it() -> None:
    """The disk is half as fast from the second step on, and so are they: the same fraction."""
    limits = [{"disk": {"mixed": rate, "balanced": rate}} for rate in (4.0, 4.0, 2.0, 2.0)]
    mine = result(
        limits=limits,
        back_to_back_s=None,
        whole_s=[6.0, 8.0, 12.0],
        whole_gb=[20.0, 20.0, 20.0],
    )
    other = result(limits=limits, back_to_back_s=None, whole_s=[5, 5, 5], whole_gb=[1.6, 1.6, 1.6])

    found = verdict("mine", {"mine": [mine, other]})

    assert found.fraction == pytest.approx(21.6 * (1 / 4 / 6 + 1 / 3 / 8 + 1 / 2 / 12) / 3)
    assert found.step_s == pytest.approx(26 / 3)
    exposed = result(limits=limits[:3], step_s=[3.0, 4.0], back_to_back_s=9.0)
    # 2 x (10 - 5) GB at 4 and then at 3 GB/s.
    assert judged(exposed_of_unbudgeted(5.0, 1.1), exposed)[0] == pytest.approx(1.2)


def test_with_forward_and_backward_between_there_is_no_fraction() -> None:
    found = verdict("mine", {"mine": [result(forward_backward_s=12.0)]})

    assert found.fraction is None


def test_bars() -> None:
    assert judged(at_least_of_limit(0.9)) == (pytest.approx(0.8), False)
    assert judged(at_least_of_limit(0.8), result(back_to_back_s=9.9))[1] is True
    assert judged(at_least_of_balanced_limit(0.9)) == (pytest.approx(1.0), True)
    assert judged(at_most_seconds(10.0)) == (10.0, True)
    assert judged(at_most_of_case("other", 0.6)) == (None, None)
    assert judged(at_most_of_case("other", 0.6), other=[result(back_to_back_s=20.0)]) == (0.5, True)
    overlapped = result(step_s=[1.0], iteration_s=[8.0])
    assert judged(exposed_of_iteration(0.1), overlapped) == (0.125, False)
    # 2 x (10 - 5) GB at 2.5 GB/s are 4 s.
    assert judged(exposed_of_unbudgeted(5.0, 1.1), result(step_s=[4.2]))[0] == pytest.approx(1.05)
    assert judged(exposed_of_unbudgeted(10.0, 1.1)) == (None, None)
    assert judged(peak_of_allowed(1.01)) == (pytest.approx(1.0), True)
    assert judged(peak_of_allowed(1.01), result(load_peak_gb=13.0))[1] is False


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"weights_after": {"3": "x"}}, False),
        ({"weights_after": {"4": "c"}}, None),
        ({"moment_dtype": "bf16", "weights_after": {"3": "x"}}, None),
        ({"params": 500, "weights_after": {"3": "x"}}, None),
    ],
)
def test_weights_are_compared_with_stock_where_they_must_be_equal(
    changes: dict[str, Any], expected: bool | None
) -> None:
    results = {"stock": [result()], "mine": [result(**changes)]}

    assert verdict("mine", results).has_stock_weights is expected
    assert verdict("mine", {"mine": [result()]}).has_stock_weights is None


def test_tables_show_results_refusals_and_memory() -> None:
    group = {"path": "/x", "limit": 24e9, "peak": 2e9, "anonymous": 1e9, "file": 0, "max": 7}
    ranks = [result(memory_group=group, pinned_is_charged=True), result(rank=1)]
    found: dict[str, Verdict | str] = {
        "disk": verdict("disk", {"disk": ranks}, at_least_of_limit(0.92)),
        "tmpfs": "no tmpfs",
    }

    lines = verdict_table(found).splitlines()

    assert "1.600 >= 0.920 of the limit | 1.739 | yes" in lines[2]
    assert "not run: no tmpfs" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
    assert peak_table({"disk": ranks}).splitlines()[3] == (
        "| disk, rank 1 | 10.000 | 8.000 9.000 | 11.00 | 12.00 | - | - | 10.00 | 12.00 |"
    )
    assert group_table({"disk": ranks}).splitlines()[2:] == [
        "| disk | 24.00 | 2.00 | 1.00 | 0.00 | True | max 7 |"
    ]
    assert markdown(["a", "b"], [["1"]]).splitlines()[2] == "| 1 |  |"


# ----------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_step_understands_every_case(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (1, 2):
        monkeypatch.setattr(sys, "argv", ["step.py", *case.arguments(ranks)])
        args = step.parsed_arguments()
        assert (args.memory_cap_gb is None) or ranks == 1


def test_budgets_are_of_all_ranks_together() -> None:
    alone, shared = (OF_CASE["disk-host"].arguments(ranks) for ranks in (1, 2))

    assert alone[alone.index("--host-gb") + 1] == "12.0"
    assert shared[shared.index("--host-gb") + 1] == "6.0"
    assert "--memory-cap-gb" in alone
    assert "--memory-cap-gb" not in shared


def test_only_what_was_chosen_is_passed_on_to_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    options = "streamed --host-gb auto --ahead-gb 2 --moment-dtype bf16 --directory /a,/b"
    monkeypatch.setattr(sys, "argv", ["step.py", *options.split()])

    assert streaming_fields(step.parsed_arguments()) == {
        "stream_optimizer_state_to_disk": True,
        "stream_optimizer_state_dir": "/a,/b",
        "stream_optimizer_state_bucket_numel": 200_000_000,
        "defer_main_param_initialization": True,
        "stream_optimizer_state_host_gb": "auto",
        "stream_optimizer_state_ahead_gb": 2.0,
        "stream_optimizer_state_moment_dtype": "bf16",
    }


def test_ranks_know_each_other_and_one_failure_ends_all(tmp_path: Path) -> None:
    says = 'import json, os; print("noise"); print(json.dumps({"rank": os.environ["RANK"]}))'
    waits = "import time; time.sleep(60)"
    fails = 'raise SystemExit("no disk today")'

    def run(*programs: str, timeout_s: float = 30) -> Any:
        commands = [[sys.executable, "-c", each] for each in programs]
        return processes.run_ranks(commands, tmp_path / "log", timeout_s)

    assert run(says, says) == [{"rank": "0"}, {"rank": "1"}]
    with pytest.raises(processes.NotRunError, match="rank 1 ended with 1: no disk today"):
        run(waits, fails)
    with pytest.raises(processes.NotRunError, match="longer than"):
        run(waits, timeout_s=0.2)
    with pytest.raises(processes.NotRunError, match="no result"):
        run("print(1)")


def test_calls_with_other_cases_add_to_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses = "import sys\nassert sys.argv[1] != 'stock', 'out of order'\n"
    (tmp_path / "step.py").write_text(f"{refuses}print({json.dumps(result())!r})\n")
    monkeypatch.setattr(engine, "HERE", tmp_path)

    for only in ("disk", "stock,peaks"):
        argv = ["engine.py", "--only", only, "--out", f"{tmp_path}/out", "--directory"]
        monkeypatch.setattr(sys, "argv", [*argv, f"{tmp_path}/d"])
        engine.main()

    known = json.loads((tmp_path / "out" / "engine.json").read_text())
    assert sorted(known["cases"]) == ["disk", "peaks", "stock"]
    assert known["cases"]["stock"]["not_run"].endswith("out of order")
    assert known["verdicts"]["disk"]["judgement"]["bar"] == 0.92
    assert known["verdicts"]["disk"]["is_met"] is False
    assert known["verdicts"]["peaks"]["is_met"] is True
    assert "stock: NOT RUN" in capsys.readouterr().err


def test_ranks_that_share_a_disk_all_get_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--ranks", "1,2", "--gb", "0.3", "--seconds", "0.1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["shared_disk.py", str(tmp_path), *few])

    shared_disk.main()

    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows] == ["1", "2"]
    for row in rows:
        together, *_, fair = map(float, row.split("|")[2:-1])
        assert together > 0
        assert 0 < fair <= 1
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ figures

TIMELINE: dict[str, Any] = {
    "exposed_s": 1.0,
    "spans": [["read", 0, -0.5, 0.2], ["update", 0, 0.2, 0.3], ["write", 1, 0.5, 1.5]],
    "device_bytes": [[-0.1, 10], [0.5, 30]],
    "model_bytes": 10,
    "slot_bytes": 20,
}


def test_bars_of_a_verb_have_begin_length_and_the_colour_of_the_bucket() -> None:
    assert figures.bars(TIMELINE, "read") == [(-0.5, 0.7, figures.COLOURS[0])]
    assert figures.bars(TIMELINE, "write") == [(0.5, 1.0, figures.COLOURS[1])]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    figures.draw(TIMELINE, tmp_path / "step.png", "disk")

    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
