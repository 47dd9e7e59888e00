"""examples/lm.py as a user runs it: it starts its own ranks, and resumes exactly after a kill."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.checkpoint.folder import newest
from leyden.checkpoint.reader import CheckpointReader

EXAMPLE = Path(__file__).parents[2] / "examples" / "lm.py"
SMALL = ("--width", "16", "--depth", "2", "--length", "64", "--batch-size", "64", "--epochs", "1", "--save-every", "2")


def start(root: Path, strategy: str, *arguments: str, steps: int = 8) -> subprocess.Popen[str]:
    """Starts a run of two ranks in a new session, so that signals to it reach nothing else."""
    command = [sys.executable, str(EXAMPLE), *SMALL, "--strategy", strategy, "--devices", "2", "--precision", "bf16"]
    return subprocess.Popen(
        [*command, "--steps", str(steps), "--root", str(root), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """Waits for a run to succeed; returns its output."""
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


def weights(root: Path) -> dict[str, list[float]]:
    path = newest(root / "logs" / "version_0" / "checkpoints")
    assert path is not None
    return {name: tensor.flatten().tolist() for name, tensor in CheckpointReader(path).model().items()}


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_run_of_two_ranks_resumes_exactly(tmp_path: Path, strategy: str) -> None:
    uninterrupted = output_of(start(tmp_path / "uninterrupted", strategy))
    assert "2 × cpu, 2 ranks" in uninterrupted
    loss = re.findall(r"validation loss (\d\.\d{3})", uninterrupted)
    # Only rank 0 prints.
    assert len(loss) == 1

    first = start(tmp_path / "killed", strategy, steps=100_000)
    folder = tmp_path / "killed" / "logs" / "version_0" / "checkpoints"
    while newest(folder) is None and first.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(0.05)
    first.kill()
    output, _ = first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL, output
    last = newest(folder)
    assert last is not None
    done = CheckpointReader(last).progress()["global_step"]

    total = max(8, done + 2)
    resumed = output_of(start(tmp_path / "killed", strategy, "--resume", steps=total))
    assert f"step {done})" in resumed
    if total != 8:
        # The run got further before it was killed: the uninterrupted run must get as far.
        output_of(start(tmp_path / "uninterrupted", strategy, "--resume", steps=total))
    assert weights(tmp_path / "killed") == weights(tmp_path / "uninterrupted")


@pytest.mark.full
def test_lm_trains_in_fp8(tmp_path: Path) -> None:
    output = output_of(start(tmp_path, "fsdp", "--precision", "fp8", "--width", "32", steps=4))
    assert "precision fp8: 2 Block + root over 2 ranks" in output and "tensorwise in 7 of 9 Linear layers" in output
    assert len(re.findall(r"validation loss \d\.\d{3}", output)) == 1
