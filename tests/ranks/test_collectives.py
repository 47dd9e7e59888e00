"""What ranks tell each other through the Trainer, the module and the strategy."""

from __future__ import annotations

from typing import Any

import torch
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
        everyone = strategy.ranks.all_gather(mine, sync_grads=True)
        assert everyone.shape == (2, *mine.shape) and everyone.requires_grad
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
        return everyone.flatten(0, 1).pow(3).sum()  # type: ignore[no-any-return]

    def on_after_backward(self) -> None:
        assert self.net.weight.grad is not None
        self.found["gradient"] = self.net.weight.grad.tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def batch(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def talk() -> dict[str, Any]:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy="ddp", accelerator="cpu", max_epochs=1, use_distributed_sampler=False, **quiet)
    torch.manual_seed(0)
    module = Contrast()
    trainer.fit(module, [batch(trainer.global_rank)])
    nested = module.found.pop("nested")
    module.found["nested"] = {"a": nested["a"].tolist(), "b": nested["b"][0].tolist()}
    return module.found


def test_collectives_return_values_of_every_rank() -> None:
    first, second = run_world(2, talk)
    assert first == second
    assert first["mean"] == [1.5, -1.5] and first["sum"] == [3.0, -3.0]
    assert first["max"] == [2.0, 0.0] and first["min"] == [1.0, -3.0]
    assert first["objects"] == [{"rank": 0}, {"rank": 1}]
    assert first["broadcast"] == ({"of": 0}, ["of", 1])
    assert first["any"] == (True, False)
    assert first["nested"] == {"a": [0, 1], "b": [[0.0, 0.0], [1.0, 1.0]]}
    assert "reduction='medium' is not known" in first["unknown"]
    # Each rank's loss is the whole one: each part gets the gradient twice, and DDP takes the mean over two.
    torch.manual_seed(0)
    net = Contrast().net
    net(torch.cat([batch(0), batch(1)])).pow(3).sum().backward()
    assert net.weight.grad is not None
    assert torch.allclose(torch.tensor(first["gradient"]), net.weight.grad, rtol=1e-5)
