"""All of torch's optimizers and schedulers in the Trainer: a resume is bit-identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from optimizers import OPTIMIZERS, SCHEDULERS
from same import differences
from torch import nn
from torch.utils.data import DataLoader

from leyden import Callback, Trainer, TrainModule

BATCHES = 5


class Rates(Callback):
    """Records the learning rate after each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *rest: Any) -> None:
        self.seen.append(float(trainer.optimizers[0].param_groups[0]["lr"]))


class Module(Squares):
    def __init__(self, optimizer: str, scheduler: str | None, interval: str) -> None:
        torch.manual_seed(1)
        sparse = optimizer == "SparseAdam"
        body: Any = nn.Embedding(10, 3, sparse=True) if sparse else nn.Sequential(nn.Linear(5, 3), nn.Tanh())
        # Muon accepts only matrices, SparseAdam only sparse gradients.
        super().__init__(body if sparse else nn.Sequential(body, nn.Linear(3, 1, bias=optimizer != "Muon")))
        self.names, self.interval = (optimizer, scheduler), interval

    def configure_optimizers(self) -> Any:
        name, scheduler = self.names
        optimizer = OPTIMIZERS[name](list(self.parameters()))
        if scheduler is None:
            return optimizer
        config = {"scheduler": SCHEDULERS[scheduler](optimizer), "interval": self.interval, "monitor": "loss"}
        return [optimizer], [config]


def fit(folder: Path, names: tuple[str, str | None, str], path: Path | None = None, **limits: int) -> tuple[Any, ...]:
    module, rates = Module(*names), Rates()
    generator = torch.Generator().manual_seed(3)
    sparse = names[0] == "SparseAdam"
    batches = [
        torch.randint(10, (4,), generator=generator) if sparse else torch.randn(4, 5, generator=generator)
        for _ in range(BATCHES)
    ]
    trainer = Trainer(**QUIET, callbacks=[rates], default_root_dir=folder, **limits)
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=path)  # type: ignore[arg-type]
    return trainer, module, rates


def check_resume(folder: Path, names: tuple[str, str | None, str], steps: int) -> None:
    whole_trainer, whole, whole_rates = fit(folder, names, max_epochs=2)
    first, _, _ = fit(folder, names, max_epochs=2, max_steps=steps)
    path = first.save_checkpoint(folder / "saved")
    trainer, module, rates = fit(folder, names, path, max_epochs=2)

    assert differences(module.state_dict(), whole.state_dict()) == []
    assert differences(trainer.optimizers[0].state_dict(), whole_trainer.optimizers[0].state_dict()) == []
    assert rates.seen == whole_rates.seen[steps:]
    for config, other in zip(trainer.lr_scheduler_configs, whole_trainer.lr_scheduler_configs, strict=True):
        assert differences(config.scheduler.state_dict(), other.scheduler.state_dict()) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_torch_optimizer_resumes_exactly(name: str, tmp_path: Path) -> None:
    check_resume(tmp_path, (name, None, "step"), steps=3)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize(("interval", "steps"), [("step", 3), ("epoch", 5)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_torch_scheduler_resumes_exactly(name: str, interval: str, steps: int, tmp_path: Path) -> None:
    check_resume(tmp_path, ("SGD", name, interval), steps)


def test_every_scheduler_changes_the_learning_rate(tmp_path: Path) -> None:
    """Guards the tests above against vacuous success: the rates they compare differ between steps."""
    for name in SCHEDULERS:
        _, _, rates = fit(tmp_path, ("SGD", name, "step"), max_epochs=3)
        assert len(set(rates.seen)) > 1, name
