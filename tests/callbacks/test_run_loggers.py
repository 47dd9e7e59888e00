"""Monitors: the steps at which they log, and the loggers they need."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import QUIET, Squares
from samples import numbered

from leyden import Callback, Trainer
from leyden.callbacks import CSVLogger, DeviceStatsMonitor, GradNormMonitor, LearningRateMonitor, ThroughputMonitor
from leyden.core.errors import ConfigurationError

MONITORS = (LearningRateMonitor, DeviceStatsMonitor, GradNormMonitor, lambda: ThroughputMonitor(len))


def fit(folder: Path, monitor: Callback, every: int) -> Trainer:
    """Trains and validates three batches."""
    arguments = {**QUIET, "logger": CSVLogger(folder)}
    trainer = Trainer(**arguments, max_epochs=1, log_every_n_steps=every, callbacks=[monitor], default_root_dir=folder)
    trainer.fit(Squares(), numbered(3), numbered(3))
    return trainer


def columns(trainer: Trainer) -> set[str]:
    lines = Path(trainer.log_dir or "", "metrics.csv").read_text().splitlines()
    return set(lines[0].split(","))


@pytest.mark.parametrize("monitor", MONITORS)
def test_log_every_n_steps_zero_disables_logging_of_steps(tmp_path: Path, monitor: type[Callback]) -> None:
    assert columns(fit(tmp_path / "never", monitor(), 0)) == {"step", "val_loss", "epoch"}
    assert columns(fit(tmp_path / "always", monitor(), 1)) > {"step", "loss", "val_loss", "epoch"}


@pytest.mark.parametrize("monitor", MONITORS[:2])
def test_a_monitor_needs_a_logger_except_under_fast_dev_run(tmp_path: Path, monitor: type[Callback]) -> None:
    callback = monitor()
    arguments = {**QUIET, "max_epochs": 1, "callbacks": [callback], "default_root_dir": tmp_path}
    with pytest.raises(ConfigurationError, match=f"{type(callback).__name__} needs a logger"):
        Trainer(**arguments).fit(Squares(), numbered(1))
    Trainer(**arguments, fast_dev_run=True).fit(Squares(), numbered(1))


def test_a_throughput_monitor_without_a_logger_warns(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(len, window_size=2)
    trainer = Trainer(**QUIET, max_epochs=1, log_every_n_steps=1, callbacks=[monitor], default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="ThroughputMonitor has no logger"):
        trainer.fit(Squares(), numbered(4))
    assert trainer.callback_metrics["train/samples_per_sec"] > 0
