"""`Trainer(validate_at_start=True)`: a full validation before the first step, which does not change training."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from same import same_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from leyden import Callback, ConfigurationError, Trainer, TrainModule, seed_everything
from leyden.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, ModelPruning


class Net(TrainModule):
    """Draws random numbers in training and in validation, and validates six batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.mean = MeanMetric()
        self.validated: list[int] = []
        self.values: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("loss", loss, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)
        self.log("val_loss", self.loss(batch) + 0 * torch.rand(()))

    def on_validation_end(self) -> None:
        self.values.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)

    def data(self, count: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
        return DataLoader(TensorDataset(inputs), 4, shuffle=True, generator=generator if count == 24 else None)

    def train_dataloader(self) -> Any:
        return self.data(20)

    def val_dataloader(self) -> Any:
        return self.data(24)


def fit(folder: Path, *callbacks: Callback, kind: type[Net] = Net, **arguments: Any) -> Net:
    seed_everything(7)
    module = kind()
    goal = {name: arguments.pop(name) for name in ("ckpt_path", "same_run") if name in arguments}
    options = {"max_epochs": 3, "default_root_dir": folder, "num_sanity_val_steps": 2, "validate_at_start": True}
    trainer = Trainer(callbacks=list(callbacks), **{**QUIET, **options, **arguments})
    trainer.fit(module, **goal)
    return module


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2, "val_check_interval": 0.4}])
def test_the_weights_are_those_of_a_run_without_it(tmp_path: Path, arguments: dict[str, Any]) -> None:
    plain = fit(tmp_path, validate_at_start=False, num_sanity_val_steps=0, **arguments)
    module = fit(tmp_path, **arguments)
    assert same_weights(module, plain)
    assert module.validated == [0] * 6 + plain.validated
    assert module.values[1:] == plain.values
    assert module.trainer.progress.validations == plain.trainer.progress.validations
    assert {name: float(value) for name, value in module.trainer.callback_metrics.items()} == {
        name: float(value) for name, value in plain.trainer.callback_metrics.items()
    }


def test_its_values_are_logged_at_step_0_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Sees(Callback):
        def on_sanity_check_start(self, *_: Any) -> None:
            raise AssertionError("the full validation takes the place of the sanity check")

        def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
            assert trainer.current_epoch or "val_loss" not in trainer.callback_metrics

    module = fit(tmp_path, Sees(), logger=CSVLogger(tmp_path))
    (metrics,) = tmp_path.rglob("metrics.csv")
    with open(metrics, encoding="utf-8") as file:
        rows = [(row["step"], float(row["val_loss"])) for row in csv.DictReader(file) if row["val_loss"]]
    assert [step for step, _ in rows] == ["0", "5", "10", "15"]
    assert [value for _, value in rows] == pytest.approx(module.values)
    assert f"\nstep 0      val_loss={module.values[0]:.4g}\n" in capsys.readouterr().out


def test_monitors_do_not_see_it(tmp_path: Path) -> None:
    class Worsens(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            # Best before training, then better by the epoch until the second one.
            self.log("val_loss", abs(self.trainer.global_step - 10.0) + 1 if self.trainer.global_step else 0.0)

    def callbacks() -> tuple[Any, ...]:
        saves = ModelCheckpoint(tmp_path / "saves", monitor="val_loss", save_top_k=-1, save_on_train_epoch_end=False)
        stops = EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=False)
        return saves, stops, ModelPruning("l1_unstructured", amount=0.5, prune_on_train_epoch_end=False)

    saves, stops, _ = mine = callbacks()
    fit(tmp_path, *mine, kind=Worsens, max_epochs=9, enable_checkpointing=True)
    assert stops.stopped_epoch == 2 and float(stops.best_score) == 1.0
    assert float(saves.best_model_score) == 1.0
    assert sorted(path.name for path in (tmp_path / "saves").iterdir()) == [
        "epoch=0-step=5",
        "epoch=1-step=10",
        "epoch=2-step=15",
    ]


class SaveIn(Callback):
    """Saves a checkpoint in the first call of a hook."""

    def __init__(self, hook: str, path: Path) -> None:
        setattr(self, hook, self.save)
        self.path = path

    def save(self, trainer: Trainer, *_: Any) -> None:
        if not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("hook", "passes"),
    [
        ("on_train_start", [0] * 6),
        ("on_validation_start", [0] * 6),
        ("on_validation_end", []),
        ("on_train_epoch_start", []),
        ("on_train_batch_end", []),
    ],
)
def test_a_resume_repeats_it_only_if_it_was_not_done(hook: str, passes: list[int], tmp_path: Path) -> None:
    whole = fit(tmp_path, SaveIn(hook, tmp_path / "saved"))
    resumed = fit(tmp_path, ckpt_path=tmp_path / "saved")
    assert same_weights(resumed, whole)
    assert resumed.validated == passes + whole.validated[6:]
    assert resumed.values[-3:] == whole.values[-3:]


def test_an_interrupted_one_is_repeated(tmp_path: Path) -> None:
    class Interrupted(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGINT)

    whole = fit(tmp_path)
    saves = ModelCheckpoint(tmp_path / "saves", save_last=True)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, saves, kind=Interrupted, enable_checkpointing=True)
    resumed = fit(tmp_path, ckpt_path=tmp_path / "saves/last", same_run=True)
    assert resumed.validated == whole.validated
    assert same_weights(resumed, whole)


def test_it_needs_a_validation(tmp_path: Path) -> None:
    class Trains(Net):
        val_dataloader = TrainModule.val_dataloader

    with pytest.raises(ConfigurationError, match="needs a validation_step and a validation loader"):
        fit(tmp_path, kind=Trains)
    with pytest.raises(ConfigurationError, match="barebones=True disables validate_at_start"):
        Trainer(barebones=True, validate_at_start=True)


def test_without_validation_batches_or_training_there_is_none(tmp_path: Path) -> None:
    assert fit(tmp_path, limit_val_batches=0).validated == []
    assert fit(tmp_path, limit_train_batches=0).validated == [0, 0]
    assert fit(tmp_path, max_steps=0).validated == []
    assert fit(tmp_path, fast_dev_run=True).validated == [0, 1]
