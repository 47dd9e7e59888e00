"""A run on several ranks that is resumed: exactly on as many ranks, and with the same samples on any other number."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks.world import run_world
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.callbacks.model_checkpoint import ModelCheckpoint
from leyden.trainer.checkpoint.reader import CheckpointReader


class Net(TrainModule):
    """Draws random numbers of its own on each rank, and keeps what it lost and saw."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
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


def data(size: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))


def fit(folder: str, ckpt_path: str | None, max_steps: int, accumulate: int = 1) -> dict[str, Any]:
    """What a run ended with, on this rank."""
    torch.manual_seed(5)
    random.seed(5)
    module = Net()
    checkpoint = ModelCheckpoint(every_n_train_steps=5, save_top_k=-1, filename="{step}")
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        max_epochs=-1,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        callbacks=[checkpoint],
    )
    # Ranks must not draw the same numbers.
    torch.manual_seed(5 + trainer.global_rank)
    trainer.fit(module, DataLoader(data(), 4, shuffle=True), ckpt_path=ckpt_path)
    return {
        "losses": module.losses,
        "weights": {name: tensor.numpy() for name, tensor in module.state_dict().items()},
        "paths": [Path(path).name for path in [checkpoint.best_model_path, checkpoint.last_model_path]],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "random": (float(torch.rand(())), random.random()),
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(a["weights"][name], b["weights"][name]) for name in a["weights"])


def test_ddp_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = run_world(2, fit, str(tmp_path / "whole"), None, 30)
    assert same(whole[0], whole[1])
    assert whole[0]["losses"] != whole[1]["losses"], "each rank has its own samples and random numbers"
    assert whole[0]["paths"] == whole[1]["paths"]
    # Saved at step 10, in the middle of an epoch or not, depending on the sharding: both are gone on with.
    for step in (5, 10):
        path = tmp_path / "whole" / "checkpoints" / f"step={step}"
        assert CheckpointReader(path).has("rank-0") and CheckpointReader(path).has("rank-1")
        resumed = run_world(2, fit, str(tmp_path / f"again {step}"), str(path), 30)
        for rank in (0, 1):
            assert resumed[rank]["losses"] == whole[rank]["losses"][step:]
            assert same(resumed[rank], whole[rank])
            assert resumed[rank]["random"] == whole[rank]["random"]
            assert resumed[rank]["metrics"] == whole[rank]["metrics"]


def test_the_last_one_is_found_by_all_ranks(tmp_path: Path) -> None:
    first = run_world(2, fit, str(tmp_path), "auto", 10)
    again = run_world(2, fit, str(tmp_path), "auto", 15)
    straight = run_world(2, fit, str(tmp_path / "straight"), None, 15)
    assert [len(rank["losses"]) for rank in first + again] == [10, 10, 5, 5]
    assert same(again[0], straight[0]) and same(again[1], straight[1])
