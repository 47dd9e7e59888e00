"""`leyden launch` with an Accelerate file for DeepSpeed: a user's loop and a Trainer match DDP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMON = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from leyden import Accelerator, Trainer, TrainModule

def data():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 8, generator=generator), torch.randn(24, 4, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

clips = "--clip" in sys.argv
"""
LOOP = (
    COMMON
    + """
accelerator = Accelerator()
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, data())
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if clips and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {float(accelerator.reduce(loss.detach(), 'mean')):.7f}")
plugin = accelerator.state.deepspeed_plugin
kind = accelerator.distributed_type.value
accelerator.print(f"type {kind} stage {plugin and plugin.zero_stage} steps {accelerator.steps}")
"""
)
TRAINER = (
    COMMON
    + """
class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = build()
    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        shown = self.all_gather(loss.detach()).mean()
        self.print(f"loss {float(shown):.7f}")
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

trainer = Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), data())
trainer.print(f"type {trainer.strategy.name} steps {trainer.global_step}")
"""
)
# As `accelerate config` writes it.
FILE = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 0.2
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: true
"""
OWN_FILE = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.2,
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
}
WITH_OWN_FILE = """
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {path}
  zero3_init_flag: true
num_processes: 2
use_cpu: true
mixed_precision: 'no'
"""
DDP = """
distributed_type: MULTI_CPU
num_processes: 2
use_cpu: true
"""


def launch(*command: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    done = subprocess.run(
        [sys.executable, "-m", "leyden", "launch", *command], env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", output, re.MULTILINE)]


COMMANDS = {
    "ddp": ("ddp.yaml", "ddp_script.py", "--clip"),
    "loop": ("zero.yaml", "loop.py"),
    "trainer": ("zero.yaml", "trainer.py"),
    "own file": ("own.yaml", "loop.py"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts and config files."""
    found = tmp_path_factory.mktemp("scripts")
    for name, text in (("loop.py", LOOP), ("trainer.py", TRAINER), ("zero.yaml", FILE), ("ddp.yaml", DDP)):
        (found / name).write_text(text)
    (found / "zero.json").write_text(json.dumps(OWN_FILE))
    (found / "own.yaml").write_text(WITH_OWN_FILE.format(path=found / "zero.json"))
    (found / "ddp_script.py").write_text(LOOP.replace("Accelerator()", "Accelerator(gradient_accumulation_steps=2)"))
    return found


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """The output of each command."""

    def run(command: tuple[str, ...]) -> str:
        file, script, *arguments = command
        return launch("--config_file", str(folder / file), str(folder / script), *arguments)

    with ThreadPoolExecutor(2) as both:
        return dict(zip(COMMANDS, both.map(run, COMMANDS.values()), strict=True))


@pytest.mark.parametrize("name", ["loop", "trainer", "own file"])
def test_scripts_launched_with_accelerate_files_match_ddp(printed: dict[str, str], name: str) -> None:
    expected = losses_of(printed["ddp"])
    assert len(expected) == 6 and expected[0] > expected[-1]
    assert losses_of(printed[name]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("loop", "type DEEPSPEED stage 2 steps 4"),
        ("own file", "type DEEPSPEED stage 3 steps 4"),
        ("trainer", "type deepspeed_stage_2 steps 4"),
        (
            "trainer",
            "leyden launch sets accelerator='cpu', strategy='deepspeed_stage_2', accumulate_grad_batches=2,"
            " gradient_clip_val=0.2",
        ),
        ("loop", "strategy    deepspeed_stage_2 (offload_optimizer_device none"),
        ("loop", "also        accumulation 2, clipping 0.2"),
        ("own file", "also        accumulation 2, clipping 0.2"),
    ],
)
def test_settings_of_the_file_reach_the_script(printed: dict[str, str], name: str, line: str) -> None:
    assert line in printed[name]


def test_a_dry_run_prints_the_deepspeed_config_file_and_variables(folder: Path) -> None:
    dry = launch("--config_file", str(folder / "own.yaml"), "--dry-run", str(folder / "loop.py"))
    assert f"deepspeed_config_file {folder / 'zero.json'}" in dry
    assert "variable    LEYDEN_STRATEGY=deepspeed\n" in dry and "LEYDEN_ACCUMULATE_GRAD_BATCHES=2" in dry
