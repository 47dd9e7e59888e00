"""NonFiniteGuard("rollback") on two ranks: both go back, under DDP and with sharded weights, and a resume is exact."""

from __future__ import annotations

import math
import warnings
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


class Net(Squares):
    """The loss of rank 1 is nan in one batch, the last one, of which rank 0 alone has a sample, in another."""

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
    saves = ModelCheckpoint(dirpath=root, every_n_train_steps=4, save_top_k=-1)
    settings = {**QUIET, "enable_checkpointing": True, "strategy": strategy, "devices": 2, "max_epochs": 2}
    trainer, module = Trainer(**settings, max_steps=max_steps, callbacks=[guard, saves]), Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # Eleven batches, the last one of a single sample.
        trainer.fit(module, DataLoader(pairs(21, inputs=2), 1, shuffle=True), ckpt_path=path)
    weights = [number for tensor in numbers_of(module).values() for number in tensor]
    return [guard.rolled_back, trainer.global_step, weights]


class Jumps(Net):
    """The loss of rank 1 is a thousand times as large in one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Squares.training_step(self, batch, batch_idx)
        return loss * 1000 if batch_idx == 5 and self.trainer.global_rank == 1 else loss


class GoesBack(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7:
            trainer.roll_back()


class GoesBackAtTheEnd(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.roll_back()


class Closing(GoesBackAtTheEnd):
    closing_hooks = frozenset({"on_train_batch_end"})


def goes_back_after_a_single_sample(root: str, callback: Callback) -> int:
    """The last batch has no sample for rank 1."""
    saves = ModelCheckpoint(dirpath=root, every_n_train_steps=2, save_top_k=-1)
    settings = {**QUIET, "enable_checkpointing": True, "strategy": "ddp", "devices": 2, "max_epochs": 1}
    trainer = Trainer(**settings, callbacks=[callback, saves], default_root_dir=root)
    trainer.fit(Squares(), DataLoader(pairs(9, inputs=2), 1))
    return int(trainer.global_step)


def refused(root: str) -> str:
    try:
        return str(goes_back_after_a_single_sample(root, GoesBackAtTheEnd()))
    except LeydenError as error:
        return str(error)


def test_a_hook_that_a_rank_without_a_sample_does_not_hear_of_is_refused(tmp_path: Any) -> None:
    found = run_world(2, refused, str(tmp_path), may_fail=True)
    assert "with closing_hooks = frozenset" in str(found[0])


def forgets_a_spike(root: str) -> list[Any]:
    """Goes back while the ranks' answer on the batch that jumps is on its way."""
    seed_everything(3)
    spikes, saves = SpikeDetection(atol=10.0), ModelCheckpoint(dirpath=root, every_n_train_steps=4, save_top_k=-1)
    settings = {**QUIET, "enable_checkpointing": True, "strategy": "ddp", "devices": 2, "max_epochs": 1}
    trainer = Trainer(**settings, callbacks=[GoesBack(), spikes, saves], default_root_dir=root)
    trainer.fit(Jumps(), DataLoader(pairs(20, inputs=2), 1))
    return [trainer.global_step, spikes.bad_batches]


def on_ranks(root: str) -> dict[str, list[Any]]:
    found = {"spike": forgets_a_spike(f"{root}/spike")}
    found["single"] = [goes_back_after_a_single_sample(f"{root}/single", Closing())]
    for strategy in ("ddp", "fsdp"):
        found[strategy] = trained(f"{root}/{strategy}/whole", strategy)
        trained(f"{root}/{strategy}/cut", strategy, max_steps=9)
        found[f"{strategy} again"] = trained(f"{root}/{strategy}/cut", strategy, path="last")
    return found


def test_all_ranks_go_back_together_and_a_resume_is_exact(tmp_path: Any) -> None:
    ranks: list[dict[str, list[Any]]] = run_world(2, on_ranks, str(tmp_path))
    assert all(found["spike"] == [6, []] and found["single"] == [4] for found in ranks)
    for strategy in ("ddp", "fsdp"):
        for found in ranks:
            places, steps, weights = found[strategy]
            # In the first epoch 11 batches, of which two are passed over, and the three before the second one.
            assert places == [(7, 4), (8, 4)] and steps == 15
            assert found[f"{strategy} again"] == found[strategy] == ranks[0][strategy]
            assert all(map(math.isfinite, weights))
    assert ranks[0]["fsdp"][2] == pytest.approx(ranks[0]["ddp"][2], abs=1e-5)
