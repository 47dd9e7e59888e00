"""The settings that a strategy receives before training, and the schedulers that it adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET, Line
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, StepLR

from leyden import Trainer
from leyden.core.errors import ConfigurationError
from leyden.strategies import SingleDeviceStrategy
from leyden.strategies.base import RunSettings


class Halving(SingleDeviceStrategy):
    """Records its settings, rejects a given batch size, and halves the learning rate in each step."""

    def __init__(self, refused_batch_size: int | None = None) -> None:
        super().__init__("cpu")
        self.settings: list[RunSettings] = []
        self.refused_batch_size = refused_batch_size

    def check_settings(self, settings: RunSettings) -> None:
        self.settings.append(settings)
        if settings.batch_size == self.refused_batch_size is not None:
            raise ConfigurationError(f"batch_size={self.refused_batch_size}: use another.")

    def make_schedulers(self) -> list[Any]:
        return [LambdaLR(self.optimizers[0], lambda step: 0.5**step)]


class Net(Line):
    """Records the learning rate of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        return [optimizer], [StepLR(optimizer, 100)]


def fit(strategy: Halving, **arguments: Any) -> tuple[Trainer, Net]:
    trainer, module = Trainer(**QUIET, strategy=strategy, max_epochs=1, **arguments), Net()
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(15, 2), batch_size=3))
    return trainer, module


def test_a_strategy_receives_settings_as_they_become_known() -> None:
    strategy = Halving()
    fit(strategy, accumulate_grad_batches=2, gradient_clip_val=0.5)
    made, prepared, loaded = strategy.settings
    for settings in strategy.settings:
        assert (settings.accumulation, settings.clip_value, settings.clip_algorithm) == (2, 0.5, "norm")
        assert (settings.manual, settings.own_backward) == (False, False)
    assert (made.optimizers, made.batch_size) == (None, None)
    assert (prepared.optimizers, prepared.schedulers, prepared.batch_size) == (1, 1, None)
    assert loaded.batch_size == 3


def test_a_setting_that_a_strategy_refuses_raises() -> None:
    with pytest.raises(ConfigurationError, match="batch_size=3: use another"):
        fit(Halving(refused_batch_size=3))


def test_a_strategys_schedulers_step_alongside_the_modules() -> None:
    trainer, module = fit(Halving(), accumulate_grad_batches=2)
    assert [type(config.scheduler) for config in trainer.lr_scheduler_configs] == [StepLR, LambdaLR]
    assert module.rates == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert trainer.global_step == 3
