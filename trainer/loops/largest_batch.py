"""Finds a large batch before training, for `AutoAccumulation(try_largest=True)`, which tries it first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from leyden.core.tree import map_tensors
from leyden.data.rng import isolated_rng
from leyden.data.seekable_shuffle import SeekableShuffle
from leyden.data.sharding import RankBatches, is_indexed

MAX_CANDIDATES = 8
"""Candidate batches to build if batches differ in size."""


def largest_batch(loader: Any) -> Any:
    """Builds a few batches from samples spread over the whole data set, and returns the largest.

    The loader's sampler is not used, and global random states are restored. The data set is read in this process, which
    may change its own state, such as an open file or a generator. It stops after two batches of the same shapes.

    Args:
        loader: the training loader.

    Returns:
        The batch on the CPU; None if batches all have one size, or if only the loader itself can build them.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> lines = [torch.ones(length) for length in (1, 2, 9, 3)]
        >>> padded = DataLoader(lines, batch_size=2, collate_fn=lambda parts: torch.nn.utils.rnn.pad_sequence(parts))
        >>> largest_batch(padded).shape
        torch.Size([9, 2])
    """
    largest, largest_size, shapes = None, -1, set()
    with isolated_rng():
        try:
            for number, batch in enumerate(_batches(loader)):
                shapes_of_batch = _shapes(batch)
                shapes.add(tuple(shapes_of_batch))
                size = sum(torch.Size(shape).numel() for shape in shapes_of_batch)
                if size > largest_size:
                    largest, largest_size = batch, size
                if number == 1 and len(shapes) == 1:
                    return None
        except Exception:
            # A sample that cannot be loaded is reported by the training loop, if it reaches that sample.
            return None
    return largest


def _batches(loader: Any) -> Iterator[Any]:
    if not is_indexed(loader):
        return
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    plain = type(batches) is BatchSampler or (isinstance(batches, RankBatches) and not batches.of_batches)
    if not plain or type(sampler) not in (SequentialSampler, RandomSampler, SeekableShuffle):
        # Other samplers may drop or sort samples.
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
    """Yields the sample indices of each candidate: contiguous blocks in order, or else indices spread over the data."""
    number = min(MAX_CANDIDATES, count // size)
    # First and last batch first, because data sets are often sorted by size.
    for place in sorted(range(number), key=lambda place: (place not in (0, number - 1), place)):
        if in_order:
            start = (count - size) * place // max(1, number - 1)
            yield list(range(start, start + size))
        else:
            yield [min(count - 1, (index * number + place) * count // (number * size)) for index in range(size)]


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    map_tensors(batch, note)
    return shapes
