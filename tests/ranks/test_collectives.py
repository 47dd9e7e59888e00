"""Collectives of the strategy and of the Trainer, within a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn

from leyden import ConfigurationError, Trainer, TrainModule


class Contrast(TrainModule):
    """A loss over the embeddings of all ranks, whose gradients flow back to each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2, bias=False)
        self.found: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy, rank = self.trainer.strategy, self.trainer.global_rank
        mine = self.net(batch)
        gathered = strategy.ranks.all_gather(mine, sync_grads=True)
        assert gathered.shape == (2, *mine.shape) and gathered.requires_grad
        assert not strategy.ranks.all_gather(mine).requires_grad
        number = torch.tensor([1.0 + rank, -3.0 * rank])
        self.found = {
            **{name: strategy.ranks.reduce(number, reduction=name).tolist() for name in ("mean", "sum", "max", "min")},
            "objects": strategy.ranks.all_gather_object({"rank": rank}),
            "broadcast": (strategy.ranks.broadcast({"of": rank}), strategy.ranks.broadcast(["of", rank], src=1)),
            "any": (strategy.ranks.any(rank == 1), strategy.ranks.any(False)),
            "nested": self.trainer.accelerator.all_gather({"a": torch.tensor(rank), "b": [torch.ones(2) * rank]}),
        }
        strategy.ranks.barrier()
        try:
            strategy.ranks.reduce(number, reduction="medium")
        except ConfigurationError as error:
            self.found["unknown"] = str(error)
        return gathered.flatten(0, 1).pow(3).sum()  # type: ignore[no-any-return]

    def on_after_backward(self) -> None:
        assert self.net.weight.grad is not None
        self.found["gradient"] = self.net.weight.grad.tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def batch(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def run_collectives() -> dict[str, Any]:
    trainer = Trainer(**QUIET, strategy="ddp", max_epochs=1, use_distributed_sampler=False)
    torch.manual_seed(0)
    module = Contrast()
    trainer.fit(module, [batch(trainer.global_rank)])
    nested = module.found.pop("nested")
    module.found["nested"] = {"a": nested["a"].tolist(), "b": nested["b"][0].tolist()}
    return module.found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Returns the results of the collectives on two ranks."""
    return run_world(2, run_collectives)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean", [1.5, -1.5]),
        ("sum", [3.0, -3.0]),
        ("max", [2.0, 0.0]),
        ("min", [1.0, -3.0]),
        ("objects", [{"rank": 0}, {"rank": 1}]),
        ("broadcast", ({"of": 0}, ["of", 1])),
        ("any", (True, False)),
        ("nested", {"a": [0, 1], "b": [[0.0, 0.0], [1.0, 1.0]]}),
    ],
)
def test_a_collective_returns_the_values_of_every_rank(ranks: list[dict[str, Any]], name: str, expected: Any) -> None:
    assert [rank[name] for rank in ranks] == [expected, expected]


def test_an_unknown_reduction_raises(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "reduction='medium' is not known" in rank["unknown"]


def test_all_gather_sends_gradients_back_to_each_rank(ranks: list[dict[str, Any]]) -> None:
    # Each rank computes the whole loss: each part gets its gradient twice, and DDP averages over two ranks.
    torch.manual_seed(0)
    net = Contrast().net
    net(torch.cat([batch(0), batch(1)])).pow(3).sum().backward()
    assert net.weight.grad is not None
    for rank in ranks:
        assert torch.allclose(torch.tensor(rank["gradient"]), net.weight.grad, rtol=1e-5)
