"""Loads samples such that one that raises is named by its index, or left out of its batch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, Subset, get_worker_info

from leyden.core.errors import ConfigurationError, add_note, is_out_of_memory, kind_of
from leyden.data.sample_rng import SampleRNG


class Samples(Dataset[Any]):
    """A dataset that adds a note to errors, which names the sample that failed to load. It loads batches like torch.

    Args:
        dataset: the user's dataset.
        keeps_bad: True to return a `BadSample` in place of a sample that raises. An out-of-memory error is raised
            regardless, because it is not the sample's fault.

    Example:
        >>> Samples([1, 2], keeps_bad=True)[2].reason
        'IndexError: list index out of range'
    """

    def __init__(self, dataset: Any, keeps_bad: bool = False) -> None:
        self.dataset = dataset
        self._keeps_bad = keeps_bad
        base = _without_subsets(dataset)
        self._loads_together = type(base).__name__ if getattr(base, "__getitems__", None) else None
        """The class whose `__getitems__` loads batches; None if samples are loaded one by one."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            bad = self._bad([index], error)
            if bad is None:
                raise
            return bad

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        if self._loads_together is not None:
            return self._load_together(self._loads_together, self.dataset.__getitems__, indices)
        dataset, samples = self.dataset, []
        index: Any = None
        try:
            for index in indices:
                samples.append(dataset[index])
        except Exception as error:
            bad = self._bad([index], error)
            if bad is None:
                raise
            samples.append(bad)
            samples += [self[other] for other in indices[len(samples) :]]
        return samples

    def _load_together(self, name: str, load: Callable[[list[Any]], list[Any]], indices: list[Any]) -> list[Any]:
        """Loads a batch with `__getitems__` of the class `name`, and falls back to single samples if that fails."""
        try:
            samples = load(indices)
        except Exception as error:
            if self._bad(indices, error) is None:
                raise
        else:
            return self._checked(name, samples, len(indices))
        samples = []
        for index in indices:
            try:
                found = load([index])
            except Exception as error:
                bad = self._bad([index], error)
                if bad is None:
                    raise
                found = [bad]
            samples += self._checked(name, found, 1)
        return samples

    def _checked(self, name: str, samples: list[Any], count: int) -> list[Any]:
        """Returns the samples if they are a list of the right length, which leaving out bad samples requires."""
        if self._keeps_bad and not (isinstance(samples, list) and len(samples) == count):
            found = f"a list of {len(samples)}" if isinstance(samples, list) else kind_of(samples)
            raise ConfigurationError(
                f"{name}.__getitems__ returned {found} for {count} {'index' if count == 1 else 'indices'}, but "
                "on_bad_sample='skip' needs a list with one sample for each. Return such a list, or use "
                "on_bad_sample='raise'."
            )
        return samples

    def _bad(self, indices: list[Any], error: Exception) -> BadSample | None:
        """Returns the placeholder for a sample that raised; or None, after adding a note to the error, to re-raise it.

        Raises:
            RuntimeError: in place of a StopIteration, which would end the epoch.
        """
        what = _named(self.dataset, indices)
        if self._keeps_bad and not is_out_of_memory(error):
            return BadSample(what, error)
        worker = get_worker_info()
        place = "" if worker is None else f", in worker {worker.id} of the loader"
        what = what if len(indices) == 1 else f"one of the {what}"
        if isinstance(error, StopIteration):
            raise RuntimeError(
                f"{what}{place} raised StopIteration, which would end the epoch: pass a default to next(), or catch "
                "the error in __getitem__."
            ) from error
        add_note(error, f"leyden: the error came from {what}{place}.")
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _without_subsets(dataset: Any) -> Any:
    """Returns the dataset under any nested Subsets, whose `__getitems__` they call if it has one."""
    while getattr(type(dataset), "__getitems__", None) is Subset.__getitems__:
        dataset = dataset.dataset
    return dataset


def _named(dataset: Any, indices: Sequence[Any]) -> str:
    """Names samples by their indices in the loader's dataset and, if that is a Subset, in the underlying one.

    Example:
        >>> from torch.utils.data import Subset
        >>> _named(Subset(Subset("abcdef", [1, 3, 5]), [2, 0]), [0])
        'sample 0 of Subset (sample 5 of str)'
    """
    names: list[str] = []
    while True:
        if isinstance(dataset, SampleRNG):
            dataset = dataset.dataset
        shown = ", ".join(map(str, indices))
        names.append(f"{'sample' if len(indices) == 1 else 'samples'} {shown} of {type(dataset).__name__}")
        if getattr(type(dataset), "__getitem__", None) is not Subset.__getitem__:
            break
        try:
            indices = [dataset.indices[index] for index in indices]
        except Exception:
            # The Subset's own indices caused the error.
            break
        dataset = dataset.dataset
    return names[0] if len(names) == 1 else f"{names[0]} ({names[-1]})"


class BadSample:
    """Placeholder in a batch for a sample that raised. It holds only text, so a worker process can send it.

    `what` names the sample, with its index.
    """

    def __init__(self, what: str, error: Exception) -> None:
        self.what = what
        self.reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.traceback = "".join(traceback.format_exception(error))


class Sifted:
    """A batch without its bad samples.

    Args:
        batch: the collated good samples; None if there are none.
        size: the number of good samples.
        bad: the samples that were left out.
    """

    def __init__(self, batch: Any, size: int, bad: list[BadSample]) -> None:
        self.batch, self.size, self.bad = batch, size, bad

    def pin_memory(self) -> Sifted:
        """Called by a loader with `pin_memory=True`."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Sifted(pin_memory(self.batch), self.size, self.bad)  # type: ignore[no-untyped-call]


class Sift:
    """A `collate_fn` that leaves out bad samples and returns every batch as a `Sifted`."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Sifted:
        good = [sample for sample in samples if type(sample) is not BadSample]
        bad = [sample for sample in samples if type(sample) is BadSample]
        return Sifted(self._collate(good) if good else None, len(good), bad)


def names_samples(loader: Any) -> bool:
    """Returns True if samples of the loader can be named: for a DataLoader that reads its dataset by index, like torch.

    False if its `dataset` is a property, which cannot be replaced by a `Samples`.
    """
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and "dataset" in vars(loader)
        and not isinstance(loader.dataset, (IterableDataset, MapDataPipe))
    )


def named(loader: DataLoader[Any]) -> Samples:
    """Wraps the loader's dataset so that bad samples are named, or left out if the loader has a `Sift`."""
    return Samples(loader.dataset, keeps_bad=isinstance(loader.collate_fn, Sift))
