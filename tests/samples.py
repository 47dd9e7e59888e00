"""Data for many tests: numbered batches, random samples, datasets, samplers and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, TensorDataset


def numbered(count: int, size: int = 1, start: int = 0) -> list[Tensor]:
    """Returns batches of shape (size, 2), filled with the number of the batch."""
    return [torch.full((size, 2), float(number)) for number in range(start, start + count)]


def pairs(count: int, inputs: int = 4, outputs: int = 1, seed: int = 0) -> TensorDataset:
    """Returns random samples (x, y) for a regression, determined by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, inputs, generator=generator), torch.randn(count, outputs, generator=generator)
    )


def labeled(count: int, inputs: int = 6, classes: int = 3, seed: int = 1) -> TensorDataset:
    """Returns random samples (x, class), determined by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, inputs, generator=generator), torch.randint(0, classes, (count,), generator=generator)
    )


class Indices(Dataset[Tensor]):
    """A dataset whose samples are their indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Broken(Dataset[Any]):
    """Rows of random numbers; those with the given indices raise.

    Args:
        bad: the indices of rows that raise.
        size: number of rows.
        error: the error that is raised, with a message such as "cannot read 5".
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
    """A `Broken` dataset that reads a whole batch at once, by `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    """An iterable dataset without a length or state."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Unsized:
    """A user's own loader: batches without a length, and without a sampler that could be sharded."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class LazyOrder(Sampler[int]):
    """A user's sampler that draws its order from torch's global generator when the first index is requested."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size).tolist()


class EpochOrder(LazyOrder):
    """A user's sampler whose order depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
