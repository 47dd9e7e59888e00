"""The phases of a fit: a checkpoint of any phase resumes as the table in `Progress` says, with the same bits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from models import Squares
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, Trainer, TrainModule
from leyden.trainer.events.progress import Phase, Progress

FLAGS = ("validation_due", "skipped", "ended")
STEPS = 6
ROWS = [line.split("  ") for line in (Progress.__doc__ or "").splitlines() if line.startswith(" " * 8) and "  " in line]
TABLE = {
    tuple(cells[0].split(", ")): cells[-1]
    for row in ROWS
    if (cells := [cell.strip() for cell in row if cell.strip()])[0].split(", ")[0] in get_args(Phase)
}
"""Maps a phase and its flags to the hook with which a resume starts."""


def row_of(progress: dict[str, Any]) -> tuple[str, ...]:
    """Returns the table's row for this progress: of the rows that match, the one with most flags."""
    holds = {progress["phase"], *(flag for flag in FLAGS if progress[flag])}
    return max((row for row in TABLE if row[0] == progress["phase"] and holds.issuperset(row)), key=len)


class Module(Squares):
    """Draws random numbers in each step, and records the hooks with which a resume can start."""

    def __init__(self, ends_early: bool = False, stops_at: int = -1, minimal: bool = False) -> None:
        super().__init__(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)))
        self.ends_early, self.stops_at, self.minimal = ends_early, stops_at, minimal
        self.calls: list[str] = []

    def on_train_start(self) -> None:
        self.calls.clear()

    def on_train_epoch_start(self) -> None:
        self.calls.append("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.calls.append("on_train_batch_start")
        return -1 if self.ends_early and batch_idx == 3 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = self.trainer.global_step + 1 == self.stops_at
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_validation_start(self) -> None:
        self.calls.append("on_validation_start")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + torch.rand(()))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)

    def on_train_epoch_end(self) -> None:
        self.calls.append("on_train_epoch_end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.1)
        if self.minimal:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss", "interval": "step", "frequency": 2}]


class Saver(Callback):
    """Saves in every hook that can: the phase saved is named after the last thing done."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.saved = folder, list[Path]()

    def save(self, trainer: Trainer, exact: bool = True) -> None:
        if self.folder is not None:
            path = self.folder / f"{len(self.saved)}"
            self.saved.append(trainer.save_checkpoint(path, exact=exact))

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.save(trainer)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.save(trainer)

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            # Inside a window, which a resume repeats.
            self.save(trainer, exact=False)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.window.closes:
            self.save(trainer)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.save(trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.save(trainer)


class ClosingSaver(Callback):
    """Saves in the last callback of on_train_epoch_end."""

    order = 100

    def __init__(self, saver: Saver) -> None:
        self.saver = saver

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.saver.save(trainer)


def fit(
    folder: Path, saver: Saver, checkpoint: Path | None = None, max_steps: int = STEPS, **options: Any
) -> tuple[Module, dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Trains to `max_steps`; returns the module, its weights, and the run's table of epoch values."""
    torch.manual_seed(1)
    module = Module(**options)
    train = DataLoader(TensorDataset(torch.rand(8, 3)), 1, shuffle=True)
    val = DataLoader(TensorDataset(torch.rand(2, 3)), 1)
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        val_check_interval=4,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[saver, ClosingSaver(saver)],
    )
    trainer.fit(module, train, None if module.minimal else val, ckpt_path=checkpoint)
    return module, {name: value.clone() for name, value in module.state_dict().items()}, trainer.history


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "uninterrupted": ({}, {}),
    "without validation or schedulers": ({"minimal": True}, {}),
    "epochs ended early": ({"ends_early": True}, {}),
    "limited inside an epoch": ({}, {"max_steps": 3}),
    "stopped inside an epoch": ({}, {"stops_at": 3}),
}
"""Options of each run, and limits for the run but not for its resumes."""
EXPECTED_ROWS: dict[str, set[tuple[str, ...]]] = {
    "uninterrupted": {
        ("epoch_start",),
        ("stepped", "validation_due"),
        ("stepped",),
        ("validated",),
        ("settled",),
        ("settled", "ended"),
        ("epoch_end",),
    },
    "without validation or schedulers": {("epoch_start",), ("settled",), ("stepped", "ended"), ("epoch_end",)},
    "epochs ended early": {("epoch_start",), ("stepped",), ("settled",), ("settled", "ended"), ("epoch_end",)},
    "limited inside an epoch": {("paused",)},
    "stopped inside an epoch": {("validated", "skipped"), ("paused",)},
}
"""Rows that the saves of each run reach, at least."""


def test_the_table_has_every_phase_and_a_test_for_every_row() -> None:
    assert {row[0] for row in TABLE} == set(get_args(Phase))
    assert set.union(*EXPECTED_ROWS.values()) == set(TABLE)


@pytest.mark.parametrize("name", RUNS)
def test_a_resume_from_any_phase_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    options, limits = RUNS[name]
    _, whole, table = fit(tmp_path, Saver(None), **options)
    assert len(table) > 1
    saver = Saver(tmp_path / "saved")
    fit(tmp_path, saver, **options, **limits)
    seen: Counter[tuple[str, ...]] = Counter()
    for path in saver.saved:
        progress = json.loads((path / "progress.json").read_text())
        row = row_of(progress)
        seen[row] += 1
        if seen[row] > 2:
            continue
        module, weights, history = fit(tmp_path, Saver(None), path, **options)
        # An interrupted window is repeated with the random numbers that follow, so its weights may differ.
        assert not progress["exact"] or all(torch.equal(weights[key], whole[key]) for key in whole), (path, progress)
        assert not progress["exact"] or history == table, (path, progress, history, table)
        if progress["global_step"] < STEPS:
            assert module.calls[0] == TABLE[row], (path, progress)
    assert seen.keys() >= EXPECTED_ROWS[name]
