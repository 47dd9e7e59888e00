"""Loaders that only rank 0 reads, and each rank's part of streams and lists."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from leyden.strategies.base import Strategy
from leyden.strategies.batch import batch_size_of, map_tensors
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.trainer.data.limits import length_of
from leyden.trainer.data.sharding import block

END = None


class Filled:
    """Marks a sample, then its batch, as part of a global batch that was filled with repeats.

    The mark travels with the batch, since only a worker process knows where the stream that it reads ends.

    Args:
        item: the sample, or the batch.
        last: samples of the global batch that are no repeats.
    """

    def __init__(self, item: Any, last: int) -> None:
        self.item, self.last = item, last

    def pin_memory(self) -> Filled:
        """Pins the batch; torch's loaders call this on batches that are no tensors."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Filled(pin_memory(self.item), self.last)  # type: ignore[no-untyped-call]


class CollateFilled:
    """Moves the mark of `Filled` from samples to their batch, around a loader's collate function."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, Filled):
            return Filled(self.collate(samples.item), samples.last)
        if not isinstance(samples, list) or not isinstance(samples[0], Filled):
            return self.collate(samples)
        return Filled(self.collate([sample.item for sample in samples]), samples[0].last)


class ListPart(list[Any]):
    """One rank's batches of a list of them.

    Args:
        batches: of all ranks.
        rank: this rank.
        ranks: their number.
        even: fill the last round from the start of the list.
    """

    def __init__(self, batches: Sequence[Any], rank: int, ranks: int, even: bool) -> None:
        self._true, self._ranks = len(batches), ranks
        last = -(-self._true // ranks) * ranks
        super().__init__(batches[n % self._true] for n in range(rank, last if even else self._true, ranks))

    def counts_at(self, position: int) -> list[tuple[int, int]] | None:
        """For each rank (1, 1), or (1, 0) for a repeat, at a position from 1; None if no rank has a repeat there."""
        if position * self._ranks <= self._true:
            return None
        return [(1, int(position * self._ranks - self._ranks + rank < self._true)) for rank in range(self._ranks)]


class StreamPart(IterableDataset[Any]):
    """One rank's blocks of a stream: `size` of every `ranks × size` samples.

    Samples of a global batch that was filled with repeats come as `Filled`, for `CollateFilled`.

    Args:
        dataset: yields the same samples in the same order on every rank.
        rank: this rank.
        ranks: their number.
        size: samples of a rank's batch.
        even: fill the last global batch with samples from the start of the stream.
        drop_last: leave out a last global batch that is not full.
    """

    def __init__(self, dataset: Any, rank: int, ranks: int, size: int, even: bool, drop_last: bool) -> None:
        self.dataset = dataset
        self.rank, self.ranks, self.size = rank, ranks, size
        self.even, self.drop_last = even, drop_last
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

    def counts(self, last: int) -> list[tuple[int, int]]:
        """For each rank, the samples of a filled global batch, and how many of them are no repeats."""
        starts = range(0, self.ranks * self.size, self.size)
        return [(self.size, max(0, min(self.size, last - start))) for start in starts]

    def __iter__(self) -> Iterator[Any]:
        stream, span = iter(self.dataset), self.ranks * self.size
        own = slice(self.rank * self.size, (self.rank + 1) * self.size)
        first: list[Any] = []
        while drawn := list(itertools.islice(stream, span)):
            first = first or drawn
            if len(drawn) == span:
                yield from drawn[own]
            elif not self.drop_last and self.even:
                filled = itertools.islice(itertools.chain(drawn, itertools.cycle(first)), own.start, own.stop)
                yield from (Filled(sample, len(drawn)) for sample in filled)
            elif not self.drop_last:
                yield from drawn[block(len(drawn), self.rank, self.ranks)]


class Dispatched:
    """A loader that only rank 0 reads, which sends every rank its part.

    Args:
        loader: only rank 0's is read.
        strategy: has the ranks.
        split: each batch is split over the ranks; otherwise each rank gets one of `ranks` batches.
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
        rounds = self._rounds() if self.strategy.ranks.is_global_zero else None
        self.counts.clear()
        while True:
            handed, state = self.strategy.ranks.broadcast((END, END) if rounds is None else self._draw(rounds))
            if state is not None and rank == 0:
                torch.set_rng_state(state)
            if handed is END:
                return
            whole, true = handed
            count = batch_size_of(whole)
            sizes = [len(range(count)[block(count, number, ranks)]) for number in range(ranks)]
            starts = [block(count, number, ranks).start for number in range(ranks)]
            if sizes[rank]:
                self.counts.append(
                    [(size, max(0, min(size, true - start))) for size, start in zip(sizes, starts, strict=True)]
                )
                yield _rows(whole, block(count, rank, ranks))
            if not all(sizes):
                # A rank that got nothing asks for nothing more, so this round is the last one for all.
                if rounds is not None and next(rounds, END) is not END:
                    raise ConfigurationError(
                        f"dispatch_batches=True: a batch of {count} came for {ranks} ranks, and more after it. Give "
                        f"batches of at least {ranks} samples, or leave even_batches at True."
                    )
                return

    def _draw(self, rounds: Iterator[Any]) -> tuple[Any, Tensor | None]:
        """The next round; and the random state after it, for ranks that share rank 0's batches and draw as it does."""
        handed = next(rounds, END)
        return handed, torch.get_rng_state() if self.strategy.data_ranks.count(0) > 1 else None

    def _rounds(self) -> Iterator[Any]:
        """Yields batches for all ranks, each with the number of its samples that are no repeats."""
        batches, first, ranks = iter(self.loader), None, self.strategy.data_size
        while drawn := list(itertools.islice(batches, self.each)):
            whole = join(drawn)
            true = batch_size_of(whole)
            first = whole if first is None else first
            # Where the first round is short as well, its ranks have as many samples each all the same.
            wanted = -(-batch_size_of(first) // ranks) * ranks
            missing = max(0, wanted - true) if self.even else 0
            while missing:
                piece = _rows(first, slice(missing))
                whole = join([whole, piece])
                missing -= batch_size_of(piece)
            yield whole, true


def _rows(batch: Any, rows: slice) -> Any:
    return map_tensors(batch, lambda tensor: tensor[rows] if tensor.dim() else tensor)


def join(batches: list[Any]) -> Any:
    """Concatenates batches of one structure.

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
        f"dispatch_batches=True splits tensors over the ranks, and a batch holds {kind_of(first)}: let every rank read "
        "its own part, with dispatch_batches=False."
    )
