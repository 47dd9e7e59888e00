"""Two ranks: NCCL between two GPUs, gloo for CPU tensors, and forked ranks. On the CPU, gloo for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Regression
from ranks.world import run_world
from samples import pairs
from torch import nn
from torch.utils.data import DataLoader

from leyden import Trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def devices(device: torch.device) -> str:
    """The name of two devices."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return device.type


def build() -> Regression:
    return Regression(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))


def fitted(strategy: str, batch_size: int, **arguments: Any) -> tuple[list[float], Trainer]:
    torch.manual_seed(0)
    module = build()
    trainer = Trainer(strategy=strategy, max_epochs=2, gradient_clip_val=1.0, **{**QUIET, **arguments})
    trainer.fit(module, DataLoader(pairs(64, 8), batch_size))
    weights = trainer.strategy.full_state_dict(module)
    return [number for value in weights.values() for number in value.flatten().tolist()], trainer


def run_all(accelerator: str) -> dict[str, Any]:
    """Trains under each strategy, which share a process group, and tries its collectives."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp", "fsdp_cpu_offload"):
        found[strategy], trainer = fitted(strategy, 8, accelerator=accelerator)
    strategy, rank = trainer.strategy, trainer.global_rank
    found["device"] = str(strategy.root_device)
    found["host"] = strategy.ranks.all_gather(torch.tensor([rank])).tolist()
    found["gpu"] = strategy.ranks.all_gather(torch.tensor([rank], device=strategy.root_device)).tolist()
    found["objects"] = strategy.ranks.all_gather_object({"rank": rank})
    sent = strategy.ranks.all_gather_object({"x": torch.full((), rank, device=strategy.root_device)})
    found["sent"] = [(str(part["x"].device), part["x"].item()) for part in sent]
    others = [index for index in range(2) if index != rank] if accelerator == "cuda" else []
    found["memory elsewhere"] = sum(torch.cuda.memory_allocated(index) for index in others)
    return found


def test_two_ranks_match_one_process(devices: str) -> None:
    expected, _ = fitted("single_device", 16, devices=1, accelerator="cpu")
    names = ["cuda:0", "cuda:1"] if devices == "cuda" else ["cpu", "cpu"]
    for rank, found in enumerate(run_world(2, run_all, devices)):
        assert found["device"] == names[rank] and found["memory elsewhere"] == 0
        assert found["host"] == found["gpu"] == [[0], [1]] and found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert found["sent"] == [(names[rank], 0), (names[rank], 1)]
        for strategy in ("ddp", "fsdp", "fsdp_cpu_offload") if rank == 0 else ("ddp",):
            assert found[strategy] == pytest.approx(expected, abs=1e-5), strategy


FORKED = """
import torch
from gpu.test_several import build
from leyden import DataModule, Trainer
from models import QUIET
from samples import pairs
module = build()
settings = {{**QUIET, "accelerator": "{devices}"}}
trainer = Trainer(strategy="{strategy}", devices=2, precision="16-mixed", max_epochs=1, **settings)
trainer.fit(module, DataModule.from_datasets(pairs(64, 8), batch_size=8))
print("steps", trainer.global_step, "cuda in the caller", torch.cuda.is_initialized())
"""


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_ranks_fork_and_spawn_from_a_process_without_cuda(strategy: str, devices: str) -> None:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", FORKED.format(strategy=strategy, devices=devices)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "steps 4 cuda in the caller False" in done.stdout
