"""A TrainModule nested in a TrainModule takes part in the run of the outer one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Squares
from samples import numbered
from torch import Tensor, nn

from leyden import LeydenError, TrainModule


class Part(TrainModule):
    """A nested module whose forward pass logs, and records the epoch and step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        self.log("out", out.mean(), on_step=True, on_epoch=True)
        self.seen.append((self.current_epoch, self.global_step))
        return out


class Whole(Squares):
    """Nests one module inside a layer in `__init__`, and one in `configure_model`."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Part()))

    def configure_model(self) -> None:
        self.head = Part()

    def forward(self, x: Tensor) -> Any:
        return self.net(x) + self.head(x)


def test_nested_modules_log_and_see_the_trainer(fit: Any) -> None:
    module = Whole()
    trainer = fit(module, numbered(2), max_epochs=2)
    for part in (module.net[0], module.head):
        assert part.seen == [(0, 0), (0, 1), (1, 2), (1, 3)]
        assert part.trainer is trainer
    assert {"out_step", "out_epoch"} <= trainer.callback_metrics.keys()


def test_nested_modules_log_nothing_after_the_run(fit: Any) -> None:
    module = Whole()
    trainer = fit(module, numbered(1))
    before = trainer.callback_metrics
    module.head(torch.ones(1, 2))
    assert trainer.callback_metrics == before
    with pytest.raises(LeydenError, match="Part is not attached"):
        _ = copy.deepcopy(module).head.trainer
