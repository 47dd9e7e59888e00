"""Timer and parse_duration."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.callbacks.timer import Timer, parse_duration
from leyden.core.errors import ConfigurationError
from leyden.trainer.trainer import Trainer


class Net(Line):
    """Implements every stage."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    test_step = predict_step = validation_step


DATA = [torch.ones(2, 2)] * 5


def trainer(root: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    return Trainer(**QUIET, default_root_dir=root, callbacks=list(callbacks), **arguments)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("00:00:01:30", 90),
        (" 01:02:03:04 ", 93784),
        ("100:00:00:00", 8640000),
        (timedelta(minutes=2), 120),
        ({"hours": 1.5}, 5400),
        ({"weeks": 1, "seconds": 1}, 604801),
        (timedelta(0), 0),
    ],
)
def test_durations_are_parsed(value: Any, seconds: float) -> None:
    assert parse_duration(value).total_seconds() == seconds


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("12:00:00", "does not have the form 'DD:HH:MM:SS'"),
        ("1 day", "does not have the form 'DD:HH:MM:SS'"),
        ("00:1:00:00", "does not have the form 'DD:HH:MM:SS'"),
        ("-1:00:00:00", "does not have the form 'DD:HH:MM:SS'"),
        ({"hour": 1}, "no unit 'hour'. Did you mean 'hours'"),
        ({"hours": "1"}, r"max_time\['hours'\]='1' is not a number"),
        ({"hours": True}, "is not a number"),
        ({}, "is an empty dict"),
        ({"hours": -1}, "is negative"),
        (timedelta(seconds=-1), "is negative"),
        (3600, "is an int: give 'DD:HH:MM:SS', a datetime.timedelta, or a dict"),
        (None, "is None"),
        ({"days": 1e12}, "is too long"),
        ({"days": float("nan")}, "is too long"),
    ],
)
def test_invalid_durations_raise(value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_duration(value, "max_time")


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'step'"):
        Timer(interval="steps")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"no stage 'training'\. Did you mean 'train'"):
        Timer().time_elapsed("training")


def test_every_stage_is_measured(tmp_path: Path) -> None:
    timer = Timer()
    run = trainer(tmp_path, timer, max_epochs=1)
    assert (timer.start_time(), timer.end_time(), timer.time_elapsed(), timer.time_remaining()) == (
        None,
        None,
        0.0,
        None,
    )
    before = time.monotonic()
    run.fit(Net(), DATA, DATA)
    run.validate(Net(), DATA)
    run.test(Net(), DATA)
    run.predict(Net(), DATA)
    total = time.monotonic() - before
    stages = ("sanity_check", "train", "validate", "test", "predict")
    for stage in stages:
        start, end = timer.start_time(stage), timer.end_time(stage)
        assert start is not None
        assert end is not None
        assert before < start < end
        assert timer.time_elapsed(stage) == end - start
    assert sum(timer.time_elapsed(stage) for stage in stages) < total


class BusyWaits(Callback):
    """Busy-waits at one step until some time has passed, so the time limit is reached at a known step."""

    def __init__(self, timer: Timer, at_step: int, seconds: float) -> None:
        self.timer, self.at_step, self.seconds = timer, at_step, seconds

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        while trainer.global_step == self.at_step and self.timer.time_elapsed() < self.seconds:
            pass


def test_a_time_limit_stops_training_after_the_current_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer = Timer(timedelta(seconds=2))
    run = trainer(tmp_path, BusyWaits(timer, 7, 2.0), timer, max_epochs=1000)
    run.fit(Net(), DATA)
    assert run.global_step == 8
    assert "Time limit reached after 0:00:02. Training stops at step 8." in capsys.readouterr().out
    remaining = timer.time_remaining()
    assert remaining is not None
    assert remaining < 0


def test_a_time_limit_by_epoch_waits_for_the_epochs_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer = Timer({"seconds": 2}, interval="epoch", verbose=False)
    run = trainer(tmp_path, BusyWaits(timer, 7, 2.0), timer, max_epochs=1000)
    run.fit(Net(), DATA)
    assert run.global_step == 10
    assert "time limit" not in capsys.readouterr().out


def test_a_time_limit_waits_for_the_end_of_the_accumulation_window(tmp_path: Path) -> None:
    timer = Timer(timedelta(milliseconds=1))

    class Slow(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            while (timer.time_remaining() or 0.0) > 0:
                pass
            return super().training_step(batch, batch_idx)

    run = trainer(tmp_path, timer, max_epochs=1000, accumulate_grad_batches=3)
    run.fit(Slow(), DATA)
    assert (run.global_step, run.progress.batches) == (1, 3)


def test_time_before_a_resume_counts(tmp_path: Path) -> None:
    first = Timer("01:00:00:00")
    first.load_state_dict({"time_elapsed": {"train": 3600.0}})
    assert (first.time_elapsed(), first.time_remaining()) == (3600.0, 23 * 3600.0)
    run = trainer(tmp_path, first, max_epochs=1)
    run.fit(Net(), DATA)
    start, end = first.start_time(), first.end_time()
    assert start is not None
    assert end is not None
    assert first.time_elapsed() == 3600.0 + end - start
    second = Timer("01:00:00:00")
    second.load_state_dict(first.state_dict())
    assert second.time_elapsed() == first.state_dict()["time_elapsed"]["train"]
    assert second.state_key == first.state_key


def test_a_continued_fit_gets_the_remaining_time_and_a_new_fit_all_of_it(tmp_path: Path) -> None:
    timer = Timer("00:01:00:00")
    run = trainer(tmp_path, timer)
    net = Net()
    run.fit(net, DATA, max_epochs=1)
    one = timer.time_elapsed()
    run.fit(net, DATA, max_epochs=2, ckpt_path="current")
    two = timer.time_elapsed()
    start, end = timer.start_time(), timer.end_time()
    assert start is not None
    assert end is not None
    assert two == pytest.approx(one + end - start)
    run.fit(net, DATA, max_epochs=1)
    start, end = timer.start_time(), timer.end_time()
    assert start is not None
    assert end is not None
    assert timer.time_elapsed() == pytest.approx(end - start)


def test_a_limit_of_zero_trains_nothing(tmp_path: Path) -> None:
    run = trainer(tmp_path, Timer(timedelta(0)), max_epochs=2)
    run.fit(Net(), DATA)
    assert run.global_step == 0 and run.should_stop
