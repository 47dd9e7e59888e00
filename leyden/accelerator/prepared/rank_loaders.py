"""The loader that each rank iterates in a custom training loop: its part of the prepared loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from leyden.accelerator.prepared.dispatch import CollateFilled, Dispatched, ListPart, StreamPart
from leyden.accelerator.settings.plugins import DataLoaderConfiguration
from leyden.core.errors import ConfigurationError, kind_of
from leyden.data.even import EvenBatches, OwnBatches
from leyden.data.limits import copied, with_index_sampler
from leyden.data.sharding import DataRanks, Order, is_indexed
from leyden.data.streams import shard
from leyden.strategies.base import Strategy


class SeedableSampler(RandomSampler):
    """A RandomSampler whose order depends only on seed and epoch."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        super().__init__(sampler.data_source, sampler.replacement, None, torch.Generator())
        if sampler._num_samples is not None:
            self._num_samples = sampler._num_samples
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Seeds the order of the next pass."""
        assert self.generator is not None
        self.generator.manual_seed((self._seed + epoch) % 2**63)


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order depends only on a seed and the epoch, for a user's own loaders.

    Args:
        data_source: the dataset to sample from.
        replacement: as of `RandomSampler`.
        num_samples: as of `RandomSampler`.
        generator: generator that this sampler seeds for each pass; a new one by default.
        data_seed: the seed; torch's initial seed by default.

    Example:
        >>> sampler = SeedableRandomSampler(range(4), data_seed=1)
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.set_epoch(0)
        >>> list(sampler) == first != second
        True
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator or torch.Generator())
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass; each pass increments it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        assert self.generator is not None
        self.generator.manual_seed((self.initial_seed + self.epoch) % 2**63)
        self.epoch += 1
        yield from super().__iter__()


def rank_loader(loader: Any, strategy: Strategy, config: DataLoaderConfiguration) -> Any:
    """Returns the loader that this rank iterates."""
    if config.use_seedable_sampler:
        loader = _seedable(loader, torch.initial_seed() if config.data_seed is None else config.data_seed)
    rank, ranks = strategy.data_rank, strategy.data_size
    # Not `ranks == 1`: the ranks of one tp group must agree on an order, too, or each would shuffle its own.
    if strategy.ranks.world_size == 1:
        return loader
    if config.dispatch_batches:
        return Dispatched(loader, strategy, config.split_batches, config.even_batches)
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return _stream(loader, rank, ranks, config)
    if isinstance(loader, (list, tuple)):
        return ListPart(loader, rank, ranks, config.even_batches)
    if not is_indexed(loader):
        # Even, since a custom loop cannot handle an empty batch.
        return shard(loader, DataRanks.of(strategy, even=True), exchanges_sizes=False)
    batches: Any = loader.batch_sampler
    if isinstance(getattr(batches, "sampler", None), DistributedSampler):
        return loader
    kind = EvenBatches if config.even_batches else OwnBatches
    if type(batches) is not BatchSampler:
        if config.split_batches:
            raise ConfigurationError(
                f"split_batches=True cannot split the batches of {kind_of(batches)}. Give the loader a batch_size, or "
                "leave split_batches out."
            )
        return with_index_sampler(loader, kind(Order(batches, strategy.ranks.broadcast), rank, ranks, None))
    size = _rank_batch_size(batches.batch_size, ranks, config)
    order = Order(batches.sampler, strategy.ranks.broadcast)
    return with_index_sampler(loader, kind(order, rank, ranks, size, batches.drop_last))


def _rank_batch_size(size: int, ranks: int, config: DataLoaderConfiguration) -> int:
    if not config.split_batches:
        return size
    if size % ranks:
        raise ConfigurationError(
            f"split_batches=True: a batch of {size} is not divisible by {ranks} ranks. Choose a multiple of {ranks}."
        )
    return size // ranks


def _stream(loader: DataLoader[Any], rank: int, ranks: int, config: DataLoaderConfiguration) -> DataLoader[Any]:
    """Returns a loader that reads the whole stream on every rank and keeps the rank's own blocks of it."""
    # Without a batch size the dataset yields batches, each for one rank.
    given = loader.batch_size or 1
    size = _rank_batch_size(given, ranks, config)
    part = StreamPart(loader.dataset, rank, ranks, size, config.even_batches, loader.drop_last)
    changed = copied(loader, dataset=part)
    vars(changed)["collate_fn"] = CollateFilled(loader.collate_fn)
    if size != given:
        changed = with_index_sampler(changed, BatchSampler(changed.sampler, size, loader.drop_last))
        vars(changed)["batch_size"] = size
    return changed


def _seedable(loader: Any, seed: int) -> Any:
    batches: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(batches) is not BatchSampler:
        return loader
    if type(batches.sampler) is not RandomSampler:
        return loader
    sampler = SeedableSampler(batches.sampler, seed)
    return with_index_sampler(loader, BatchSampler(sampler, batches.batch_size, batches.drop_last))
