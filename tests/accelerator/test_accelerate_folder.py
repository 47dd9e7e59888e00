"""load_state on a checkpoint of Accelerate: refused with the fix by default, loaded with trust=True."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from leyden import Accelerator, CheckpointError, ConfigurationError


class Count:
    """A registered object with state."""

    number = 5

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def training_objects(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def train_steps(model: nn.Module, optimizer: Any, scheduler: Any, count: int, scaler: Any) -> None:
    for _ in range(count):
        with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
            loss = model(torch.ones(3, 4)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()


@pytest.fixture(params=["no", "fp16"])
def accelerate_checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, list[torch.Tensor]]:
    """Returns the precision, a folder as Accelerate 1.15 writes it after 3 steps, and the weights 2 steps later."""
    model, optimizer, scheduler = training_objects(0)
    scaler = torch.amp.GradScaler("cpu", enabled=request.param == "fp16", init_scale=64.0)
    train_steps(model, optimizer, scheduler, 3, scaler)
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.bin")
    torch.save({"number": 7}, tmp_path / "custom_checkpoint_0.pkl")
    if scaler.is_enabled():
        torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
    states = {"step": 3, "random_state": random.getstate(), "numpy_random_seed": np.random.get_state()}
    torch.save({**states, "torch_manual_seed": torch.get_rng_state()}, tmp_path / "random_states_0.pkl")
    train_steps(model, optimizer, scheduler, 2, scaler)
    return request.param, tmp_path, [parameter.detach() for parameter in model.parameters()]


def test_a_trusted_accelerate_checkpoint_resumes_bit_for_bit(
    accelerate_checkpoint: tuple[str, Path, list[torch.Tensor]],
) -> None:
    precision, folder, expected = accelerate_checkpoint
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer, scheduler = accelerator.prepare(*training_objects(9))
    accelerator.register_for_checkpointing(count := Count())
    with pytest.raises(CheckpointError, match=r"trust=True\), or run `leyden convert"):
        accelerator.load_state(folder)
    with warnings.catch_warnings():
        # NumPy's random state is not readable with weights_only=True, so the file is unpickled with a warning.
        warnings.simplefilter("ignore")
        accelerator.load_state(folder, trust=True)
    for _ in range(2):
        loss = model(torch.ones(3, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
    assert (count.number, accelerator.steps) == (7, 5)
    assert scheduler.get_last_lr() == pytest.approx([0.01 * 0.9**5])
    if precision == "fp16":
        assert accelerator.scaler.get_scale() == 64.0


@pytest.mark.filterwarnings("ignore:.*unpickled in full")
def test_a_mismatched_accelerate_checkpoint_raises_before_changing_any_state(
    accelerate_checkpoint: tuple[str, Path, list[torch.Tensor]],
) -> None:
    precision, folder, _ = accelerate_checkpoint
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(training_objects(9)[0])
    before = model[0].weight.clone()
    with pytest.raises(ConfigurationError, match="more than 0 optimizers in single files, but this Accelerator has 0"):
        accelerator.load_state(folder, trust=True)
    other = Accelerator(cpu=True)
    wider = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.5), nn.Linear(9, 1))
    optimizer = torch.optim.AdamW(wider.parameters())
    other.prepare(wider, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    with pytest.raises(
        ConfigurationError, match=r"0.weight of model 0 was saved with shape \(8, 4\), but now has \(9, 4\)"
    ):
        other.load_state(folder, trust=True)
    (folder / "random_states_0.pkl").unlink()
    third = Accelerator(cpu=True)
    third.prepare(*training_objects(9))
    with pytest.raises(CheckpointError, match=r"random_states_0.pkl: does not exist"):
        third.load_state(folder, trust=True)
    assert torch.equal(model[0].weight, before)
