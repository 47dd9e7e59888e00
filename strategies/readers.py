"""Readers: the ranks that see different samples; in their exchanges a tensor-parallel group counts once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy

T = TypeVar("T")


class Readers:
    """The ranks of a strategy that see different samples: this one, and one of each other data rank.

    Ranks that share their batches (tensor, sequence or pipeline parallel) have the same values, of which an exchange
    over all ranks takes one. Every rank must call the same exchanges in the same order.

    In a pipeline only the ranks of its last stage have what steps return: of each data rank they are taken.

    Args:
        strategy: whose ranks these are.

    Attributes:
        ranks: their global ranks, by data rank. Ranks at the same place in their tp groups have the same ones.
        is_first: True on the first of the ranks that share this one's batches.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._ranks = strategy.ranks
        of_all, own = strategy.data_ranks, strategy.ranks.global_rank
        with_outputs = strategy.outputs.on_ranks(strategy.ranks)
        place = of_all[:own].count(of_all[own])
        members: dict[int, list[int]] = {}
        for rank, data_rank in enumerate(of_all):
            if with_outputs[rank]:
                members.setdefault(data_rank, []).append(rank)
        self.ranks = [found[place % len(found)] for _, found in sorted(members.items())]
        self.is_first = place == 0
        self._counted = {found[0] for found in members.values()}
        self._are_all = len(self.ranks) == len(of_all)

    def of(self, found: Sequence[T]) -> list[T]:
        """Picks the readers' values, in the order of data ranks, from those of all ranks."""
        return list(found) if self._are_all else [found[rank] for rank in self.ranks]

    def all_gather(self, tensor: Tensor, on_host: bool = False, sync_grads: bool = False) -> Tensor:
        """Stacks the readers' tensors: (data_size, *tensor.shape).

        Args:
            tensor: of the same shape on every rank.
            on_host: it is on the CPU, and no device is waited for.
            sync_grads: backward sends each rank the gradients of its part.
        """
        stacked = self._ranks.all_gather(tensor, self._ranks.host_group if on_host else None, sync_grads)
        return stacked if self._are_all else torch.stack([stacked[rank] for rank in self.ranks])

    def all_gather_object(self, obj: T) -> list[T]:
        """Returns the readers' objects, on every rank."""
        return self.of(self._ranks.all_gather_object(obj))

    def gather_object(self, obj: T) -> list[T] | None:
        """Returns the readers' objects on rank 0; None on the others."""
        found = self._ranks.gather_object(obj)
        return None if found is None else self.of(found)

    def reduce(self, tensor: Tensor, on_host: bool = False, reduction: str = "mean") -> Tensor:
        """Reduces the readers' tensors by "mean", "sum", "max" or "min"; every rank gets the result."""
        group = self._ranks.host_group if on_host else None
        if self._are_all or reduction in ("max", "min"):
            return self._ranks.reduce(tensor, group, reduction)
        counts = self._ranks.global_rank in self._counted
        total = self._ranks.reduce(tensor if counts else torch.zeros_like(tensor), group, "sum")
        return total / len(self.ranks) if reduction in ("mean", "avg") else total
