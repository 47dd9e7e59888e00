"""examples/pretrain.py learns, and a killed run ends with the weights of an unbroken one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "examples" / "pretrain.py", "--steps", "30", "--out", "out", *arguments]
    folder.mkdir(exist_ok=True)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=400)


@pytest.mark.full
def test_a_killed_run_ends_with_the_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", minversion="5")
    unbroken = run(tmp_path / "unbroken")
    assert unbroken.returncode == 0, unbroken.stderr
    loss = re.search(r"loss (\d\.\d+) after 30 steps; {'tragedies': 360, 'others': 120}", unbroken.stdout)
    assert loss is not None and float(loss[1]) < 3.2
    killed = run(tmp_path / "killed", "--kill-at", "25")
    assert killed.returncode in (1, -signal.SIGKILL, 128 + signal.SIGKILL), killed.stderr
    resumed = run(tmp_path / "killed")
    assert resumed.returncode == 0 and "step 20" in resumed.stdout, resumed.stderr
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "out" / "model").state_dict()
        for name in ("unbroken", "killed")
    ]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
