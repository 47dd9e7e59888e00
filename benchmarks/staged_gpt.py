"""The benchmarks' GPT as a pipeline of two stages, hand-written with torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICRO_BATCHES = 4


class First(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.characters, self.positions = model.characters, model.positions
        self.blocks = model.blocks[: len(model.blocks) // 2]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.blocks = model.blocks[len(model.blocks) // 2 :]
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_by_hand(model: Any, batches: Iterable[Tensor]) -> None:
    """Trains by 1F1B, and clips by the norm over both stages."""
    is_last = dist.get_rank() == 1
    stage = PipelineStage(Last(model) if is_last else First(model), dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    parameters = list(stage.submod.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=model.lr)
    for batch in batches:
        optimizer.zero_grad()
        if is_last:
            schedule.step(target=batch[:, 1:], losses=[], return_outputs=False)
        else:
            schedule.step(batch[:, :-1], return_outputs=False)
        square = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())
        optimizer.step()


__all__ = ["MICRO_BATCHES", "train_by_hand"]
