"""Checks and adapts the user's loaders: lengths and limits, warnings, and copies with one part replaced."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.data.seekable_shuffle import SeekableShuffle

NAMES = {"train": "training", "val": "validation", "test": "test", "predict": "prediction"}


def length_of(loader: Any) -> int | None:
    """Returns the number of batches in a loader, or None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def batches_of(limit: float, length: int | None, name: str) -> int | None:
    """Returns the number of batches of a loader under a limit.

    Args:
        limit: a fraction of the loader as a float from 0.0 to 1.0, or a number of batches as an int from 0.
        length: the number of batches in the loader; None if it has no length.
        name: the Trainer's argument, for errors.

    Returns:
        The number of batches; without a length, an upper bound, or None for all batches.

    Raises:
        ConfigurationError: if the limit is a fraction of a loader without a length, or amounts to less than one batch.

    Example:
        >>> batches_of(0.5, 9, "limit_train_batches"), batches_of(5, 3, "limit_train_batches")
        (4, 3)
    """
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if limit in (0.0, 1.0):
        return length if limit else 0
    if length is None:
        raise ConfigurationError(
            f"{name}={limit} is a fraction of a loader that has no length: pass a number of batches as an int, or "
            "define __len__."
        )
    count = int(length * limit)
    if count == 0 and length > 0:
        raise ConfigurationError(
            f"{name}={limit} of {length} batches is less than one batch: pass at least {1 / length:.3g}, or an int."
        )
    return count


def check_not_empty(loader: Any, kind: str) -> None:
    """Raises if a loader has a length of 0.

    Raises:
        ConfigurationError: if so; names the likely reason.
    """
    if length_of(loader) != 0:
        return
    name = NAMES.get(kind, kind)
    reason = "Give it a dataset with samples."
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        samples = length_of(loader.dataset)
        if samples and loader.drop_last:
            reason = (
                f"Its dataset has {samples} samples, fewer than batch_size={loader.batch_size}, and "
                "drop_last=True: use a smaller batch_size or drop_last=False."
            )
    raise ConfigurationError(f"the {name} loader has a length of 0 and yields no batch. {reason}")


def shuffles(loader: Any) -> bool:
    """Returns True for a DataLoader with one of torch's random samplers."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    kinds = (RandomSampler, SubsetRandomSampler, SeekableShuffle)
    return isinstance(sampler, kinds) or isinstance(inner, kinds)


def warn_if_shuffled(loader: Any, kind: str) -> None:
    """Warns if an evaluation loader shuffles."""
    if isinstance(loader, DataLoader) and shuffles(loader):
        warn(
            f"the {NAMES.get(kind, kind)} loader shuffles: evaluate in a fixed order, with shuffle=False, so that "
            "batches and outputs can be compared between passes.",
        )


def without_shuffle(loader: Any) -> Any:
    """Adapts a loader for `overfit_batches`, which needs the same first batches in each epoch.

    A DataLoader that does not read its dataset in order is replaced by a copy that does, with a warning. The copy keeps
    all other settings. Other loaders, and those over iterable datasets, are returned unchanged.
    """
    mapped = getattr(loader, "mapped", None)
    if mapped is not None:
        return mapped(without_shuffle)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches: Any = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if isinstance(sampler, SequentialSampler) and type(batches) in (BatchSampler, type(None)):
        return loader
    in_order: Any = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    if batches is not None:
        size = getattr(batches, "batch_size", None)
        if not isinstance(size, int):
            warn(
                f"overfit_batches needs the same batches in each epoch, and {type(batches).__name__} has no "
                "batch_size: pass a loader whose order does not change.",
            )
            return loader
        in_order = BatchSampler(in_order, size, bool(getattr(batches, "drop_last", False)))
    warn(
        "overfit_batches turned shuffling off for this run, because it needs the same batches in each epoch. Pass a "
        "loader with shuffle=False to avoid this warning.",
    )
    return with_index_sampler(loader, in_order)


def with_index_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Returns a copy of a loader with another batch sampler, or another sampler if the loader does not batch."""
    if loader.batch_sampler is None:
        return copied(loader, sampler=sampler)
    # torch sets `loader.sampler` to the batch sampler's own sampler, unless the user passed a batch sampler.
    return copied(loader, batch_sampler=sampler, sampler=sampler.sampler)


def apart(loader: Any) -> Any:
    """Returns a copy of a DataLoader, which starts its own workers. Other loaders are returned unchanged."""
    mapped = getattr(loader, "mapped", None)
    if mapped is not None:
        return mapped(apart)
    return copied(loader) if isinstance(loader, DataLoader) else loader


def copied(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """Returns a copy of a loader with other attributes, such as `dataset` or `collate_fn`."""
    result = copy(loader)
    # A DataLoader refuses assignment after its construction, and a subclass's constructor may have other arguments.
    vars(result).update(parts, _iterator=None)
    return result
