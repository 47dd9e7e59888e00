"""Per-rank state of callbacks and DataModules is restored on its rank; all other state is rank 0's."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from models import QUIET, Line
from ranks.world import run_world
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, DataModule, Trainer
from leyden.callbacks import ThroughputMonitor


def own_number() -> int:
    return 10 + int(os.environ["RANK"])


class Shared(Callback):
    """Saves a number that differs by rank, without setting `state_per_rank`."""

    def __init__(self, number: int) -> None:
        self.number, self.loaded = torch.tensor(number), -1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = int(state["number"])


class PerRank(Shared):
    state_per_rank = True


class RankZero(Shared):
    state_per_rank = False


class Data(DataModule):
    state_per_rank = True

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.loaded = number, -1

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 2)), 2)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["number"]


def fit(folder: str, path: str | None, epochs: int) -> tuple[list[int], list[str]]:
    """Returns the number that each owner loaded, and this rank's warnings."""
    number = own_number() if path is None else -5
    owners: list[Any] = [Shared(number), PerRank(number), RankZero(number)]
    trainer = Trainer(
        **QUIET,
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=epochs,
        callbacks=[*owners, ThroughputMonitor(len)],
        default_root_dir=folder,
    )
    data = Data(number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer.fit(Line(), datamodule=data, ckpt_path=path)
        if path is None:
            trainer.save_checkpoint(Path(folder) / "saved")
            trainer.save_checkpoint(Path(folder) / "again")
    messages = [str(warning.message) for warning in caught if "rank" in str(warning.message)]
    return [*(owner.loaded for owner in owners), data.loaded], messages


def fit_and_resume(folder: str) -> Any:
    return fit(folder, None, 1), fit(folder, f"{folder}/saved", 2)


def test_per_rank_state_is_restored_on_its_rank_and_other_state_is_rank_0s(tmp_path: Path) -> None:
    (first, resumed), (other_first, other_resumed) = run_world(2, fit_and_resume, str(tmp_path))
    assert resumed == ([10, 10, 10, 10], []) and other_resumed == ([10, 11, 10, 11], [])
    # One for the line of each save.
    [message], [] = set(first[1]), other_first[1]
    assert len(first[1]) == 2
    assert (
        message.startswith("the state of the callback Shared differs between ranks.")
        and "state_per_rank = True" in message
    )

    [(loaded, [message])] = run_world(1, fit, str(tmp_path), f"{tmp_path}/saved", 2)
    assert loaded == [10, 10, 10, 10]
    assert "was saved by 2 rank(s), but 1 resume it" in message
