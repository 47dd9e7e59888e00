"""The watchdog ends a process that waits for its device forever, and names the line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_process_that_waits_for_its_device_ends(device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "script.py", device.type],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1 and "after fit" not in done.stdout, done.stderr
    line = "loss.item()" if device.type == "cuda" else "threading.Event().wait()"
    [found] = [text for text in done.stderr.splitlines() if "no progress for" in text]
    assert "rank 0, at step 5 (epoch 0, batch 5), in training" in found and line in found
