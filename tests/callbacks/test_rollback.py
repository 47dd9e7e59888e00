"""NonFiniteGuard("rollback"): the run goes back to its checkpoint and on in the data, and a resume of it is exact."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from leyden import Callback, ConfigurationError, LeydenError, Trainer, seed_everything
from leyden.callbacks import (
    CSVLogger,
    EMAWeightAveraging,
    ModelCheckpoint,
    NonFiniteError,
    NonFiniteGuard,
)

SIZE = 40
"""Samples; batches of two make 20 steps of an epoch."""


class Data(Dataset[Tensor]):
    def __init__(self, bad: tuple[int, ...]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), math.inf) if index in self.bad else torch.sin(torch.arange(2.0) + index)


class Net(Squares):
    """Draws in each step, steps schedulers by steps and by epochs, and sums up an epoch's loss."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1)))
        self.bad = bad
        """Batches, counted over epochs, of which the loss is nan."""
        self.used: list[tuple[int, int, int]] = []
        self.epoch_losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.used.append((self.trainer.global_step, self.current_epoch, batch_idx))
        loss = super().training_step(batch, batch_idx)
        if self.trainer.progress.batches in self.bad:
            loss = loss * math.nan
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_end(self) -> None:
        self.epoch_losses.append(float(self.trainer.callback_metrics["mean"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        by_step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9), "interval": "step"}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), by_step]


