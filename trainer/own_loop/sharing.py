"""How a loader of one's own loop is shared out over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from leyden.strategies.base import Strategy
from leyden.trainer.data.rebuild import with_index_sampler
from leyden.trainer.own_loop.plugins import DataLoaderConfiguration


class SeedableSampler(RandomSampler):
    """A shuffle that follows from seed and epoch alone."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        super().__init__(sampler.data_source, sampler.replacement, None, torch.Generator())
        if sampler._num_samples is not None:
            self._num_samples = sampler._num_samples
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Seeds the next order."""
        assert self.generator is not None
        self.generator.manual_seed((self._seed + epoch) % 2**63)


def share(loader: Any, strategy: Strategy, config: DataLoaderConfiguration) -> Any:
    """What one rank reads of a loader."""
    if config.use_seedable_sampler:
        loader = _seedable(loader, torch.initial_seed() if config.data_seed is None else config.data_seed)
    return loader


def _seedable(loader: Any, seed: int) -> Any:
    batches: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(batches) is not BatchSampler:
        return loader
    if type(batches.sampler) is not RandomSampler:
        return loader
    sampler = SeedableSampler(batches.sampler, seed)
    return with_index_sampler(loader, BatchSampler(sampler, batches.batch_size, batches.drop_last))
