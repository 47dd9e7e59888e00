"""NonFiniteGuard("rollback") on two ranks: both roll back, under DDP and FSDP, and a resume is exact."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from ranks.world import run_world
from same import numbers_of
from samples import pairs
from torch import nn
from torch.utils.data import DataLoader

from leyden import Callback, LeydenError, Trainer, seed_everything
from leyden.callbacks import ModelCheckpoint, NonFiniteGuard, SpikeDetection
from leyden.checkpoint.reader import CheckpointReader


class Net(Squares):
    """The loss is nan in one batch of rank 1, and in the last batch, of which only rank 0 has a sample."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        rank, batches = self.trainer.global_rank, self.trainer.progress.batches
        return loss * torch.nan if (batches, rank) in ((6, 1), (10, 0)) else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def trained(root: str, strategy: str, max_steps: int = -1, path: str | None = None) -> list[Any]:
    seed_everything(3)
    guard = NonFiniteGuard("rollback")
    checkpoint = ModelCheckpoint(dirpath=root, every_n_train_steps=4, save_top_k=-1)
    settings = {**QUIET, "enable_checkpointing": True, "strategy": strategy, "devices": 2, "max_epochs": 2}
    trainer, module = Trainer(**settings, max_steps=max_steps, callbacks=[guard, checkpoint]), Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # Eleven batches, the last one of a single sample.
        trainer.fit(module, DataLoader(pairs(21, inputs=2), 1, shuffle=True), ckpt_path=path)
    weights = [number for tensor in numbers_of(module).values() for number in tensor]
    return [guard.rolled_back, trainer.global_step, weights]


class LossSpike(Net):
    """Multiplies the loss of rank 1 by a thousand in one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Squares.training_step(self, batch, batch_idx)
        return loss * 1000 if batch_idx == 5 and self.trainer.global_rank == 1 else loss


class RollsBack(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7:
            trainer.roll_back()


class RollsBackInLastBatch(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.roll_back()


class SavesInLastBatch(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "own")


class SavesInClosingHook(SavesInLastBatch):
    closing_hooks = frozenset({"on_train_batch_end"})


class RollsBackInClosingHook(RollsBackInLastBatch):
    closing_hooks = frozenset({"on_train_batch_end"})


def fit_with_callback(root: str, callback: Callback) -> int:
    """Trains an epoch whose last batch has no sample for rank 1; returns the step."""
    checkpoint = ModelCheckpoint(dirpath=root, every_n_train_steps=2, save_top_k=-1)
    settings = {**QUIET, "enable_checkpointing": True, "strategy": "ddp", "devices": 2, "max_epochs": 1}
    trainer = Trainer(**settings, callbacks=[callback, checkpoint], default_root_dir=root)
    trainer.fit(Squares(), DataLoader(pairs(9, inputs=2), 1))
    return int(trainer.global_step)


def fit_with_plain_hook(root: str, callback: Callback) -> str:
    try:
        return str(fit_with_callback(root, callback))
    except LeydenError as error:
        return str(error)


@pytest.mark.parametrize(
    ("callback", "method"), [(RollsBackInLastBatch(), "roll_back"), (SavesInLastBatch(), "save_checkpoint")]
)
def test_a_hook_that_idle_ranks_skip_can_neither_roll_back_nor_save(
    tmp_path: Any, callback: Callback, method: str
) -> None:
    found = run_world(2, fit_with_plain_hook, str(tmp_path), callback, may_fail=True)
    assert f"all ranks must call {method}" in str(found[0]) and "with closing_hooks = frozenset" in str(found[0])


def test_a_closing_hook_saves_in_a_batch_with_an_idle_rank(tmp_path: Any) -> None:
    run_world(2, fit_with_callback, str(tmp_path), SavesInClosingHook())
    CheckpointReader(tmp_path / "own").verify()


def roll_back_during_a_spike(root: str) -> list[Any]:
    """Rolls back while the ranks' exchange about the batch with the spike is pending."""
    seed_everything(3)
    spikes, checkpoint = SpikeDetection(atol=10.0), ModelCheckpoint(dirpath=root, every_n_train_steps=4, save_top_k=-1)
    settings = {**QUIET, "enable_checkpointing": True, "strategy": "ddp", "devices": 2, "max_epochs": 1}
    trainer = Trainer(**settings, callbacks=[RollsBack(), spikes, checkpoint], default_root_dir=root)
    trainer.fit(LossSpike(), DataLoader(pairs(20, inputs=2), 1))
    return [trainer.global_step, spikes.bad_batches]


def on_ranks(root: str) -> dict[str, list[Any]]:
    found = {"spike": roll_back_during_a_spike(f"{root}/spike")}
    found["single"] = [fit_with_callback(f"{root}/single", RollsBackInClosingHook())]
    for strategy in ("ddp", "fsdp"):
        found[strategy] = trained(f"{root}/{strategy}/whole", strategy)
        trained(f"{root}/{strategy}/cut", strategy, max_steps=9)
        found[f"{strategy} again"] = trained(f"{root}/{strategy}/cut", strategy, path="last")
    return found


def test_all_ranks_roll_back_together_and_a_resume_is_exact(tmp_path: Any) -> None:
    ranks: list[dict[str, list[Any]]] = run_world(2, on_ranks, str(tmp_path))
    assert all(found["spike"] == [6, []] and found["single"] == [4] for found in ranks)
    for strategy in ("ddp", "fsdp"):
        for found in ranks:
            places, steps, weights = found[strategy]
            # Of 22 batches, the rollbacks discard the three up to the first nan and the four up to the second.
            assert places == [(7, 4), (8, 4)] and steps == 15
            assert found[f"{strategy} again"] == found[strategy] == ranks[0][strategy]
            assert all(map(math.isfinite, weights))
    assert ranks[0]["fsdp"][2] == pytest.approx(ranks[0]["ddp"][2], abs=1e-5)
