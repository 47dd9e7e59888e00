"""Shared by the tests of the Trainer: a module that records its batches, a Trainer that writes nothing, and a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leyden import Trainer, TrainModule
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.checkpoint.writer import CheckpointWriter

Fit = Callable[..., Trainer]


class Tiny(TrainModule):
    """One weight per feature; counts its steps, and remembers the batches that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.net.weight)
        self.trained: list[float] = []
        self.validated: list[float] = []
        self.validated_at: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(float(batch.flatten()[0]))
        return self(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.validated.append(float(batch.flatten()[0]))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", batch.flatten()[0])

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated_at.append(self.trainer.progress.batches)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbered(count: int, size: int = 1, start: int = 0) -> list[Tensor]:
    """Batches whose values are their numbers: (size, 2) each."""
    return [torch.full((size, 2), float(number)) for number in range(start, start + count)]


@pytest.fixture(name="Tiny")
def _tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture
def batches() -> Callable[..., list[Tensor]]:
    return numbered


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a Trainer that shows and writes nothing."""
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "default_root_dir": tmp_path,
    }


@pytest.fixture
def fit(quiet: dict[str, Any]) -> Fit:
    """Fits for one epoch, unless the arguments say otherwise."""

    def run(module: TrainModule, train: Any, val: Any = None, **arguments: Any) -> Trainer:
        trainer = Trainer(**{"max_epochs": 1, **quiet, **arguments})
        trainer.fit(module, train, val)
        return trainer

    return run


@pytest.fixture
def disk(tmp_path: Path) -> Callable[..., Any]:
    """Writes a tree to a checkpoint on disk and returns what is read back."""

    def send(tree: Any, **reading: Any) -> Any:
        with CheckpointWriter(tmp_path / "tree") as writer:
            writer.state("user", tree)
            path = writer.commit(progress={})
        return CheckpointReader(path).state("user", **reading)

    return send
