"""on_train_epoch_start runs before the epoch's first random draw, as in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Tiny
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leyden import Trainer
from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint


class ShiftedIndices(Dataset[Tensor]):
    shift = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index + self.shift))


class DrawsAtEpochStart(Callback):
    """Draws random numbers and changes the dataset at each epoch's start."""

    def __init__(self, data: ShiftedIndices) -> None:
        self.data = data
        self.drawn: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.drawn.append(torch.rand(()).item())
        self.data.shift = 100 * trainer.current_epoch


def loader_of(data: ShiftedIndices, workers: int = 0) -> DataLoader[Tensor]:
    return DataLoader(data, 2, shuffle=True, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_order_and_data_after_the_hook_equal_the_plain_loop(fit: Any, workers: int) -> None:
    data, plain = ShiftedIndices(), []
    torch.manual_seed(1)
    for epoch in range(2):
        torch.rand(())
        data.shift = 100 * epoch
        plain += [float(batch[0, 0]) for batch in loader_of(data, workers)]
    after = torch.rand(())
    module, data = Tiny(), ShiftedIndices()
    torch.manual_seed(1)
    fit(module, loader_of(data, workers), callbacks=[DrawsAtEpochStart(data)], max_epochs=2)
    assert module.trained == plain
    assert torch.equal(torch.rand(()), after)


class SavesInHook(Callback):
    order = -1

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir, "in the hook"))


@pytest.mark.parametrize("end", [{}, {"limit_train_batches": 3}])
def test_a_resume_continues_the_order_that_followed_the_hook(quiet: Any, end: Any) -> None:
    def run(path: str | None) -> tuple[list[float], list[float]]:
        torch.manual_seed(1 if path is None else 50)
        module, data = Tiny(), ShiftedIndices()
        draws = DrawsAtEpochStart(data)
        saves = ModelCheckpoint(
            every_n_train_steps=1, save_top_k=-1, filename="{step}", dirpath=quiet["default_root_dir"]
        )
        arguments = {**quiet, **end, "max_epochs": 3, "enable_checkpointing": True}
        Trainer(**arguments, callbacks=[SavesInHook(), draws, saves]).fit(module, loader_of(data), ckpt_path=path)
        return module.trained, draws.drawn

    trained, drawn = run(None)
    steps = len(trained) // 3
    for step in (1, steps, steps + 2):
        path = str(Path(quiet["default_root_dir"], f"step={step}"))
        again, redrawn = run(path)
        assert [value % 100 for value in again] == [value % 100 for value in trained[step:]], step
        assert redrawn == drawn[len(drawn) - len(redrawn) :]
    # A checkpoint from inside the hook: a resume runs the callbacks that come after it.
    assert run(str(Path(quiet["default_root_dir"], "in the hook"))) == (trained[steps:], drawn[1:])
