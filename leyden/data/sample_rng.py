"""SampleRNG, a dataset with one random seed per sample, so that random transforms in workers resume exactly."""

from __future__ import annotations

import hashlib
import importlib
import operator
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from leyden.core.errors import ConfigurationError, kind_of
from leyden.data.limits import copied
from leyden.data.rng import MAX_SEED


class SampleRNG(Dataset[Any]):
    """A dataset whose samples draw random numbers that depend only on (seed, epoch, index).

    Python, NumPy and torch (CPU) are seeded before each sample is loaded, and restored afterwards. The numbers that a
    sample draws therefore do not depend on the number of workers, their order, or a resume. They differ from those of
    plain torch.

    Args:
        dataset: a dataset with `__getitem__`.
        seed: the seed; None for torch's initial seed.

    Raises:
        ConfigurationError: for a dataset without an index.

    Example:
        >>> class Noise(Dataset):
        ...     def __len__(self): return 2
        ...     def __getitem__(self, index): return torch.rand(()).item()
        >>> noise = SampleRNG(Noise(), seed=1)
        >>> noise[0] == noise[0], noise[0] == noise[1]
        (True, False)
    """

    def __init__(self, dataset: Any, seed: int | None = None) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigurationError(
                f"sample_rng=True seeds each sample by its index, but {type(dataset).__name__} is not indexed: define "
                "__getitem__, or use sample_rng=False."
            )
        self.dataset = dataset
        seed = torch.initial_seed() if seed is None else seed
        # In shared memory, because persistent workers hold a copy of the dataset from before the epoch.
        self._shared = torch.tensor([_signed(seed), 0]).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def seed(self) -> int:
        """The seed of the run, which a resume restores."""
        return int(self._shared[0])

    @seed.setter
    def seed(self, value: int) -> None:
        self._shared[0] = _signed(value)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, on which the numbers that samples draw depend, in running workers too."""
        self._shared[1] = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with seeded(*self._shared.tolist(), index):
            return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        # The dataset's `__getitems__` stays hidden, because it would load a batch without seeding each sample.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def with_sample_rng(loader: Any) -> Any:
    """Returns a copy of a DataLoader that seeds each sample, or of a CombinedLoader of such copies.

    Raises:
        ConfigurationError: for any other loader, or a dataset without an index.
    """
    mapped = getattr(loader, "mapped", None)
    if mapped is not None:
        return mapped(with_sample_rng)
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"sample_rng=True needs a DataLoader, not {kind_of(loader)}: wrap its dataset in SampleRNG yourself, or "
            "use sample_rng=False."
        )
    if isinstance(loader.dataset, SampleRNG):
        return loader
    if "dataset" not in vars(loader):
        raise ConfigurationError(
            f"sample_rng=True replaces the loader's dataset, but that of {kind_of(loader)} is a property: return "
            "SampleRNG(dataset) from it, or use sample_rng=False."
        )
    return copied(loader, dataset=SampleRNG(loader.dataset))


@contextmanager
def seeded(*key: Any) -> Iterator[None]:
    """Seeds Python, NumPy and torch (CPU) from a key within the block, and restores them afterwards."""
    *numbers, index = key
    with suppress(TypeError):
        index = operator.index(index)
    digest = hashlib.blake2b(repr((*numbers, index)).encode(), digest_size=16).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy.random")
    if numpy is None and "numpy" in sys.modules:
        # Recent versions of NumPy import `numpy.random` lazily. The sample could import it, and draw unseeded numbers.
        numpy = importlib.import_module("numpy.random")
    numpy_state = numpy.get_state(legacy=False) if numpy is not None else None
    # Seeds only the default generator, because torch.manual_seed would seed those of every device.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.seed([seed & MAX_SEED, seed >> 32])
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)


def _signed(seed: int) -> int:
    """Converts an unsigned 64-bit seed to the signed integer that a tensor holds."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
