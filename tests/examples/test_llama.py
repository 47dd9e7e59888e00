"""examples/llama.py as a user runs it: a mesh of four ranks prints the same loss as one process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "llama.py")
SMALL = ("--width", "32", "--depth", "2", "--length", "32", "--steps", "4")


def mean_loss(*command: str) -> float:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = run_program(command, environ=environ)
    assert done.returncode == 0, done.stderr
    [loss] = re.findall(r"^mean loss of the steps ([\d.]+)$", done.stdout, re.MULTILINE)
    return float(loss)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [("--tp", "2"), ("--tp", "2", "--sequence", "--dp_replicate", "2"), ("--pp", "2"), ("--pp", "2", "--tp", "2")],
    ids=str,
)
def test_a_llama_on_four_ranks_has_the_same_loss_as_in_one_process(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("transformers", minversion="5")
    single = mean_loss(SCRIPT, *SMALL, "--root", str(tmp_path / "single"))
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "4")
    mesh = mean_loss(*ranks, SCRIPT, *SMALL, *options, "--root", str(tmp_path / "mesh"))
    assert mesh == pytest.approx(single, abs=2e-4)
