"""GradientAccumulation: window lengths, errors, and use by the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line

from leyden.callbacks.base import Callback
from leyden.callbacks.gradient_accumulation import GradientAccumulation, GradientAccumulationScheduler
from leyden.core.errors import ConfigurationError
from leyden.trainer.module import TrainModule
from leyden.trainer.trainer import Trainer


class WindowRecorder(Callback):
    """Records (epoch, batches) of each window when it closes."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.window.closes:
            self.seen.append((trainer.current_epoch, trainer.window.length))


@pytest.mark.parametrize(
    ("steps", "lengths"),
    [
        (4, [4, 4, 4, 4, 4]),
        ({0: 3}, [3, 3, 3, 3, 3]),
        ({1: 2, 3: 5}, [1, 2, 2, 5, 5]),
        ({3: 5, 1: 2}, [1, 2, 2, 5, 5]),
        ({0: 8, 2: 4}, [8, 8, 4, 4, 4]),
    ],
)
def test_a_schedule_gives_the_window_length_of_every_epoch(steps: Any, lengths: list[int]) -> None:
    accumulation = GradientAccumulation(steps)
    assert [accumulation.length(epoch) for epoch in range(5)] == lengths
    assert accumulation.longest == max(lengths)
    assert accumulation.length(10**9) == lengths[-1]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (0, "0 is not a number of batches. Give a whole number from 1"),
        (-2, "-2 is not a number of batches"),
        (2.0, "2.0 is not a number of batches"),
        (True, "True is not a number of batches"),
        ("4", "'4' is not a number of batches"),
        (None, "None is not a number of batches"),
        ({}, "an empty schedule"),
        ({0: 0}, "0 is not a number of batches"),
        ({0: 1.5}, "1.5 is not a number of batches"),
        ({-1: 2}, "-1 is not an epoch"),
        ({"0": 2}, "'0' is not an epoch"),
        ({1.0: 2}, "1.0 is not an epoch"),
        ({False: 2}, "False is not an epoch"),
    ],
)
def test_invalid_arguments_raise(steps: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GradientAccumulation(steps)


def test_gradient_accumulation_scheduler_takes_only_a_dict() -> None:
    scheduler = GradientAccumulationScheduler(scheduling={0: 8, 4: 4})
    assert isinstance(scheduler, GradientAccumulation)
    assert (scheduler.length(3), scheduler.length(4)) == (8, 4)
    with pytest.raises(ConfigurationError, match="give a dict"):
        GradientAccumulationScheduler(scheduling=4)  # type: ignore[arg-type]


def test_changing_the_dict_does_not_change_the_schedule() -> None:
    lengths_by_epoch = {0: 2}
    accumulation = GradientAccumulation(lengths_by_epoch)
    lengths_by_epoch[0] = 7
    assert accumulation.length(0) == 2


def test_windows_follow_the_schedule_and_end_with_the_epoch(tmp_path: Path) -> None:
    windows = WindowRecorder()
    callbacks = [GradientAccumulation({1: 4, 2: 2}), windows]
    trainer = Trainer(**QUIET, max_epochs=3, callbacks=callbacks, default_root_dir=tmp_path)
    trainer.fit(Line(), [torch.ones(2, 2)] * 5)
    # The last window of an epoch has the remaining batches.
    assert windows.seen == [(0, 1)] * 5 + [(1, 4), (1, 1)] + [(2, 2), (2, 2), (2, 1)]
    assert trainer.global_step == 10
