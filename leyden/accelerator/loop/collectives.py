"""Collectives of a custom training loop, on nested structures of tensors, objects, flags and random states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from leyden.accelerator.ranks import Alone
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.tree import leaves, map_tensors
from leyden.data.rng import rng_state, set_rng_state
from leyden.strategies.base import Strategy
from leyden.strategies.readers import Readers
from leyden.trainer.engine.gathering import check_shapes

if TYPE_CHECKING:
    from leyden.accelerator.prepared.loader import PreparedLoader
    from leyden.trainer.engine.debugging import Checker

T = TypeVar("T")
UNEVEN = (
    "accelerator.pad_across_processes pads them to one shape; gather_for_metrics accepts batches of different sizes; "
    "Accelerator(even_batches=True), the default, fills last batches."
)
REDUCTIONS = ("sum", "mean", "max", "min", "none")


class Collectives:
    """The collectives of a custom training loop. Every rank must call them, and every rank gets the result.

    `Accelerator`'s methods of the same names describe the arguments. The ranks of a tp group have the same samples, so
    only one of them contributes to what is gathered or reduced. The ranks of a cp group have parts of the same samples:
    `gather`, `reduce` and scalars take all parts. What is gathered by sample is taken from one rank, and floating-point
    numbers, one per sample, are averaged over the parts.

    `reading` has the prepared loaders being iterated, the innermost last, whose sample counts `gather_for_metrics`
    reads. In debug mode, `checker` compares operands across ranks before each collective.
    """

    def __init__(
        self, strategy: Strategy, alone: Alone, reading: Sequence[PreparedLoader] = (), checker: Checker | None = None
    ) -> None:
        self._strategy = strategy
        self._alone = alone
        self._readers = Readers(strategy)
        self._parts = Readers(strategy, strategy.part_ranks)
        self._reading = reading
        self._checker = checker
        self._trigger = False

    def announce(self, name: str, operands: Any = None, alike: bool = True) -> None:
        """Refuses a collective that only some ranks call; in debug mode, compares the ranks' operands.

        Without `alike`, shapes and dtypes may differ, and only the names of the collectives are compared.
        """
        if self._strategy.ranks.world_size > 1:
            self._alone.refuse(name)
            if self._checker is not None:
                self._checker.compare(name, operands, alike)

    def wait_for_everyone(self) -> None:
        """Blocks until every rank has called this method."""
        self.announce("wait_for_everyone")
        self._strategy.ranks.barrier()

    def gather(self, tensor: T) -> T:
        """Concatenates the tensors of all ranks along their first dimension; scalars become (num_processes,)."""
        if self._strategy.ranks.world_size == 1:
            return tensor
        check_tensors(tensor, "gather")
        self.announce("gather", tensor)
        if self._checker is None:
            check_shapes(self._strategy, tensor, None, "gather", UNEVEN)
        return map_tensors(tensor, self._gather_one)

    def _gather_one(self, tensor: Tensor) -> Tensor:
        stacked = self._parts.all_gather(tensor)  # (ranks with different samples or parts of them, *shape)
        return stacked if tensor.dim() == 0 else stacked.flatten(0, 1)

    def gather_object(self, obj: list[Any]) -> list[Any]:
        """Concatenates the lists of all ranks, in rank order."""
        self.announce("gather_object")
        return [entry for part in self._readers.all_gather_object(obj) for entry in part]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers per-sample results of the current batch: each sample once, in the dataset's order."""
        self.announce("gather_for_metrics", None if use_gather_object else input_data, alike=False)
        if use_gather_object:
            return self._gather_list(input_data if isinstance(input_data, list) else [input_data])
        return self._gather_samples(input_data)

    def _gather_samples(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            return self._gather_rows(data)
        if isinstance(data, Mapping):
            kind: Any = type(data)
            return kind({key: self._gather_samples(value) for key, value in data.items()})
        if isinstance(data, (list, tuple)):
            if any(isinstance(leaf, Tensor) for leaf in leaves(data)):
                parts = [self._gather_samples(entry) for entry in data]
                return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
            gathered = self._gather_list(list(data))
            return gathered if isinstance(data, list) else type(data)(gathered)
        if self._strategy.ranks.world_size > 1:
            check_tensors(data, "gather_for_metrics")
        return data

    def _gather_list(self, entries: list[Any]) -> list[Any]:
        parts = [entries] if self._strategy.ranks.world_size == 1 else self._readers.all_gather_object(entries)
        counts = self._counts([len(part) for part in parts])
        return [entry for part, count in zip(parts, counts, strict=True) for entry in part[:count]]

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        loader = self._reading[-1] if self._reading else None
        if self._strategy.ranks.world_size == 1:
            if loader is None or tensor.dim() == 0:
                return tensor
            rows = loader.rows_of_samples(len(tensor))
            return tensor if rows == len(tensor) else tensor[:rows]
        if tensor.dim() == 0:
            return self._gather_one(tensor)
        if loader is None or loader.is_regular:
            return self._stacked_rows(tensor).flatten(0, 1)
        # Ranks may have different numbers of rows: pad them for the collective, then cut the padding.
        lengths: list[int] = self._readers.all_gather_object(tensor.shape[0])
        longest = max(lengths)
        if tensor.shape[0] < longest:
            filler = tensor.new_zeros((longest - tensor.shape[0], *tensor.shape[1:]))
            tensor = torch.cat([tensor, filler])
        parts = self._stacked_rows(tensor)
        return torch.cat([part[:count] for part, count in zip(parts, self._counts(lengths), strict=True)])

    def _stacked_rows(self, tensor: Tensor) -> Tensor:
        """Stacks the rows of the data ranks: (data ranks, rows, …)."""
        parts_per_sample = len(self._parts.ranks) // len(self._readers.ranks)
        if parts_per_sample == 1 or tensor.dim() > 1 or not tensor.is_floating_point():
            return self._readers.all_gather(tensor)
        # A loss of each sample, of which every rank of a cp group has that of its part of the sequence.
        stacked = self._parts.all_gather(tensor)
        return stacked.view(-1, parts_per_sample, *tensor.shape).mean(1)

    def _counts(self, lengths: list[int]) -> list[int]:
        """Returns for each rank how many of its rows belong to samples that are not duplicates."""
        samples = self._reading[-1].samples if self._reading else None
        if samples is None:
            return lengths
        pairs = list(zip(lengths, samples, strict=True))
        is_per_sample = not any(size and length % size for length, (size, _) in pairs)
        # A model may return several rows per sample.
        return [length // size * real if size else 0 for length, (size, real) in pairs] if is_per_sample else lengths

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Reduces tensors across ranks."""
        check_tensors(tensor, "reduce")
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"reduce(reduction={reduction!r}) is unknown. {nearest(reduction, REDUCTIONS)}")
        self.announce("reduce", tensor)
        if reduction == "none":
            return tensor
        if self._strategy.ranks.world_size > 1 and self._checker is None:
            check_shapes(self._strategy, tensor, None, "reduce", UNEVEN)

        def one(part: Tensor) -> Tensor:
            total = self._parts.reduce(part, reduction=reduction)
            return total if scale == 1.0 else total * scale

        return map_tensors(tensor, one)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns rank `src`'s object on every rank."""
        self.announce("broadcast")
        return self._strategy.ranks.broadcast(obj, src)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pads tensors to the largest size of one dimension on any rank, so that they can be gathered."""
        self.announce("pad_across_processes", tensor, alike=False)

        def one(part: Tensor) -> Tensor:
            if part.dim() <= dim or dim < -part.dim():
                return part
            size = max(self._strategy.ranks.all_gather_object(part.shape[dim]))
            if size == part.shape[dim]:
                return part
            shape = list(part.shape)
            shape[dim] = size - part.shape[dim]
            filler = part.new_full(shape, pad_index)
            return torch.cat([filler, part] if pad_first else [part, filler], dim)

        return map_tensors(tensor, one)

    # triggers ---------------------------------------------------------------------------------------------------------
    def set_trigger(self) -> None:
        """Sets a flag that `check_trigger` reports on every rank."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Returns True on every rank if any rank has called `set_trigger` since the last True."""
        self.announce("check_trigger")
        raised = self._strategy.ranks.any(self._trigger)
        if raised:
            self._trigger = False
        return raised


def synchronize_generators(strategy: Strategy, kinds: Sequence[str]) -> None:
    """Sets the random number generators of these kinds to rank 0's states."""
    wanted = [kind for kind in kinds if kind != "generator"]
    if not wanted or strategy.ranks.world_size == 1:
        return
    own = rng_state()
    agreed = strategy.ranks.broadcast({kind: own[kind] for kind in wanted if kind in own})
    set_rng_state({**own, **agreed})


def check_tensors(data: Any, name: str) -> None:
    """Raises TypeError if a nested structure holds anything but tensors: every rank would keep its own value.

    Example:
        >>> check_tensors({"loss": 0.5}, "gather")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: gather got a value of type float, but takes tensors. Pass torch.tensor(value, ...
    """
    if data is None or isinstance(data, Tensor):
        return
    if isinstance(data, Mapping):
        entries: Any = data.values()
    elif isinstance(data, (list, tuple, set, frozenset)):
        entries = data
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        entries = vars(data).values()
    else:
        raise TypeError(
            f"{name} got a value of type {type(data).__name__}, but takes tensors. Pass "
            "torch.tensor(value, device=accelerator.device), or use gather_object([value]) for other objects."
        )
    for entry in entries:
        check_tensors(entry, name)
