"""Processes of their own: one that waits for its device forever, `leyden test`, and the table of a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, threading
import torch
from models import QUIET, Line
from leyden import Trainer

class Hangs(Line):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            if self.device.type == "cpu":
                threading.Event().wait()
            # Kernels that wait for minutes, and a host that waits for them.
            for _ in range(200):
                torch.cuda._sleep(2**31)
            loss.item()
        return loss

trainer = Trainer(**{**QUIET, "accelerator": sys.argv[1]}, devices=1, max_epochs=1, hang_timeout=2)
trainer.fit(Hangs(), [torch.ones(2, 2)] * 30)
print("after fit")
"""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=200
    )


def test_the_watchdog_ends_a_process_that_waits_for_its_device(device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(["script.py", device.type], tmp_path)
    assert done.returncode == 1 and "after fit" not in done.stdout, done.stderr
    line = "loss.item()" if device.type == "cuda" else "threading.Event().wait()"
    [found] = [text for text in done.stderr.splitlines() if "no progress for" in text]
    assert "rank 0, at step 5 (epoch 0, batch 5), in training" in found and line in found


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_command_leyden_test_passes(precision: str, device: torch.device, tmp_path: Path) -> None:
    flags = ["--num_processes", "1", "--mixed_precision", precision, *(["--cpu"] if device.type == "cpu" else [])]
    done = run(["-m", "leyden", "test", *flags], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"single_device on {device.type}" in done.stdout and "ok  resume" in done.stdout


def test_the_check_of_the_machine_names_what_is_missing(tmp_path: Path) -> None:
    check = str(ROOT / "scripts" / "gpu-check")
    bare = run(["-S", check], tmp_path)
    assert bare.returncode == 1 and "The tests cannot run: pip install torch numpy" in bare.stdout, bare.stderr
    assert f"flash-attn{'':<7}missing: skips packed rows" in bare.stdout
    here = run([check], tmp_path)
    assert here.returncode == int(not torch.cuda.is_available()), here.stderr
    assert ("The tests can run" in here.stdout) == torch.cuda.is_available()
    assert f"torch{'':<12}{torch.__version__}" in here.stdout


CHECKS = """
import pytest
pytestmark = pytest.mark.gpu

def test_one_passes(record_property):
    record_property("speed", "7 tokens/s")

def test_another_fails():
    raise ValueError("the weights differ | at step 3")

@pytest.mark.parametrize("name", ["cuda-fsdp"])
def test_a_third_is_skipped(name):
    pytest.skip("needs two GPUs")
"""


def test_the_table_has_results_reasons_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_TABLE", "results")
    (tmp_path / "test_sample.py").write_text(CHECKS)
    options = ["-c", str(ROOT / "setup.cfg"), "--rootdir", str(tmp_path), "-p", "gpu.conftest", "-m", "gpu"]
    done = run(["-m", "pytest", *options, "test_sample.py"], tmp_path)
    assert done.returncode == 1 and "1 failed, 1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    found = json.loads((tmp_path / "results" / "gpu.json").read_text())
    assert any(line.startswith("torch ") for line in found["machine"])
    rows = {row["name"]: (row["outcome"], row["reason"], row["figures"]) for row in found["rows"]}
    assert rows == {
        "sample: one passes": ("passed", "", {"speed": "7 tokens/s"}),
        "sample: another fails": ("failed", "ValueError: the weights differ | at step 3", {}),
        "sample: a third is skipped [fsdp]": ("skipped", "needs two GPUs", {}),
    }
    lines = (tmp_path / "results" / "gpu.md").read_text().splitlines()
    assert re.fullmatch(r"\| sample: one passes \| passed \| \d+\.\d \| speed: 7 tokens/s \|", lines[-1])
    assert "the weights differ \\| at step 3" in lines[-2]
    assert "speed: 7 tokens/s" in done.stdout
