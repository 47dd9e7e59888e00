"""Loads the samples of a data set: one that raises is named by its index, or left out of its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, get_worker_info

from leyden.strategies.errors import add_note


class Samples(Dataset[Any]):
    """A data set that names the sample whose loading fails, in a note to its error. It loads a batch as torch does.

    Args:
        dataset: the user's.
        keeps_bad: return a `BadSample` in the place of one that raises.

    Example:
        >>> Samples([1, 2], keeps_bad=True)[2].reason
        'IndexError: list index out of range'
    """

    def __init__(self, dataset: Any, keeps_bad: bool = False) -> None:
        self.dataset = dataset
        self._keeps_bad = keeps_bad

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            if self._is_raised(f"sample {index}", error):
                raise
            return _bad(index, error)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together:
            return self._together(together, indices)
        dataset, samples = self.dataset, []
        index: Any = None
        try:
            for index in indices:
                samples.append(dataset[index])
        except Exception as error:
            if self._is_raised(f"sample {index}", error):
                raise
            samples.append(_bad(index, error))
            samples += [self[other] for other in indices[len(samples) :]]
        return samples

    def _together(self, together: Callable[[list[Any]], list[Any]], indices: list[Any]) -> list[Any]:
        """Loads a batch by the data set's own `__getitems__`, and sample by sample once that has failed."""
        try:
            return together(indices)
        except Exception as error:
            if self._is_raised(f"one of the samples {', '.join(map(str, indices))}", error):
                raise
        samples: list[Any] = []
        for index in indices:
            try:
                samples += together([index])
            except Exception as error:
                samples.append(_bad(index, error))
        return samples

    def _is_raised(self, what: str, error: Exception) -> bool:
        """True if bad samples are not kept; then the error has a note."""
        if self._keeps_bad:
            return False
        worker = get_worker_info()
        place = "" if worker is None else f", in worker {worker.id} of the loader"
        add_note(error, f"leyden: the error came from {what} of {type(self.dataset).__name__}{place}.")
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class BadSample:
    """Stands in a batch for a sample that raised.

    Args:
        index: of the sample.
        reason: what its loading raised.
    """

    def __init__(self, index: Any, reason: str) -> None:
        self.index, self.reason = index, reason


def _bad(index: Any, error: Exception) -> BadSample:
    return BadSample(index, f"{type(error).__name__}: {error}")


class Sifted:
    """What is left of a batch without its bad samples.

    Args:
        batch: collated; None if nothing is left.
        size: samples in it.
        bad: those that were left out.
    """

    def __init__(self, batch: Any, size: int, bad: list[BadSample]) -> None:
        self.batch, self.size, self.bad = batch, size, bad

    def pin_memory(self) -> Sifted:
        """Called by a loader with `pin_memory=True`."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Sifted(pin_memory(self.batch), self.size, self.bad)  # type: ignore[no-untyped-call]


class Sift:
    """A `collate_fn` that leaves bad samples out, and has every batch be a `Sifted`.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Sifted:
        good = [sample for sample in samples if type(sample) is not BadSample]
        bad = [sample for sample in samples if type(sample) is BadSample]
        return Sifted(self._collate(good) if good else None, len(good), bad)


def names_samples(loader: Any) -> bool:
    """True for a DataLoader that reads a data set by index as torch does, so that the samples can be told apart."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, (IterableDataset, MapDataPipe))
    )


def named(loader: DataLoader[Any]) -> Samples:
    """The loader's data set, with samples that are named, or left out if the loader sifts them."""
    return Samples(loader.dataset, keeps_bad=isinstance(loader.collate_fn, Sift))
