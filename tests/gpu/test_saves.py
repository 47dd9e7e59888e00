"""Saves from a GPU: asynchronous ones hold the weights of their step, and any device continues the others' runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from safetensors.torch import load_file
from same import weights_of, whole
from samples import pairs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Callback, Trainer, TrainModule


class Net(Squares):
    """Two layers, large enough on a GPU for a save to take longer than a step.

    Args:
        width: of the layers.
        writes: normalizes a weight in each training step, as SwAV does with its prototypes.
    """

    def __init__(self, width: int, writes: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width)))
        self.writes = writes

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.writes:
            with torch.no_grad():
                weight = self.net[0].weight  # type: ignore[index]
                weight.copy_(weight / weight.norm())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class SaveOften(Callback):
    """Saves asynchronously after every second step, and keeps what the checkpoint must hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expected: dict[Path, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *rest: Any) -> None:
        if trainer.global_step % 2 == 0:
            expected = {name: whole(value).clone() for name, value in weights_of(module).items()}
            path = trainer.save_checkpoint(self.folder / str(trainer.global_step), asynchronous=True)
            self.expected[path] = expected


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
@pytest.mark.parametrize("writes", [False, True], ids=["stepped", "written in steps"])
def test_asynchronous_saves_hold_the_weights_of_their_step(
    writes: bool, strategy: str, device: torch.device, tmp_path: Path
) -> None:
    saves = SaveOften(tmp_path)
    arguments: Any = {"accelerator": device.type, "devices": 1, "strategy": strategy, "max_epochs": 1}
    trainer = Trainer(**{**QUIET, **arguments}, callbacks=[saves], default_root_dir=tmp_path)
    trainer.fit(Net(4096 if device.type == "cuda" else 64, writes), DataLoader(pairs(96, 8), 8))
    assert len(saves.expected) == 6
    for path, expected in saves.expected.items():
        found = load_file(path / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value.cpu()) for name, value in expected.items()), path.name


@pytest.mark.parametrize("goes", ["from the CPU", "to the CPU"])
def test_a_run_continues_on_another_device(goes: str, device: torch.device, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    first, second = (cpu, device) if goes == "from the CPU" else (device, cpu)

    def fit(on: torch.device, path: Path | None = None, steps: int = -1) -> tuple[Trainer, Net]:
        arguments: Any = {"accelerator": on.type, "devices": 1, "max_epochs": 2, "default_root_dir": tmp_path}
        trainer, module = Trainer(**{**QUIET, **arguments}, max_steps=steps), Net(64)
        trainer.fit(module, DataLoader(pairs(64, 8), 8), ckpt_path=path)
        return trainer, module

    _, uninterrupted = fit(cpu)
    path = fit(first, steps=5)[0].save_checkpoint(tmp_path / "saved")
    trainer, continued = fit(second, path)
    assert trainer.global_step == 16
    for name, value in continued.state_dict().items():
        assert value.device.type == second.type
        torch.testing.assert_close(value.cpu(), uninterrupted.state_dict()[name], rtol=0, atol=1e-5, msg=name)
