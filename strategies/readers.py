"""Readers: the ranks that see different samples. A tensor-parallel group counts once in their collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy

T = TypeVar("T")


class Readers:
    """The ranks of a strategy that see different samples: one rank for each data rank.

    Ranks that share their batches (tensor, sequence or pipeline parallel) have equal values, so a collective over all
    ranks uses the value of only one of them. In a pipeline it is a rank of the last stage, since only those have the
    step's outputs. Every rank must call the same collectives in the same order.

    Args:
        strategy: the strategy.
        data_ranks: a number for every rank, equal on ranks of which one counts; the strategy's data ranks if omitted.

    Attributes:
        ranks: global rank of each reader, by data rank. Each rank picks the reader at its own position in the groups
            that share batches.
        is_first: True on the first of the ranks that share this rank's batches.
    """

    def __init__(self, strategy: Strategy, data_ranks: Sequence[int] | None = None) -> None:
        self._ranks = strategy.ranks
        data_ranks = strategy.data_ranks if data_ranks is None else list(data_ranks)
        own_rank = strategy.ranks.global_rank
        has_outputs = strategy.outputs.on_ranks(strategy.ranks)
        position = data_ranks[:own_rank].count(data_ranks[own_rank])
        members: dict[int, list[int]] = {}
        for rank, data_rank in enumerate(data_ranks):
            if has_outputs[rank]:
                members.setdefault(data_rank, []).append(rank)
        self.ranks = [group[position % len(group)] for _, group in sorted(members.items())]
        self.is_first = position == 0
        self._first_members = {group[0] for group in members.values()}
        self._are_all = len(self.ranks) == len(data_ranks)

    def of(self, values: Sequence[T]) -> list[T]:
        """Selects the readers' values, in the order of data ranks, from the values of all ranks."""
        return list(values) if self._are_all else [values[rank] for rank in self.ranks]

    def all_gather(self, tensor: Tensor, on_host: bool = False, sync_grads: bool = False) -> Tensor:
        """Stacks the readers' tensors: (data_size, *tensor.shape).

        Args:
            tensor: this rank's tensor. All ranks need the same shape.
            on_host: whether to gather a CPU tensor over the host group, without waiting for a device.
            sync_grads: whether backward sends each rank the gradients of its part.
        """
        stacked = self._ranks.all_gather(tensor, self._ranks.host_group if on_host else None, sync_grads)
        return stacked if self._are_all else torch.stack([stacked[rank] for rank in self.ranks])

    def all_gather_object(self, obj: T) -> list[T]:
        """Returns the readers' objects, on every rank."""
        return self.of(self._ranks.all_gather_object(obj))

    def gather_object(self, obj: T) -> list[T] | None:
        """Returns the readers' objects on rank 0, and None on the other ranks."""
        gathered = self._ranks.gather_object(obj)
        return None if gathered is None else self.of(gathered)

    def reduce(self, tensor: Tensor, on_host: bool = False, reduction: str = "mean") -> Tensor:
        """Reduces the readers' tensors by "mean", "sum", "max" or "min". Every rank gets the result."""
        group = self._ranks.host_group if on_host else None
        if self._are_all or reduction in ("max", "min"):
            return self._ranks.reduce(tensor, group, reduction)
        contributes = self._ranks.global_rank in self._first_members
        total = self._ranks.reduce(tensor if contributes else torch.zeros_like(tensor), group, "sum")
        return total / len(self.ranks) if reduction in ("mean", "avg") else total
