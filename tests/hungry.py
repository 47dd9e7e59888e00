"""Modules that really run out of memory where a test wants it, and plain loops to compare their fits with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leyden import Trainer, TrainModule
from leyden.callbacks import AutoAccumulation

Limits = Mapping[tuple[int, str], int]
"""(optimizer step, "forward" or "backward") → the largest number of rows that fits into memory from that step on."""


def micro_batches_of(trainer: Trainer) -> int:
    """Returns the current number of micro-batches that AutoAccumulation splits a batch into."""
    [found] = [callback for callback in trainer.callbacks if isinstance(callback, AutoAccumulation)]
    return found.micro_batches


def allocate(rows: int, limit: int) -> None:
    """Requests more memory than any machine has, if there are more rows than the limit."""
    torch.empty(max(0, rows - limit), 2**50)


class Heavy(torch.autograd.Function):
    """An identity that needs memory in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: int) -> Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        allocate(len(gradient), ctx.limit)
        return gradient, None


class Net(nn.Module):
    """Two blocks with dropout in between, and running statistics, as of a batch norm, which training does not use."""

    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 8, dtype=dtype), nn.Tanh())
        self.drop = nn.Dropout(dropout)
        self.second = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Tanh())
        self.last = nn.Linear(8, 1, dtype=dtype)
        self.register_buffer("seen", torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor, forward: int = 2**40, backward: int = 2**40) -> Tensor:
        if self.seen is not None:
            self.seen += x.detach().sum(0)  # type: ignore[operator]
        x = self.drop(self.first(x))
        allocate(len(x), forward)
        return self.last(self.second(Heavy.apply(x, backward)))  # type: ignore[no-any-return,no-untyped-call]


class Hungry(TrainModule):
    """Trains a net from x to y.

    Args:
        limits: where the module runs out of memory.
        dropout: of the net.
        dtype: of the net.
        items: return a summed loss and `num_items`, both weighted by the third feature.
        seed: of the weights.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float64,
        items: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net(dtype, dropout)
        self.limits, self.items = dict(limits or {}), items
        self.rows: list[int] = []

    def limit(self, phase: str) -> int:
        """Returns the largest number of rows that fits at the current step."""
        found = [rows for (step, where), rows in self.limits.items() if where == phase and step <= self.global_step]
        return min(found, default=2**40)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.rows.append(len(x))
        losses = (self.net(x, self.limit("forward"), self.limit("backward")) - y).square()
        self.log("loss", losses.mean(), on_step=True, on_epoch=True)
        return loss_of(losses, x, self.items)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loss_of(losses: Tensor, x: Tensor, items: bool) -> Any:
    """Returns what the step returns: the mean, or a weighted sum and the sum of the weights."""
    if not items:
        return losses.mean()
    weights = 1 + (x[:, 2:] > 0).to(losses.dtype)
    return {"loss": (losses * weights).sum(), "num_items": weights.sum()}


def samples(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, generator=generator, dtype=dtype)
    return x, torch.randn(count, 1, generator=generator, dtype=dtype)


def plain_loop(
    module: Hungry, windows: Sequence[Sequence[Sequence[tuple[Tensor, Tensor]]]], draw: Callable[[], None] | None = None
) -> None:
    """Trains a module by hand.

    Args:
        module: its net is trained.
        windows: the micro-batches of each optimizer step, by rank.
        draw: called before each step.
    """
    net = module.net
    [optimizer] = [torch.optim.AdamW(net.parameters(), lr=0.01)]
    for window in windows:
        if draw is not None:
            draw()
        total: dict[str, Tensor] = {}
        everything = sum(len(x) for parts in window for x, _ in parts)
        for parts in window:
            net.zero_grad()
            rows = sum(len(x) for x, _ in parts)
            of_rank = rows * len(window) / everything
            for x, y in parts:
                loss = (net(x) - y).square().mean()
                weight = of_rank * (len(x) * len(parts) / rows)
                if weight != 1.0:
                    loss = loss * weight
                (loss / len(parts) if len(parts) > 1 else loss).backward()
            for name, parameter in net.named_parameters():
                if parameter.grad is not None:
                    own = parameter.grad / len(window)
                    total[name] = own if name not in total else total[name] + own
        for name, parameter in net.named_parameters():
            parameter.grad = total[name]
        optimizer.step()


def split_batch(x: Tensor, y: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Splits a batch as torch does: larger parts come first; empty ones are left out."""
    return [part for part in zip(x.tensor_split(count), y.tensor_split(count), strict=True) if len(part[0])]


class HungrySequences(Hungry):
    """Trains on the means of padded sequences of several lengths; memory use depends on the padded size.

    Args:
        most: the largest padded size that fits: rows times length.
        **more: arguments of `Hungry`.
    """

    def __init__(self, most: int = 2**40, **more: Any) -> None:
        super().__init__(**more)
        self.most = most
        self.lengths: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.lengths.append(x.shape[1])
        allocate(x.shape[0] * x.shape[1], self.most)
        return super().training_step((x.mean(1), y), batch_idx)


def sequences_of(count: int, longest: int) -> list[tuple[Tensor, Tensor]]:
    """Returns samples for `HungrySequences`, of which only the last is long."""
    x, y = samples(count)
    lengths = [*(1 + number % 3 for number in range(count - 1)), longest]
    return [(x[number].expand(length, 3), y[number]) for number, length in enumerate(lengths)]


def pad_collate(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*parts, strict=True)
    return nn.utils.rnn.pad_sequence(list(x), batch_first=True), torch.stack(list(y))
