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

from leyden import Callback, Trainer, TrainModule
from leyden.callbacks import ModelCheckpoint

BATCHES = 12


class Accumulates(TrainModule):
    """Two parts with an optimizer each, which step every second and every third batch.

    Args:
        kind: "zeroes last", "zeroes first", "zeroes never", "zeroes seldom", "plain" for a plain loss.backward(), or
            "mixed" for one beside manual_backward.
        exchanges: whether ranks exchange gradients in each batch, or only in the one before a step.
        shares: whether the two parts share a weight.
    """

    def __init__(self, kind: str = "zeroes last", exchanges: bool = True, shares: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kind, self.exchanges = kind, exchanges
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3 if shares else 1)
        if shares:
            self.two.weight = self.one.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers(), start=2):  # type: ignore[arg-type]
            steps = (batch_idx + 1) % number == 0
            if self.kind == "zeroes first" and batch_idx % number == 0:
                optimizer.zero_grad()
            with optimizer.toggle_model(sync_grad=self.exchanges or steps):
                loss = self.two(self.one(batch).tanh()).square().mean()
                if self.kind == "plain" or (self.kind == "mixed" and number == 3):
                    loss.backward()
                else:
                    self.manual_backward(loss)
            if steps:
                optimizer.step()
                if self.kind in ("zeroes last", "plain", "mixed") or (
                    self.kind == "zeroes seldom" and (batch_idx + 1) % (2 * number) == 0
                ):
                    optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (self.one, self.two)]


class Heads(TrainModule):
    """Three batches per step, each of which trains another head. Only the last one exchanges gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 3 == 2):
            self.manual_backward(self.heads[batch_idx % 3](self.body(batch).tanh()).square().mean())
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Words(TrainModule):
    """An embedding with sparse gradients, which steps every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 3, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.words(batch[:, 0].mul(3).long() % 10).square().sum())
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.parameters(), lr=0.05)


class SaveEach(Callback):
    """Saves a checkpoint after each batch, whether it stepped or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"batch{trainer.progress.batches}")


def loader() -> DataLoader[Any]:
    data: Any = torch.randn(4 * BATCHES, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, 2)


def fit(folder: Path, options: dict[str, Any], strategy: str, resumes: str | None = None, limit: int = BATCHES) -> Any:
    module = Heads() if "heads" in options else Words() if "sparse" in options else Accumulates(**options)
    saves = [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1), SaveEach(folder)]
    arguments = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder / "runs"}
    arguments |= {"max_epochs": 1, "limit_train_batches": limit}
    if strategy != "auto":
        arguments["strategy"] = strategy
    trainer = Trainer(**arguments, callbacks=[] if resumes else saves)
    trainer.fit(module, loader(), ckpt_path=resumes)
    return numbers_of(module)


def fit_and_resume(folder: Path, options: dict[str, Any], strategy: str) -> list[str]:
    """Returns the names of checkpoints from which a resumed run ends with other weights, and the number of all."""
    expected = fit(folder, options, strategy)
    names = sorted(path.name for path in folder.iterdir() if path.name.startswith("batch"))
    return [
        str(len(names)),
        *(name for name in names if fit(folder, options, strategy, str(folder / name)) != expected),
    ]


@pytest.mark.parametrize("kind", ["zeroes last", "zeroes first", "zeroes never", "zeroes seldom", "plain", "mixed"])
def test_a_resume_keeps_gradients_that_wait_for_a_step(kind: str, tmp_path: Path) -> None:
    assert fit_and_resume(tmp_path, {"kind": kind}, "auto") == ["12"]


def test_a_resume_keeps_sparse_gradients(tmp_path: Path) -> None:
    assert fit_and_resume(tmp_path, {"sparse": True}, "auto") == ["12"]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {"exchanges": True}),
        ("ddp", {"exchanges": False}),
        ("ddp", {"heads": True}),
        ("fsdp", {"exchanges": True}),
        ("fsdp", {"exchanges": False}),
        ("fsdp", {"heads": True}),
        ("fsdp", {"exchanges": False, "shares": True}),
    ],
)
def test_each_rank_keeps_its_own_gradients(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = run_world(2, fit_and_resume, tmp_path, options, strategy)
    assert found == [["12"], ["12"]]


def test_a_resume_on_another_number_of_ranks_warns_of_lost_gradients(tmp_path: Path) -> None:
    run_world(2, fit, tmp_path, {}, "ddp")
    with pytest.warns(UserWarning, match="gradients accumulated over batches .* left out"):
        fit(tmp_path, {}, "auto", str(tmp_path / "epoch=0-step=1"))


def test_checkpoints_without_open_gradients_hold_none(tmp_path: Path) -> None:
    fit(tmp_path, {"kind": "zeroes last"}, "auto", limit=6)
    sizes = {path.name: sum(file.stat().st_size for file in path.iterdir()) for path in tmp_path.glob("epoch*")}
    # Both optimizers step in the sixth batch, which is step 4 of the run.
    assert sizes["epoch=0-step=4"] < sizes["epoch=0-step=3"]
