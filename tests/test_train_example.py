"""The example trains on real text without a GPU, resumes bit for bit, and fails when it must."""

from __future__ import annotations

from pathlib import Path

from tests.train_example import train_example


def test_the_example_trains_saves_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    done = train_example(tmp_path, "--ranks", "2", "--steps", "12")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulated CUDA" in done.stdout
    for name in ("stock-resumed", "streamed-straight", "streamed-resumed"):
        assert f"{name}: equal bit for bit (12 steps, every rank's loss)" in done.stdout
        assert f"{name}: weights, main params and moments equal" in done.stdout
    peaks, streamed = (
        [float(size) for size in line.split()[1::2]]
        for line in done.stdout.splitlines()
        if line.split()[:1] in (["peak"], ["disk"]) and "MiB" in line
    )
    assert 0 < peaks[2] < peaks[0], "the main params and moments are not on the device"
    assert streamed[:2] == [0, 0] and streamed[2] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_example_fails_when_nothing_is_learned(tmp_path: Path) -> None:
    """A learning rate of zero: the check of the falling loss can fail."""
    done = train_example(tmp_path, "--ranks", "1", "--steps", "2", "--", "--lr", "0")

    assert done.returncode == 1, done.stdout + done.stderr
    assert "DID NOT FALL" in done.stdout


def test_a_failing_rank_is_shown_with_its_log(tmp_path: Path) -> None:
    done = train_example(tmp_path, "--ranks", "1", "--", "--no-such-argument")

    assert done.returncode == 1
    assert "unrecognized arguments: --no-such-argument" in done.stderr
    assert "Whole log: " in done.stderr


def test_streaming_flags_are_refused_since_the_stock_run_would_get_them(tmp_path: Path) -> None:
    done = train_example(tmp_path, "--", "--stream-optimizer-state-to-disk")

    assert done.returncode == 2
    assert "--stream-optimizer-state-to-disk: RUNS in this file has" in done.stderr
