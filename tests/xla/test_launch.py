"""`leyden launch` with a file for TPUs, on XLA's CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILE = """
distributed_type: XLA
mixed_precision: bf16
num_machines: 1
num_processes: 1
tpu_env: [PJRT_DEVICE=CPU, CPU_NUM_DEVICES=4]
"""
SCRIPT = """
import torch
from leyden import Trainer, TrainModule

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), [torch.ones(6, 4)] * 3)
print("ran", trainer.strategy.name, trainer.strategy.layout.axes, trainer.precision, trainer.global_step)
"""


def test_a_config_file_for_tpus_sets_the_trainers_arguments(tmp_path: Path) -> None:
    (tmp_path / "tpu.yaml").write_text(FILE)
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    command = [sys.executable, "-m", "leyden", "launch", "--config_file", "tpu.yaml", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stderr
    assert "ran xla {'data': 4} bf16-mixed 3" in done.stdout
    assert "leyden launch sets accelerator='xla', strategy='xla', precision='bf16-mixed'" in done.stdout
