"""Loaders that only rank 0 reads, and each rank's part of streams and lists of batches."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.tree import batch_size_of, map_tensors
from leyden.data.limits import length_of
from leyden.data.sharding import block, has_state
from leyden.strategies.base import Strategy

END = None


class Filled:
    """Marks a sample, and later its batch, as part of a global batch that was filled with duplicates.

    `last` of the samples in the global batch are not duplicates. The mark travels with the batch, since only the worker
    process that reads the stream knows where it ends.
    """

    def __init__(self, item: Any, last: int) -> None:
        self.item, self.last = item, last

    def pin_memory(self) -> Filled:
        """Pins the batch; torch's loaders call this method on custom batch types."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Filled(pin_memory(self.item), self.last)  # type: ignore[no-untyped-call]


class CollateFilled:
    """Wraps a loader's collate function, and moves the mark of `Filled` from the samples to their batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, Filled):
            return Filled(self.collate(samples.item), samples.last)
        if not isinstance(samples, list) or not isinstance(samples[0], Filled):
            return self.collate(samples)
        return Filled(self.collate([sample.item for sample in samples]), samples[0].last)


class ListPart(list[Any]):
    """One rank's batches from a list of batches; `even` fills the last round with batches from the list's start."""

    def __init__(self, batches: Sequence[Any], rank: int, ranks: int, even: bool) -> None:
        self._total, self._ranks = len(batches), ranks
        filled_total = -(-self._total // ranks) * ranks
        super().__init__(batches[n % self._total] for n in range(rank, filled_total if even else self._total, ranks))

    def counts_at(self, position: int) -> list[tuple[int, int]] | None:
        """Returns (1, 1) per rank, or (1, 0) for a duplicate; None if the round, from 1, has no duplicates."""
        if position * self._ranks <= self._total:
            return None
        return [(1, int(position * self._ranks - self._ranks + rank < self._total)) for rank in range(self._ranks)]


class StreamPart(IterableDataset[Any]):
    """One rank's blocks of a stream: `size` of every `ranks × size` samples.

    Samples of a global batch that was filled with duplicates are yielded as `Filled`, for `CollateFilled`.

    Args:
        dataset: stream that yields the same samples in the same order on every rank.
        size: batch size per rank.
        even: fill the last global batch with samples from the start of the stream.
        drop_last: drop a last global batch that is not full.
    """

    def __init__(self, dataset: Any, rank: int, ranks: int, size: int, even: bool, drop_last: bool) -> None:
        self.dataset = dataset
        self.rank, self.ranks, self.size = rank, ranks, size
        self.even, self.drop_last = even, drop_last
        if has_state(dataset):
            # Whenever this rank's batch is complete, the dataset's position is at the end of a global batch.
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __len__(self) -> int:
        count, span = len(self.dataset), self.ranks * self.size
        rest = count % span
        short = 0 if self.drop_last or not rest else self.size
        if short and not self.even:
            short = len(range(rest)[block(rest, self.rank, self.ranks)])
        return count // span * self.size + short

    def counts(self, last: int) -> list[tuple[int, int]]:
        """Returns per rank (samples, those that are not duplicates) of a global batch filled after `last` samples."""
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
    """A loader that only rank 0 reads; rank 0 broadcasts each round, and every rank keeps its part.

    Args:
        split: split each batch across the ranks; False joins one batch per rank.
        even: fill the last round with samples of the first, so that all ranks have the same number.
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
            current, state = self.strategy.ranks.broadcast((END, END) if rounds is None else self._draw(rounds))
            if state is not None and rank == 0:
                torch.set_rng_state(state)
            if current is END:
                return
            whole, real = current
            count = batch_size_of(whole)
            sizes = [len(range(count)[block(count, number, ranks)]) for number in range(ranks)]
            starts = [block(count, number, ranks).start for number in range(ranks)]
            if sizes[rank]:
                self.counts.append(
                    [(size, max(0, min(size, real - start))) for size, start in zip(sizes, starts, strict=True)]
                )
                yield _rows(whole, block(count, rank, ranks))
            if not all(sizes):
                # A rank without samples leaves its loop, so this round must be the last one for all ranks.
                if rounds is not None and next(rounds, END) is not END:
                    raise ConfigurationError(
                        f"dispatch_batches=True: a batch of {count} is too small for {ranks} ranks, and it is not the "
                        f"last. Use batches of at least {ranks} samples, or leave even_batches at True."
                    )
                return

    def _draw(self, rounds: Iterator[Any]) -> tuple[Any, Tensor | None]:
        """Returns the next round, and the random state after it if other ranks share rank 0's batches.

        Those ranks must draw the same random numbers as rank 0, but do not read the loader.
        """
        current = next(rounds, END)
        return current, torch.get_rng_state() if self.strategy.data_ranks.count(0) > 1 else None

    def _rounds(self) -> Iterator[Any]:
        """Yields (batch of all ranks, number of its samples that are not duplicates)."""
        batches, first, ranks = iter(self.loader), None, self.strategy.data_size
        while drawn := list(itertools.islice(batches, self.each)):
            whole = join(drawn)
            real = batch_size_of(whole)
            first = whole if first is None else first
            # Rounded up, so that all ranks have the same number of samples even if the first round is short.
            wanted = -(-batch_size_of(first) // ranks) * ranks
            missing = max(0, wanted - real) if self.even else 0
            while missing:
                piece = _rows(first, slice(missing))
                whole = join([whole, piece])
                missing -= batch_size_of(piece)
            yield whole, real


def _rows(batch: Any, rows: slice) -> Any:
    return map_tensors(batch, lambda tensor: tensor[rows] if tensor.dim() else tensor)


def join(batches: list[Any]) -> Any:
    """Concatenates batches of the same structure.

    Example:
        >>> join([{"x": torch.zeros(1)}, {"x": torch.ones(2)}])
        {'x': tensor([0., 1., 1.])}
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        if len({batch.shape[1:] for batch in batches}) > 1:
            raise ConfigurationError(
                f"dispatch_batches=True joins one batch per rank, but their samples differ in shape: "
                f"{[tuple(batch.shape) for batch in batches]}. Pad them to one length, use split_batches=True, or "
                "dispatch_batches=False, so that every rank reads its own part."
            )
        return torch.cat(batches) if first.dim() else torch.stack(batches)
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple) or (isinstance(first, list) and any(isinstance(e, (Tensor, Mapping)) for e in first)):
        parts = [join(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise ConfigurationError(
        f"dispatch_batches=True splits tensors across ranks, but a batch holds {kind_of(first)}. Use "
        "dispatch_batches=False, so that every rank reads its own part."
    )
