"""Saving and resuming on two ranks: a resumed run is bit-identical, and every rank agrees on the checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import QUIET, SAVED
from ranks.world import run_world
from samples import labeled
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader

from leyden import Trainer, TrainModule
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.checkpoint.reader import CheckpointReader


class Net(TrainModule):
    """Draws different random numbers on each rank, and records its losses."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), 0.01)


def trainer_in(folder: str, every: int, **arguments: Any) -> Trainer:
    """Returns a Trainer that saves every `every` steps, and keeps all checkpoints."""
    checkpoint = ModelCheckpoint(every_n_train_steps=every, save_top_k=-1, filename="{step}")
    settings = {**QUIET, "enable_checkpointing": True, "strategy": "ddp", "default_root_dir": folder}
    return Trainer(callbacks=checkpoint, **settings, **arguments)


def fit(folder: str, ckpt_path: str | None, max_steps: int) -> dict[str, Any]:
    """Returns what a run ended with, on this rank."""
    torch.manual_seed(5)
    random.seed(5)
    module = Net()
    trainer = trainer_in(folder, every=5, max_epochs=-1, max_steps=max_steps)
    # Ranks must not draw the same numbers.
    torch.manual_seed(5 + trainer.global_rank)
    trainer.fit(module, DataLoader(labeled(64), 4, shuffle=True), ckpt_path=ckpt_path)
    checkpoint: Any = trainer.checkpoint_callback
    return {
        "losses": module.losses,
        "weights": {name: tensor.numpy() for name, tensor in module.state_dict().items()},
        "paths": [Path(path).name for path in [checkpoint.best_model_path, checkpoint.last_model_path]],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "random": (float(torch.rand(())), random.random()),
    }


def differ_only_in_statistics(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Returns True if only batch norm's statistics differ, which are those of different batches."""
    differ = {name for name, value in a["weights"].items() if not np.array_equal(value, b["weights"][name])}
    return differ == {"net.1.running_mean", "net.1.running_var"}


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(a["weights"][name], b["weights"][name]) for name in a["weights"])


def test_ddp_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = run_world(2, fit, str(tmp_path / "whole"), None, 30)
    assert differ_only_in_statistics(whole[0], whole[1])
    assert whole[0]["losses"] != whole[1]["losses"], "the ranks have the same samples and random numbers"
    assert whole[0]["paths"] == whole[1]["paths"]
    # Both steps are in the middle of an epoch of 8.
    for step in (5, 10):
        path = tmp_path / "whole" / SAVED / f"step={step}"
        assert CheckpointReader(path).has("rank-0") and CheckpointReader(path).has("rank-1")
        resumed = run_world(2, fit, str(tmp_path / f"again {step}"), str(path), 30)
        for rank in (0, 1):
            assert resumed[rank]["losses"] == whole[rank]["losses"][step:]
            assert same_weights(resumed[rank], whole[rank])
            assert resumed[rank]["random"] == whole[rank]["random"]
            assert resumed[rank]["metrics"] == whole[rank]["metrics"]


def test_all_ranks_resume_from_the_last_checkpoint(tmp_path: Path) -> None:
    first = run_world(2, fit, str(tmp_path), "auto", 10)
    again = run_world(2, fit, str(tmp_path), "auto", 15)
    straight = run_world(2, fit, str(tmp_path / "straight"), None, 15)
    assert [len(rank["losses"]) for rank in first + again] == [10, 10, 5, 5]
    assert same_weights(again[0], straight[0]) and same_weights(again[1], straight[1])


def test_only_the_rank_that_cannot_save_reports_its_error(tmp_path: Path) -> None:
    first, second = run_world(2, fail_to_save, str(tmp_path), may_fail=True)
    # The other rank is ended, or fails without a report of its own.
    assert second == "UnsupportedStateError reported True"
    assert first in (1, "CheckpointError reported False", "OtherRankError reported False")
    assert [path.name for path in (tmp_path / SAVED).iterdir()] == ["step=1"]


class Unsavable(Net):
    """Has state on rank 1 that cannot be saved, in its third save."""

    saves = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saves += 1
        # The first save is a trial before the first step.
        if self.trainer.global_rank == 1 and self.saves == 3:
            checkpoint["file"] = open  # a builtin, which cannot be saved


def fail_to_save(folder: str) -> str:
    from leyden.strategies import process_group

    trainer = trainer_in(folder, every=1, max_steps=4)
    try:
        trainer.fit(Unsavable(), DataLoader(labeled(64), 4))
    except Exception as error:
        failure = process_group._first_failure
        return f"{type(error).__name__} reported {failure is not None and failure.reported}"
    return "saved"


def save_afterwards(folder: str) -> tuple[list[str], int]:
    trainer = Trainer(accelerator="cpu", strategy="ddp", default_root_dir=folder, logger=False, max_steps=2)
    trainer.fit(Net(), DataLoader(labeled(64), 4))
    paths = [trainer.save_checkpoint(f"{folder}/after") for _ in range(2)]
    weights = trainer.save_checkpoint(f"{folder}/weights", weights_only=True)
    assert trainer.last_checkpoint == weights
    return [path.name for path in [*paths, weights]], trainer.global_step


def test_a_checkpoint_can_be_saved_after_the_run(tmp_path: Path) -> None:
    found = run_world(2, save_afterwards, str(tmp_path))
    assert found == [(["after", "after", "weights"], 2)] * 2
    module = Net.load_from_checkpoint(tmp_path / "after")
    assert set(module.state_dict()) == set(CheckpointReader(tmp_path / "weights").model())
    assert CheckpointReader(tmp_path / "after").has("rank-1")
