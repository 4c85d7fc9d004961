"""The rank pool: fresh processes, every kind of failure reported, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import RankPool, RanksFailed

_ROOT = Path(__file__).parent.parent
_seen: list[int] = []


def describe(word: str) -> dict[str, Any]:
    """Tell who this rank is, leaving a trace in the process."""
    sys.stdout.write(f"said {word}\n")
    os.write(2, b"and to stderr\n")
    _seen.append(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "EXTRA")
    return {
        "word": word,
        "seen": len(_seen),
        "pid": os.getpid(),
        **{name: os.environ.get(name) for name in names},
    }


def test_results_come_in_rank_order_with_torchrun_variables(ranks: RankPool) -> None:
    """A case gets its keyword arguments, and the variables that torchrun would set."""
    results = ranks.run(describe, world_size=2, environment={"EXTRA": "x"}, word="hi")
    for index, result in enumerate(results):
        assert result["word"] == "hi"
        assert result["RANK"] == result["LOCAL_RANK"] == str(index)
        assert result["WORLD_SIZE"] == result["LOCAL_WORLD_SIZE"] == "2"
        assert result["EXTRA"] == "x"
    assert ranks.outputs == ["said hi\nand to stderr\n"] * 2


def test_each_run_has_fresh_processes(ranks: RankPool) -> None:
    """Nothing that one case left in memory or environment is seen by the next."""
    first = ranks.run(describe, environment={"EXTRA": "x"}, word="a")[0]
    second = ranks.run(describe, word="b")[0]
    assert first["pid"] != second["pid"]
    assert second["seen"] == 1
    assert second["EXTRA"] is None


def megatron_is_there() -> bool:
    return {"torch", "megatron.core", "megatron.training.training"} <= sys.modules.keys()


def test_a_run_costs_no_imports(ranks: RankPool) -> None:
    """Megatron takes seconds to import; a rank is born with it, and pytest stays without."""
    assert ranks.run(megatron_is_there) == [True]
    assert not megatron_is_there()


def _on_rank_1(action: Callable[[], Any]) -> None:
    if os.environ["RANK"] == "1":
        action()
    time.sleep(60)


def _raise() -> None:
    raise ValueError("boom")


def rank_1_raises() -> None:
    sys.stdout.write("before the boom\n")
    _on_rank_1(_raise)


def rank_1_exits() -> None:
    _on_rank_1(lambda: sys.exit(3))


def rank_1_exits_hard() -> None:
    _on_rank_1(lambda: os._exit(3))


def rank_1_segfaults() -> None:
    _on_rank_1(lambda: os.kill(os.getpid(), signal.SIGSEGV))


def rank_1_returns_a_lambda() -> Any:
    return (lambda: None) if os.environ["RANK"] == "1" else 1


@pytest.mark.parametrize(
    ("case", "reason", "text"),
    [
        (rank_1_raises, "raised ValueError: boom", "_raise"),
        (rank_1_exits, "raised SystemExit: 3", "sys.exit(3)"),
        (rank_1_exits_hard, "exited with code 3 before it returned", ""),
        (rank_1_segfaults, "died of SIGSEGV", "rank_1_segfaults"),
        (rank_1_returns_a_lambda, "raised", "pickle"),
    ],
)
def test_failure_of_one_rank_ends_all_and_is_reported(
    case: Callable[[], Any], reason: str, text: str, ranks: RankPool
) -> None:
    """The report names the rank, how it ended and where; the others do not wait for it."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks.run(case, world_size=2)
    assert time.monotonic() - start < 15
    first = caught.value.failures[0]
    assert first.rank == 1
    assert first.reason.startswith(reason)
    assert text in str(first)
    for other in caught.value.failures[1:]:
        assert other.reason == "killed because another rank failed"


def test_report_holds_what_the_ranks_printed(ranks: RankPool) -> None:
    """Output up to the failure is in the message, for each rank."""
    with pytest.raises(RanksFailed) as caught:
        ranks.run(rank_1_raises, world_size=2)
    assert str(caught.value).count("before the boom") == 2


def hang_on_a_name() -> None:
    time.sleep(60)


def test_hanging_ranks_are_killed_and_show_their_stack(ranks: RankPool) -> None:
    """After the timeout the report tells in which function each rank hung."""
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="timed out") as caught:
        ranks.run(hang_on_a_name, world_size=2, timeout_s=3)  # time to get there
    assert time.monotonic() - start < 20
    assert [failure.reason for failure in caught.value.failures] == ["timed out"] * 2
    assert all("hang_on_a_name" in failure.output for failure in caught.value.failures)


def test_pool_works_after_failures(ranks: RankPool) -> None:
    """A dead rank takes nothing with it."""
    with pytest.raises(RanksFailed):
        ranks.run(rank_1_segfaults, world_size=2)
    assert [result["RANK"] for result in ranks.run(describe, world_size=2, word="on")] == ["0", "1"]


def start_a_child() -> int:
    child = subprocess.Popen(["sleep", "60"])
    return child.pid


def test_what_a_rank_started_dies_with_it(ranks: RankPool) -> None:
    """Checkpoint writers and other children of a rank do not outlive the run."""
    (pid,) = ranks.run(start_a_child)
    _wait_until_gone(pid)


def test_cases_must_be_importable(ranks: RankPool) -> None:
    """A lambda is refused at the call and not in the rank."""
    with pytest.raises(Exception, match="pickle"):
        ranks.run(lambda: None)


def test_second_pool_is_refused(ranks: RankPool) -> None:
    """There is one fork server for a process."""
    with pytest.raises(RuntimeError, match="has a fork server already"):
        RankPool()


# -------------------------------------------------------------------- in a process of its own


def _run_script(body: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    script = "import os, signal, sys, time\nfrom tests import rank_pool, test_rank_pool\n"
    path = os.pathsep.join([*map(str, paths), str(_ROOT), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", script + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # dead, and waiting for whoever is its parent now
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def test_close_leaves_no_process(tmp_path: Path) -> None:
    """After `close` the process that held the pool has no child left, nor its log folder."""
    done = _run_script(
        f"""
        os.environ["TMPDIR"] = {str(tmp_path)!r}
        with rank_pool.RankPool() as pool:
            pool.run(test_rank_pool.describe, word="a")
            try:
                pool.run(test_rank_pool.rank_1_raises, world_size=2)
            except rank_pool.RanksFailed:
                sys.stdout.write("failed as it should\\n")
        children = open(f"/proc/self/task/{{os.getpid()}}/children").read()
        sys.stdout.write(f"children: [{{children}}]")
        """
    )
    assert done.stdout == "failed as it should\nchildren: []", done.stderr
    assert list(tmp_path.glob("ranks-*")) == []


def test_megatron_comes_first_from_the_callers_path_and_its_errors_are_told(
    tmp_path: Path,
) -> None:
    """A tree put first on PYTHONPATH is what ranks import; if it cannot be, the run says why."""
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this tree is broken')\n")
    done = _run_script(
        """
        with rank_pool.RankPool() as pool:
            pool.run(test_rank_pool.describe, word="a")
        """,
        tmp_path,
    )
    assert done.returncode == 1
    assert "failed to preload Megatron" in done.stderr
    assert "this tree is broken" in done.stderr
