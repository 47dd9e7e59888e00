"""Manual optimization that accumulates over batches: a run resumed from any checkpoint ends with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.world import run_world
from same import numbers_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Trainer, TrainModule
from leyden.callbacks import ModelCheckpoint

BATCHES = 12


class Accumulates(TrainModule):
    """Two parts with an optimizer each, which step every second and every third batch.

    Args:
        kind: "zeroes last", "zeroes first", or "plain" for a plain loss.backward().
        exchanges: whether ranks exchange gradients in each batch, or only in the one before a step.
    """

    def __init__(self, kind: str = "zeroes last", exchanges: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kind, self.exchanges = kind, exchanges
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers(), start=2):  # type: ignore[arg-type]
            steps = (batch_idx + 1) % number == 0
            if self.kind == "zeroes first" and batch_idx % number == 0:
                optimizer.zero_grad()
            with optimizer.toggle_model(sync_grad=self.exchanges or steps):
                loss = self.two(self.one(batch).tanh()).square().mean()
                if self.kind == "plain":
                    loss.backward()
                else:
                    self.manual_backward(loss)
            if steps:
                optimizer.step()
                if self.kind != "zeroes first":
                    optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (self.one, self.two)]


def loader() -> DataLoader[Any]:
    data: Any = torch.randn(4 * BATCHES, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, 2)


def fit(folder: Path, options: dict[str, Any], strategy: str, resumes: str | None = None, limit: int = BATCHES) -> Any:
    module = Accumulates(**options)
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    arguments = {**QUIET, "enable_checkpointing": True, "max_epochs": 1, "limit_train_batches": limit}
    if strategy != "auto":
        arguments["strategy"] = strategy
    trainer = Trainer(**arguments, callbacks=[] if resumes else saves)
    trainer.fit(module, loader(), ckpt_path=resumes)
    return numbers_of(module)


def fit_and_resume(folder: Path, options: dict[str, Any], strategy: str) -> list[str]:
    """Returns the names of checkpoints from which a resumed run ends with other weights, and the number of all."""
    expected = fit(folder, options, strategy)
    names = sorted(path.name for path in folder.iterdir() if path.name.startswith("epoch"))
    return [
        str(len(names)),
        *(name for name in names if fit(folder, options, strategy, str(folder / name)) != expected),
    ]


@pytest.mark.parametrize("kind", ["zeroes last", "zeroes first", "plain"])
def test_a_resume_keeps_gradients_that_wait_for_a_step(kind: str, tmp_path: Path) -> None:
    assert fit_and_resume(tmp_path, {"kind": kind}, "auto") == ["8"]


@pytest.mark.parametrize(("strategy", "exchanges"), [("ddp", True), ("ddp", False), ("fsdp", True)])
def test_each_rank_keeps_its_own_gradients(strategy: str, exchanges: bool, tmp_path: Path) -> None:
    found = run_world(2, fit_and_resume, tmp_path, {"exchanges": exchanges}, strategy)
    assert found == [["8"], ["8"]]


def test_a_resume_on_another_number_of_ranks_warns_of_lost_gradients(tmp_path: Path) -> None:
    run_world(2, fit, tmp_path, {}, "ddp")
    with pytest.warns(UserWarning, match="gradients accumulated over batches .* left out"):
        fit(tmp_path, {}, "auto", str(tmp_path / "epoch=0-step=1"))


def test_checkpoints_without_open_gradients_hold_none(tmp_path: Path) -> None:
    fit(tmp_path, {"kind": "zeroes last"}, "auto", limit=6)
    sizes = {path.name: sum(file.stat().st_size for file in path.iterdir()) for path in tmp_path.glob("epoch*")}
    # Both optimizers step in the sixth batch, which is step 4 of the run.
    assert sizes["epoch=0-step=4"] < sizes["epoch=0-step=3"]