class Stops(Callback):
    """Breaks the run off before a batch, as a kill would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.batches == self.at:
            raise RuntimeError("broken off")


def run(
    folder: Path,
    bad: tuple[int, ...] = (),
    *,
    batches: tuple[int, ...] = (),
    every: int = 5,
    stop: int | None = None,
    path: str | None = None,
    patience: int | None = 10,
    **arguments: Any,
) -> tuple[Net, Trainer, NonFiniteGuard]:
    seed_everything(3)
    guard = NonFiniteGuard("rollback", patience=patience)
    saves = ModelCheckpoint(every_n_train_steps=every, save_top_k=-1, save_on_exception=False)
    callbacks: list[Callback] = [guard, saves, *([] if stop is None else [Stops(stop)])]
    settings = {**QUIET, "max_epochs": 2, **arguments, "default_root_dir": folder, "enable_checkpointing": True}
    trainer, module = Trainer(**settings, callbacks=callbacks), Net(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if stop is None:
            trainer.fit(module, DataLoader(Data(bad), 2, shuffle=True), ckpt_path=path)
        else:
            with pytest.raises(RuntimeError, match="broken off"):
                trainer.fit(module, DataLoader(Data(bad), 2, shuffle=True), ckpt_path=path)
    return module, trainer, guard


def state_of(module: Net, trainer: Trainer) -> dict[str, Any]:
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "rates": [scheduler.state_dict() for scheduler in trainer.lr_schedulers],
        "progress": {**trainer.progress.to_dict(), "seconds": 0.0},
        "loss": module.epoch_losses,
        "next": torch.rand(()),
    }


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    else:
        assert one == other


def test_the_run_goes_back_in_its_steps_and_on_in_its_data(tmp_path: Path) -> None:
    module, trainer, guard = run(tmp_path, (7,), max_epochs=1)
    [(bad, place)] = guard.rolled_back
    assert place == (bad - 1) // 5 * 5
    # Every batch is used once, those since the checkpoint for nothing.
    assert [batch for _, _, batch in module.used] == list(range(20))
    assert [step for step, _, _ in module.used] == [*range(bad), *range(place, 20 - bad + place)]
    assert trainer.global_step == 20 - (bad - place) and trainer.progress.batches == 20
    assert all(bool(tensor.isfinite().all()) for tensor in module.state_dict().values())
    assert math.isfinite(module.epoch_losses[0])


@pytest.mark.parametrize(
    ("every", "batches", "places"),
    # The second goes back into the epoch before the last one.
    [(5, (13, 34, 36), [(14, 10), (31, 30), (32, 30)]), (30, (33, 44, 45), [(34, 30), (41, 30), (31, 30)])],
)
def test_a_run_that_is_broken_off_and_resumed_ends_as_the_one_that_is_not(
    every: int, batches: tuple[int, ...], places: list[tuple[int, int]], tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", batches=batches, every=every, max_epochs=3)
    assert whole[2].rolled_back == places
    wanted = state_of(*whole[:2])
    for stop in (32, 35, 45, 52):
        folder = tmp_path / str(stop)
        run(folder, batches=batches, every=every, stop=stop, max_epochs=3)
        saved = any((folder / "checkpoints").iterdir())
        again = run(folder, batches=batches, every=every, path="last" if saved else None, max_epochs=3)
        assert again[2].rolled_back == places
        assert_equal(state_of(*again[:2]), wanted)


def test_a_window_is_passed_over_as_a_whole(tmp_path: Path) -> None:
    module, trainer, guard = run(tmp_path, (7,), every=2, accumulate_grad_batches=2, max_epochs=1)
    [(bad, place)] = guard.rolled_back
    assert trainer.global_step == 10 - (bad - place) and len(module.used) == 20


def test_without_a_checkpoint_and_without_patience_it_raises(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step \d+ .*Its samples are .*cannot go back: there is no checkpoint"):
        run(tmp_path / "none", (7,), every=100)
    bad = tuple(range(20, SIZE))
    with pytest.raises(NonFiniteError, match=r"has gone back to step \d+ 2 times in a row"):
        run(tmp_path / "often", bad, every=1, patience=2)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run(tmp_path, (), every=15, max_epochs=1)
    start = tmp_path / "checkpoints" / "epoch=0-step=15"

    class Damages(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            for path in (tmp_path / "checkpoints").glob("epoch=1-*/model.safetensors"):
                path.write_bytes(b"damaged")

    seed_everything(3)
    guard = NonFiniteGuard("rollback")
    saves = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
    settings = {**QUIET, "default_root_dir": tmp_path, "enable_checkpointing": True, "max_epochs": 2}
    trainer = Trainer(**settings, callbacks=[Damages(), guard, saves])
    bad = Data((7,))
    with pytest.warns(UserWarning, match="passing over a damaged checkpoint"):
        trainer.fit(Net(), DataLoader(bad, 2, shuffle=True), ckpt_path=start)
    assert {place for _, place in guard.rolled_back} <= {15, 18}


def test_loggers_keep_what_they_have_and_repeat_the_steps(tmp_path: Path) -> None:
    _, _, guard = run(tmp_path, (7,), max_epochs=1, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    [(bad, place)] = guard.rolled_back
    [file] = tmp_path.rglob("metrics.csv")
    assert bad > place and "nan" not in file.read_text().splitlines()[-1]


def test_what_cannot_go_back_is_refused(tmp_path: Path) -> None:
    data = DataLoader(Data(()), 2)
    average = EMAWeightAveraging(decay=0.9)
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[NonFiniteGuard("rollback"), average])
    with pytest.raises(ConfigurationError, match="cannot take the averages of EMAWeightAveraging back"):
        trainer.fit(Net(), data)
    trainer = Trainer(**QUIET, max_epochs=1, precision="16-mixed", callbacks=[NonFiniteGuard("rollback")])
    with pytest.raises(ConfigurationError, match="nothing to do under a gradient scaler"):
        trainer.fit(Net(), data)
    with pytest.raises(LeydenError, match="roll_back is for hooks between two steps of a fit"):
        trainer.roll_back()


def test_an_older_state_has_gone_back_nowhere() -> None:
    guard = NonFiniteGuard("rollback")
    guard.load_state_dict({"skipped": [3], "in_a_row": 1})
    assert guard.rolled_back == [] and guard.skipped == [3]
    guard.rolled_back.append((7, 5))
    again = NonFiniteGuard()
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert again.rolled_back == [(7, 5)] and re.search("rolled_back", str(guard.state_dict()))
