"""Two ranks whose model is on a device that is not the CPU: the weights of one process on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from models import QUIET, Regression
from ranks.world import run_world
from samples import pairs
from torch import nn
from torch.utils.data import DataLoader

from leyden import Trainer


def module() -> Regression:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return Regression(net, lambda module: torch.optim.AdamW(module.parameters(), 1e-2))


def numbers(module: nn.Module) -> dict[str, list[float]]:
    found = {}
    for name, tensor in module.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.cpu().flatten().tolist()
    return found


def fit(folder: str, strategy: str, accelerator: str) -> Any:
    # FSDP moves a module by assigning `.data`, which torch refuses between classes of tensors.
    with torch.device(accelerator):
        trained = module()
    trainer = Trainer(
        **{**QUIET, "accelerator": accelerator},
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        default_root_dir=folder,
    )
    with toy.Waits() as waits:
        trainer.fit(trained, DataLoader(pairs(16), 4 if accelerator == "cpu" else 2))
    gathered = trainer.strategy.ranks.all_gather_object({"x": torch.ones(1, device=trainer.strategy.root_device)})
    return numbers(trained), str(trainer.strategy.root_device), waits.found, str(gathered[-1]["x"].device)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_train_the_weights_of_one_process(strategy: str, tmp_path: Path) -> None:
    expected = fit(str(tmp_path / "one"), "auto", "cpu")[0]
    for found, device, waits, gathered in run_world(2, fit, str(tmp_path / "two"), strategy, "toy", timeout=200):
        assert (device, gathered) == ("toy:0", "toy:0")
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, abs=1e-6), name
        print(waits)
