"""Copies of a DataLoader with one part exchanged, all other settings and the class kept."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch.utils.data import DataLoader


def with_dataset(loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
    """The loader over another data set of the same length."""
    return _with(loader, dataset=dataset)


def with_index_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """The loader with another sampler: one of batches where it makes batches, else one of samples."""
    if loader.batch_sampler is None:
        return _with(loader, sampler=sampler)
    # The loader's `sampler` is what its batch sampler reads, unless the user gave a batch sampler of his own.
    return _with(loader, batch_sampler=sampler, sampler=sampler.sampler)


def _with(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    result = copy(loader)
    # A DataLoader refuses assignment after its constructor; subclasses may have other arguments than it has.
    vars(result).update(parts, _iterator=None)
    return result
