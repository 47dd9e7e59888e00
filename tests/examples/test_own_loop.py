"""examples/own_loop.py and examples/gan.py as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_changed_lines_are_five() -> None:
    text = (ROOT / "examples" / "own_loop.py").read_text()
    assert re.findall(r"  # (\d)$", text, re.MULTILINE) == ["1", "2", "3", "4", "5"]


def test_a_resumed_loop_prints_what_the_whole_one_prints(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "own_loop.py")
    options = ("--cpu", "--accumulate", "3")
    whole = run(script, *options, "--epochs", "3", "--root", str(tmp_path / "a")).splitlines()
    run(script, *options, "--epochs", "2", "--root", str(tmp_path / "b"))
    rest = run(script, *options, "--epochs", "3", "--root", str(tmp_path / "b"), "--resume").splitlines()
    assert rest == whole[2:]
    assert float(whole[2].split()[3]) > 0.9
    assert whole[2].endswith("of 400 images")


@pytest.mark.full
@pytest.mark.parametrize("example", ["own_loop.py", "gan.py"])
def test_under_torchrun(tmp_path: Path, example: str) -> None:
    options = ("--epochs", "10" if example == "gan.py" else "2", "--precision", "bf16", "--cpu")
    place = () if example == "gan.py" else ("--root", str(tmp_path))
    script = str(ROOT / "examples" / example)
    said = run("-m", "torch.distributed.run", "--nproc-per-node", "2", script, *options, *place)
    assert len([line for line in said.splitlines() if line.startswith("epoch")]) == (1 if example == "gan.py" else 2)
