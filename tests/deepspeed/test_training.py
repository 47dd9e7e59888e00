"""DeepSpeedStrategy on real ranks: the losses and weights of DDP, step by step, to six digits."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.strategies.deepspeed import DeepSpeedStrategy

INSTALLED = any(name == "deepspeed" for name in (found.name.lower() for found in metadata.distributions()))
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(not INSTALLED, reason="deepspeed is not installed here: see scripts/deepspeed-env"),
]
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "barebones": False,
}


class Net(TrainModule):
    """A regression that keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@dataclass
class Case:
    """A fit: what differs from a plain one.

    Attributes:
        zero: arguments of DeepSpeedStrategy; a name in their place is another strategy.
        trainer: arguments of the Trainer.
    """

    zero: Any
    trainer: dict[str, Any] = field(default_factory=dict)


CASES = {
    "ddp": Case("ddp"),
    **{f"stage {stage}": Case({"stage": stage}) for stage in (0, 1, 2, 3)},
}


def data(samples: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 8, generator=generator), torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def fit(case: Case) -> tuple[list[float], dict[str, Any]]:
    """The losses of this rank, and on rank 0 the weights at the end."""
    strategy = case.zero if isinstance(case.zero, str) else DeepSpeedStrategy(**case.zero)
    module = Net()
    trainer = Trainer(strategy=strategy, max_epochs=2, **{**QUIET, **case.trainer})
    trainer.fit(module, data())
    weights = trainer.strategy.full_state_dict(module)
    return module.losses, {name: value.tolist() for name, value in weights.items()}


def run_cases() -> dict[str, Any]:
    return {name: fit(case) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=[1, 2])
def results(request: pytest.FixtureRequest) -> Any:
    """What each rank saw in each case: all of them in one world of 1 rank, and of 2."""
    return run_world(request.param, run_cases)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_losses_are_those_of_ddp(results: Any, stage: int) -> None:
    for rank in results:
        (losses, weights), (expected, others) = rank[f"stage {stage}"], rank["ddp"]
        assert len(losses) == 40 // (4 * len(results)) * 2
        assert losses == pytest.approx(expected, rel=1e-6)
        if weights:
            assert weights.keys() == others.keys()
            for name, value in weights.items():
                torch.testing.assert_close(Tensor(value), Tensor(others[name]), rtol=1e-5, atol=1e-6)
