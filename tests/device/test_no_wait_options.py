"""No step of training or evaluation waits for the device, whichever callbacks and options read its values.

The waits that remain are listed at the end of docs/tested.md, and tested here by their number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import transformers
from models import QUIET
from samples import labeled
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from leyden import Callback, Trainer, TrainModule
from leyden.callbacks import (
    CSVLogger,
    DriftGuard,
    EarlyStopping,
    GradNormMonitor,
    LearningRateMonitor,
    NonFiniteGuard,
    RichProgressBar,
    SequenceLengthWarmup,
    SpikeDetection,
    StochasticWeightAveraging,
    StragglerMonitor,
    ThroughputMonitor,
)
from leyden.hf import HFModule
from leyden.optim import Muon

aten = torch.ops.aten
toy.READS |= {aten.repeat_interleave.Tensor, aten.bincount.default, aten.unique_consecutive.default}


class Net(TrainModule):
    """Logs values of the device, weighted by a count on the device."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = optimizer

    def step(self, batch: Any, name: str) -> Tensor:
        x, y = batch["x"].flatten(1)[:, :6], batch["y"]
        count = (y != 2).sum()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log(name, loss, batch_size=count, on_step=True, on_epoch=True, prog_bar=True)
        self.log(f"{name}_median", loss, on_step=False, on_epoch=True, reduce_fx=torch.median)
        self.log(f"{name}_number", 3.0, batch_size=count, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.step(batch, "loss")
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val_loss")

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-3)


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = labeled(40)[index]
        return {"x": x.unsqueeze(0).expand(4, 6), "y": y}


class DuringBatches(Callback):
    """Records waits in training and evaluation, from the start of each pass to the end of its last batch."""

    def __init__(self) -> None:
        self.waits = toy.Waits()

    def on_train_batch_start(self, *arguments: Any) -> None:
        toy.Waits.active = self.waits

    on_validation_batch_start = on_train_batch_start

    def on_train_epoch_end(self, *arguments: Any) -> None:
        toy.Waits.active = None

    on_validation_epoch_end = on_train_epoch_end


def waits_of(folder: Path, module: TrainModule | None = None, rows: Any = None, **arguments: Any) -> list[str]:
    recorder = DuringBatches()
    callbacks = [recorder, *arguments.pop("callbacks", [])]
    own = {"accelerator": "toy", "max_epochs": 3, "default_root_dir": folder, "num_sanity_val_steps": 0}
    loader = DataLoader(rows or Rows(), 4)
    try:
        Trainer(**{**QUIET, **own, "callbacks": callbacks, **arguments}).fit(module or Net(), loader, loader)
    finally:
        toy.Waits.active = None
    return [f"{what} {line}" for what, line in recorder.waits.found]


LOGGED: dict[str, Any] = {"log_every_n_steps": 1, "enable_progress_bar": True}


@pytest.mark.parametrize(
    "callback",
    [
        lambda: DriftGuard(every_n_steps=100),
        lambda: StragglerMonitor(every_n_steps=2),
        lambda: EarlyStopping("val_loss"),
        lambda: GradNormMonitor(per="module", after_clipping=True),
        lambda: LearningRateMonitor(log_momentum=True),
        lambda: RichProgressBar(),
        lambda: SequenceLengthWarmup(0.5, 1, 4, 1, keys={"x"}),
        lambda: SpikeDetection(),
        lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1, device=None),
        lambda: ThroughputMonitor(lambda batch: len(batch["y"]), window_size=4, split=True),
    ],
    ids=lambda make: type(make()).__name__,
)
def test_a_callback_does_not_wait(callback: Any, tmp_path: Path) -> None:
    logged = {**LOGGED, "logger": CSVLogger(tmp_path), "gradient_clip_val": 1.0, "val_check_interval": 5}
    assert waits_of(tmp_path, callbacks=[callback()], **logged) == []


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.NAdam,
        lambda own, lr: Muon([p for p in own if p.dim() == 2], lr),
    ],
    ids=["SGD", "NAdam", "Muon"],
)
@pytest.mark.parametrize("manual", [False, True])
def test_an_optimizer_does_not_wait(optimizer: Any, manual: bool, tmp_path: Path) -> None:
    assert waits_of(tmp_path, Net(optimizer, manual)) == []


def test_a_guard_waits_once_in_a_window(tmp_path: Path) -> None:
    found = waits_of(tmp_path, callbacks=[NonFiniteGuard()], accumulate_grad_batches=2)
    assert len(found) == 15 and all("callbacks/non_finite_guard.py" in line for line in found)


# language models ------------------------------------------------------------------------------------------------------
class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences of 16 tokens, in packed rows of two documents, or with a mask."""

    def __init__(self, extra: str = "") -> None:
        self.extra = extra

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 64, (16,), generator=torch.Generator().manual_seed(index))
        row = {"input_ids": ids, "labels": torch.where(torch.arange(16) < 3, -100, ids)}
        extra = {"position_ids": torch.arange(8).repeat(2), "attention_mask": torch.ones(16, dtype=torch.long)}
        return {**row, **({self.extra: extra[self.extra]} if self.extra else {})}


def language_model_waits(folder: Path, rows: Tokens, **arguments: Any) -> list[str]:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    module = HFModule(transformers.AutoModelForCausalLM.from_config(config), **arguments)
    found = waits_of(folder, module, rows, accumulate_grad_batches=2, gradient_clip_val=1.0)
    # transformers starts its cache with empty tensors, whose copies a GPU skips.
    return [line for line in found if "cache_utils.py" not in line]


@pytest.mark.parametrize("arguments", [{}, {"label_smoothing": 0.1}, {"chunked_loss": True}], ids=str)
def test_a_language_model_waits_only_to_check_its_first_batch(arguments: Any, tmp_path: Path) -> None:
    found = language_model_waits(tmp_path, Tokens(), **arguments)
    assert len(found) <= 3 and all("leyden/hf/loss.py" in line for line in found), found


@pytest.mark.parametrize(("extra", "checks"), [("attention_mask", 0), ("position_ids", 2)])
def test_transformers_waits_to_choose_a_mask(extra: str, checks: int, tmp_path: Path) -> None:
    """Once in each forward pass, of three epochs and of Leyden's check that documents do not see each other."""
    found = [line for line in language_model_waits(tmp_path, Tokens(extra)) if "leyden/hf/" not in line]
    assert len(found) == 3 * (4 + 4) + checks and all("masking_utils.py" in line for line in found), found
