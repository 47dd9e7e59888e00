"""Data that rank 0 alone reads and hands out, and streams of which every rank takes its part."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from leyden.strategies.base import Strategy
from leyden.strategies.batch import batch_size_of, map_tensors
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.data.limits import length_of
from leyden.trainer.data.sharding import block

END = None


class StreamPart(IterableDataset[Any]):
    """One rank's blocks of a stream: of each `ranks × size` samples the rank's own `size`.

    Args:
        dataset: gives the same samples in the same order on every rank.
        rank: this rank.
        ranks: their number.
        size: samples of a rank's batch.
        even: fill the last global batch with samples from the stream's begin.
        drop_last: leave out a last global batch that is not full.
    """

    def __init__(self, dataset: Any, rank: int, ranks: int, size: int, even: bool, drop_last: bool) -> None:
        self.dataset = dataset
        self.rank, self.ranks, self.size = rank, ranks, size
        self.even, self.drop_last = even, drop_last
        self.last: int | None = None
        """Samples of the last global batch, once it is known to be short."""
        if callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None)):
            # Its place is at the end of a global batch whenever this rank's batch is complete.
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __len__(self) -> int:
        count, span = len(self.dataset), self.ranks * self.size
        rest = count % span
        short = 0 if self.drop_last or not rest else self.size
        if short and not self.even:
            short = len(range(rest)[block(rest, self.rank, self.ranks)])
        return count // span * self.size + short

    @property
    def counts(self) -> list[tuple[int, int]] | None:
        """For each rank the samples of the last batch, and how many of them are no repeats; None if all are."""
        if self.last is None or not self.even:
            return None
        starts = range(0, self.ranks * self.size, self.size)
        return [(self.size, max(0, min(self.size, self.last - start))) for start in starts]

    def __iter__(self) -> Iterator[Any]:
        stream, span = iter(self.dataset), self.ranks * self.size
        first: list[Any] = []
        self.last = None
        while drawn := list(itertools.islice(stream, span)):
            first = first or drawn
            if len(drawn) < span:
                if self.drop_last:
                    return
                self.last = len(drawn)
                if not self.even:
                    yield from drawn[block(len(drawn), self.rank, self.ranks)]
                    return
                drawn = list(itertools.islice(itertools.chain(drawn, itertools.cycle(first)), span))
            yield from drawn[self.rank * self.size : (self.rank + 1) * self.size]


class Dispatched:
    """A loader that rank 0 reads; each rank is given its part of what it reads.

    Args:
        loader: only rank 0's is read.
        strategy: of the ranks.
        split: a batch is shared out among the ranks; else each rank is given one of `ranks` batches.
        even: fill the last batches from the first, so that all ranks have as many samples.
    """

    def __init__(self, loader: Any, strategy: Strategy, split: bool, even: bool) -> None:
        self.loader = loader
        self.dataset = getattr(loader, "dataset", None)
        self.sampler = getattr(loader, "batch_sampler", None)
        self.strategy = strategy
        self.each = 1 if split else strategy.data_size
        self.even = even
        self.counts: deque[list[tuple[int, int]]] = deque()

    def __len__(self) -> int:
        length = length_of(self.loader)
        if length is None:
            raise TypeError("the loader has no length")
        return -(-length // self.each)

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = self.strategy.data_rank, self.strategy.data_size
        rounds = self._rounds() if rank == 0 else None
        self.counts.clear()
        while True:
            handed = self.strategy.broadcast(next(rounds, END) if rounds is not None else END)
            if handed is END:
                return
            whole, true = handed
            count = batch_size_of(whole)
            sizes = [len(range(count)[block(count, number, ranks)]) for number in range(ranks)]
            starts = [block(count, number, ranks).start for number in range(ranks)]
            self.counts.append(
                [(size, max(0, min(size, true - start))) for size, start in zip(sizes, starts, strict=True)]
            )
            if not sizes[rank]:
                return
            own = block(count, rank, ranks)
            yield _rows(whole, own)

    def _rounds(self) -> Iterator[Any]:
        """What is handed out at once, and how many of its samples are no repeats."""
        batches, first = iter(self.loader), None
        while drawn := list(itertools.islice(batches, self.each)):
            whole = join(drawn)
            true = batch_size_of(whole)
            first = whole if first is None else first
            wanted = batch_size_of(first)
            missing = max(0, wanted - true) if self.even else 0
            while missing:
                piece = _rows(first, slice(missing))
                whole = join([whole, piece])
                missing -= batch_size_of(piece)
            yield whole, true


def _rows(batch: Any, rows: slice) -> Any:
    return map_tensors(batch, lambda tensor: tensor[rows] if tensor.dim() else tensor)


def join(batches: list[Any]) -> Any:
    """Batches of one structure, one after the other, as one.

    Example:
        >>> join([{"x": torch.zeros(1)}, {"x": torch.ones(2)}])
        {'x': tensor([0., 1., 1.])}
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(batches) if first.dim() else torch.stack(batches)
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple) or (isinstance(first, list) and any(isinstance(e, (Tensor, Mapping)) for e in first)):
        parts = [join(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise ConfigurationError(
        f"dispatch_batches=True shares out tensors, and a batch holds a {type(first).__name__}: let every rank read its own share, "
        "with dispatch_batches=False."
    )
