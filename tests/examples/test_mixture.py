"""examples/mixture.py as a user runs it: with its experts divided over two ranks, it prints the loss of one process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "mixture.py")
SMALL = ("--length", "32", "--steps", "8")


def printed(*command: str) -> list[float]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = run_program(command, environ=environ)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r"^mean \w+ of the steps ([\d.]+)$", done.stdout, re.MULTILINE)]


@pytest.mark.full
def test_a_mixture_on_two_ranks_has_the_losses_of_one_process(tmp_path: Path) -> None:
    single = printed(SCRIPT, *SMALL, "--devices", "1", "--root", str(tmp_path / "single"))
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    divided = printed(*ranks, SCRIPT, *SMALL, "--ep", "2", "--root", str(tmp_path / "divided"))
    assert len(single) == 2 and single[0] < 4
    assert divided == pytest.approx(single, abs=2e-4)
