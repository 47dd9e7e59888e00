"""Data that many tests read: batches whose values are their numbers, random samples, datasets, samplers, streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, TensorDataset


def numbered(count: int, size: int = 1, start: int = 0) -> list[Tensor]:
    """Batches of shape (size, 2) whose values are their numbers."""
    return [torch.full((size, 2), float(number)) for number in range(start, start + count)]


def pairs(count: int, inputs: int = 4, outputs: int = 1, seed: int = 0) -> TensorDataset:
    """Samples (x, y) for a regression, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, inputs, generator=generator), torch.randn(count, outputs, generator=generator)
    )


def labeled(count: int, inputs: int = 6, classes: int = 3, seed: int = 1) -> TensorDataset:
    """Samples (x, class), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, inputs, generator=generator), torch.randint(0, classes, (count,), generator=generator)
    )


class Indices(Dataset[Tensor]):
    """Each sample is its index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Broken(Dataset[Any]):
    """Rows of random numbers; those with the given indices raise.

    Args:
        bad: the indices.
        size: number of rows.
        error: what they raise, with "cannot read 5".
        width: of a row.
        dtype: of a row.
    """

    def __init__(
        self,
        bad: set[int],
        size: int = 26,
        error: Callable[[str], Exception] = OSError,
        width: int = 3,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rows = torch.randn(size, width, generator=torch.Generator().manual_seed(1), dtype=dtype)
        self.bad, self.error = bad, error

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if index in self.bad:
            raise self.error(f"cannot read {index}")
        return self.rows[index]


class BrokenTogether(Broken):
    """The same, a batch in one go."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    """Samples without a length, and without a state."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Unsized:
    """A loader of a user's own: batches without a length, and without a sampler that could be sharded."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class LazyOrder(Sampler[int]):
    """A user's sampler: it draws an order from torch's global generator when it is first asked for an index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size).tolist()


class EpochOrder(LazyOrder):
    """A user's sampler whose order follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
