"""The benchmark of simulated worlds: a rank's share shrinks as the world grows, and its checkpoint covers the share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "simulated_world.py"


@pytest.mark.full
def test_a_rank_holds_less_in_a_larger_world_and_writes_exactly_its_share() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(SCRIPT), "--worlds", "8,32", "--layers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    header, few, many, _ = (line.split("  ") for line in done.stdout.splitlines())
    columns = [name.strip() for name in header if name.strip()]
    small, large = (dict(zip(columns, [c.strip() for c in line if c.strip()], strict=True)) for line in (few, many))
    # Two embeddings of 128256 × 8192 and two layers, in fp32, over 8 ranks.
    assert small["share"] == small["written"] == "1.8 GiB"
    assert float(large["share"].split()[0]) == pytest.approx(1.78 * 1024 / 4, rel=0.02)
