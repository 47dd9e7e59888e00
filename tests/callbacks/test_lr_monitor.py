"""LearningRateMonitor: names, intervals, and the rate each step used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from leyden.callbacks.loggers.logger import Logger
from leyden.callbacks.lr_monitor import LearningRateMonitor
from leyden.core.errors import ConfigurationError
from leyden.trainer.module import TrainModule
from leyden.trainer.trainer import Trainer

DATA = [torch.ones(2, 2)] * 4


class RowRecorder(Logger):
    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Net(TrainModule):
    def __init__(self, configure: Callable[[Net], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 1)
        self.unused = nn.Parameter(torch.ones(1))
        self.configure = configure
        self.used: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.b(self.a(batch)).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return self.configure(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.used.append(float(optimizer.param_groups[0]["lr"]))


def fit(
    root: Path, configure: Callable[[Net], Any], monitor: LearningRateMonitor, **arguments: Any
) -> tuple[RowRecorder, Net]:
    kept, net = RowRecorder(), Net(configure)
    settings = {"logger": kept, "max_epochs": 2, "log_every_n_steps": 1, "default_root_dir": root}
    Trainer(callbacks=[monitor], **{**QUIET, **settings, **arguments}).fit(net, DATA)
    return kept, net


def by_step(net: Net) -> Any:
    optimizer = SGD(net.parameters(), lr=1.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}}


def by_epoch(net: Net) -> Any:
    optimizer = SGD(net.parameters(), lr=1.0)
    return [optimizer], [StepLR(optimizer, 1, 0.5)]


def test_the_logged_rate_is_the_one_the_step_used(tmp_path: Path) -> None:
    kept, net = fit(tmp_path, by_step, LearningRateMonitor())
    assert kept.rows == [(step, {"lr-SGD": lr}) for step, lr in enumerate(net.used, start=1)]
    assert net.used == [0.5**step for step in range(8)]


def test_an_accumulation_window_counts_as_one_step(tmp_path: Path) -> None:
    kept, net = fit(tmp_path, by_step, LearningRateMonitor("step"), accumulate_grad_batches=3, log_every_n_steps=2)
    assert kept.rows == [(2, {"lr-SGD": net.used[1]}), (4, {"lr-SGD": net.used[3]})]


def test_an_epoch_scheduler_is_logged_once_per_epoch(tmp_path: Path) -> None:
    monitor = LearningRateMonitor()
    kept, _ = fit(tmp_path, by_epoch, monitor)
    assert kept.rows == [(0, {"lr-SGD": 1.0}), (4, {"lr-SGD": 0.5})]
    assert monitor.lrs == {"lr-SGD": [1.0, 0.5]}


def test_logging_interval_overrides_the_schedulers_interval(tmp_path: Path) -> None:
    steps, _ = fit(tmp_path, by_epoch, LearningRateMonitor("step"), log_every_n_steps=2)
    assert steps.rows == [(2, {"lr-SGD": 1.0}), (4, {"lr-SGD": 1.0}), (6, {"lr-SGD": 0.5}), (8, {"lr-SGD": 0.5})]
    epochs, _ = fit(tmp_path, by_step, LearningRateMonitor("epoch"))
    assert epochs.rows == [(0, {"lr-SGD": 1.0}), (4, {"lr-SGD": 0.0625})]


def test_without_a_scheduler_rates_are_logged_by_step(tmp_path: Path) -> None:
    kept, _ = fit(tmp_path, lambda net: SGD(net.parameters(), lr=0.1), LearningRateMonitor(), log_every_n_steps=4)
    assert kept.rows == [(4, {"lr-SGD": 0.1}), (8, {"lr-SGD": 0.1})]


def test_rates_are_named_by_optimizer_group_and_scheduler(tmp_path: Path) -> None:
    def configure(net: Net) -> Any:
        first = SGD([{"params": net.a.weight}, {"params": net.a.bias, "lr": 0.2, "name": "bias"}], lr=0.1)
        second, third = Adam([net.b.weight], lr=torch.tensor(0.3)), Adam([net.b.bias], lr=0.4)
        named = {"scheduler": StepLR(third, 100), "name": "tail", "interval": "step"}
        return [{"optimizer": first}, {"optimizer": second}, {"optimizer": third, "lr_scheduler": named}]

    kept, _ = fit(tmp_path, configure, LearningRateMonitor(), max_epochs=1, log_every_n_steps=4)
    assert kept.rows == [
        (4, {"lr-SGD/pg1": 0.1, "lr-SGD/bias": 0.2, "lr-Adam": pytest.approx(0.3), "tail": 0.4}),
    ]


def test_optimizers_of_one_kind_are_numbered_and_log_momentum_and_decay(tmp_path: Path) -> None:
    def configure(net: Net) -> Any:
        return [
            SGD(net.a.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
            SGD(net.b.parameters(), lr=0.2),
            Adam([net.unused], lr=0.3, betas=(0.8, 0.9)),
        ]

    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    kept, _ = fit(tmp_path, configure, monitor, max_epochs=1, log_every_n_steps=4)
    assert kept.rows[0][1] == {
        "lr-SGD": 0.1,
        "lr-SGD-momentum": 0.9,
        "lr-SGD-weight_decay": 0.01,
        "lr-SGD-1": 0.2,
        "lr-SGD-1-momentum": 0.0,
        "lr-SGD-1-weight_decay": 0.0,
        "lr-Adam": 0.3,
        "lr-Adam-momentum": 0.8,
        "lr-Adam-weight_decay": 0.0,
    }


def test_duplicate_group_names_raise(tmp_path: Path) -> None:
    def configure(net: Net) -> Any:
        groups = [{"params": net.a.parameters(), "name": "x"}, {"params": net.b.parameters(), "name": "x"}]
        return SGD(groups, lr=0.1)

    with pytest.raises(ConfigurationError, match="two parameter groups are called 'lr-SGD/x'"):
        fit(tmp_path, configure, LearningRateMonitor())


def test_an_invalid_interval_raises() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'epoch'"):
        LearningRateMonitor("epochs")  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
def test_callback_metrics_hold_the_rates_from_the_first_step(tmp_path: Path, interval: Any) -> None:
    seen: list[dict[str, float]] = []

    class MetricsRecorder(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})
            return super().training_step(batch, batch_idx)

    def configure(net: Net) -> Any:
        optimizer = SGD(net.parameters(), lr=0.5, momentum=0.25)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    monitor = LearningRateMonitor(interval, log_momentum=True)
    settings = {"logger": RowRecorder(), "max_epochs": 2, "log_every_n_steps": 3, "default_root_dir": tmp_path}
    Trainer(callbacks=[monitor], **{**QUIET, **settings}).fit(MetricsRecorder(configure), DATA)
    assert seen[0] == {"lr-SGD": 0.5, "lr-SGD-momentum": 0.25}
    assert seen[-1]["lr-SGD"] == 0.25
    assert monitor.lrs["lr-SGD"] == [0.5, 0.25]


def test_the_last_momentum_and_weight_decay_are_attributes(tmp_path: Path) -> None:
    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    fit(tmp_path, lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), monitor)
    assert monitor.last_momentum_values == {"lr-SGD-momentum": 0.9}
    assert monitor.last_weight_decay_values == {"lr-SGD-weight_decay": 0.01}
