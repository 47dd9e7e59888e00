"""Runs killed at random points end like uninterrupted runs: a short run of `benchmarks/faults.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "faults.py"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="benchmarks/faults.py counts processes with /proc and prctl"
)


def faults(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True)


def test_killed_runs_end_like_uninterrupted_ones() -> None:
    done = faults("--kills", "10", "--only", "single", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_killed_runs_of_several_ranks_end_like_uninterrupted_ones() -> None:
    done = faults("--kills", "24", "--seed", "2")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["pretraining", "adapters"])
def test_killed_runs_of_language_models_end_like_uninterrupted_ones(model: str) -> None:
    pytest.importorskip("peft" if model == "adapters" else "datasets")
    pytest.importorskip("transformers", minversion="5")
    done = faults("--kills", "20", "--seed", "4", "--model", model)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_checkpoints_written_in_place_are_reported_as_damaged() -> None:
    done = faults("--kills", "30", "--only", "single", "--seed", "3", "--in-place")
    assert done.returncode == 1 and "damaged" in done.stdout, done.stdout + done.stderr
