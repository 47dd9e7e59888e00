"""Numbered samples, and a net that records each rank's batches: so runs on other numbers of ranks can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def numbered_samples(count: int) -> TensorDataset:
    """Triples (x of 6 numbers, class of 3, number of the sample)."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(x, y, torch.arange(count))


class Block(nn.Module):
    """What a sharded net is wrapped by.

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
    """A net from x to y."""
    return nn.Sequential(nn.Linear(6, 16), Block(inner), Block(inner), nn.Linear(16, 3))


def global_batches(ranks: list[dict[str, Any]]) -> list[tuple[list[int], float]]:
    """Of each global batch, in the order of steps: the numbers of its samples, and its mean loss.

    Args:
        ranks: of each, under "seen", its batches: (numbers of the samples, loss of each).
    """
    found = []
    for parts in zip(*(rank["seen"] for rank in ranks), strict=True):
        samples = [number for part in parts for number in part[0]]
        losses = [loss for part in parts for loss in part[1]]
        found.append((sorted(samples), sum(losses) / len(losses)))
    return found
