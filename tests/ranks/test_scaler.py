"""fp16 and its scaler on two ranks, one of which has no sample in some batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET, finish_step
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.strategies.precision import MixedPrecision

SCALER: dict[str, Any] = {"init_scale": 2.0**8, "growth_interval": 2, "growth_factor": 2.0}
# 9 = 4 + 4 + 1: the second rank has no sample at the end of each epoch.
COUNT = 9


class Net(TrainModule):
    """Its loss is inf for one sample, in a batch that only one rank has, or in one that both have."""

    def __init__(self, manual: bool, infinite: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.automatic_optimization = not manual
        self.infinite = infinite

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        index, x = batch
        errors = (self.net(x).float() - x.sum(1, keepdim=True)).square()
        if self.current_epoch == 1:
            errors = errors * torch.where(index == self.infinite, float("inf"), 1.0).unsqueeze(1)
        return finish_step(self, errors.mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(strategy: str, size: int, manual: bool, infinite: int) -> tuple[list[float], float, tuple[int, int]]:
    x = torch.randn(COUNT, 2, generator=torch.Generator().manual_seed(1))
    module = Net(manual, infinite)
    trainer = Trainer(**QUIET, strategy=strategy, precision=MixedPrecision("16", **SCALER), max_epochs=3)
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(COUNT), x), size))
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()
    scaler: Any = trainer.strategy.precision.scaler  # type: ignore[attr-defined]
    return weights, scaler.get_scale(), (trainer.progress.global_step, trainer.progress.stepped)


CASES = [(manual, infinite) for manual in (False, True) for infinite in (COUNT - 1, 0)]


def fit_all() -> list[Any]:
    return [fit("ddp", 2, *case) for case in CASES]


def test_all_ranks_skip_the_same_steps_and_scale_equally() -> None:
    results = run_world(2, fit_all)
    for number, case in enumerate(CASES):
        weights, scale, steps = fit("single_device", 4, *case)
        first, second = (found[number] for found in results)
        assert first == second, case
        assert first[1] == scale, case
        # fp16 rounds sums over other batches differently.
        assert first[0] == pytest.approx(weights, abs=2e-3), case
        if not case[0]:
            assert first[2] == steps == (9, 8), case
