"""Looks for a large batch before training, for `AutoAccumulation(try_largest=True)`, which tries it first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from leyden.strategies.batch import map_tensors
from leyden.trainer.data.rng import isolated_rng
from leyden.trainer.data.sharding import RankBatches, is_indexed

LOOKED_AT = 8
"""Batches that are made for it, where they differ in size."""


def largest_batch(loader: Any) -> Any:
    """Makes a few batches out of samples from all over the data set, and returns the largest.

    The loader's sampler is not asked, and global random numbers are as before. The data set is read in this process,
    and what it keeps for itself changes: an open file, a generator of its own. Two batches are made where all are of
    one size.

    Args:
        loader: of the training data.

    Returns:
        The batch, on the CPU; None if batches are all of one size, or cannot be made but by the loader itself.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> lines = [torch.ones(length) for length in (1, 2, 9, 3)]
        >>> padded = DataLoader(lines, batch_size=2, collate_fn=lambda parts: torch.nn.utils.rnn.pad_sequence(parts))
        >>> largest_batch(padded).shape
        torch.Size([9, 2])
    """
    found, largest, shapes = None, -1, set()
    with isolated_rng():
        try:
            for number, batch in enumerate(_batches(loader)):
                shapes.add(tuple(_shapes(batch)))
                size = sum(torch.Size(shape).numel() for shape in _shapes(batch))
                if size > largest:
                    found, largest = batch, size
                if number == 1 and len(shapes) == 1:
                    return None
        except Exception:
            # A sample that cannot be loaded is the loop's to report, if it comes to it.
            return None
    return found


def _batches(loader: Any) -> Iterator[Any]:
    if not is_indexed(loader):
        return
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    plain = type(batches) is BatchSampler or (isinstance(batches, RankBatches) and not batches.of_batches)
    if not plain or type(sampler) not in (SequentialSampler, RandomSampler):
        # Others may leave samples out, or sort them.
        return
    size = batches.span // batches.ranks if isinstance(batches, RankBatches) else batches.batch_size
    count = len(loader.dataset)
    if not 0 < size <= count:
        return
    for indices in _places(count, size, in_order=type(sampler) is SequentialSampler):
        fetch = getattr(loader.dataset, "__getitems__", None)
        samples = fetch(indices) if callable(fetch) else [loader.dataset[index] for index in indices]
        yield loader.collate_fn(samples)


def _places(count: int, size: int, in_order: bool) -> Iterator[Sequence[int]]:
    """The samples of each batch: neighbours, of which the last are the last; or spread, as a shuffle spreads them."""
    number = min(LOOKED_AT, count // size)
    # The ends first: data sets are often sorted.
    for place in sorted(range(number), key=lambda place: (place not in (0, number - 1), place)):
        if in_order:
            start = (count - size) * place // max(1, number - 1)
            yield list(range(start, start + size))
        else:
            yield [min(count - 1, (index * number + place) * count // (number * size)) for index in range(size)]


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    map_tensors(batch, note)
    return found
