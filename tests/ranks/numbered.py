"""Numbered samples, a small net and global batches, to compare runs on different numbers of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def numbered_samples(count: int) -> TensorDataset:
    """Returns triples: 6 inputs, one of 3 classes, the number of the sample."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(x, y, torch.arange(count))


class Block(nn.Module):
    """A residual block, the unit that FSDP wraps.

    Args:
        inner: width between the two layers; an odd one puts the border of two shards inside a row.
    """

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(torch.tanh(self.first(x)))
        return out


def blocks(inner: int) -> nn.Sequential:
    """Returns a net from the inputs to the classes."""
    return nn.Sequential(nn.Linear(6, 16), Block(inner), Block(inner), nn.Linear(16, 3))


def global_batches(ranks: list[dict[str, Any]]) -> list[tuple[list[int], float]]:
    """Returns the sample numbers and the mean loss of each global batch, in the order of steps.

    Args:
        ranks: result of each rank, whose "seen" lists its batches as (numbers of the samples, loss of each).
    """
    found = []
    for parts in zip(*(rank["seen"] for rank in ranks), strict=True):
        samples = [number for part in parts for number in part[0]]
        losses = [loss for part in parts for loss in part[1]]
        found.append((sorted(samples), sum(losses) / len(losses)))
    return found
