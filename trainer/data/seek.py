"""Starts samplers at a position in their epoch, without loading earlier samples and mostly without drawing them."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from leyden.strategies.errors import LeydenError

CHUNK = 65_536
"""Number of indices converted to Python integers together, so a tail of millions need not become one list."""
REPLACEMENT_CHUNK = 32
"""RandomSampler draws blocks of this size with replacement, so its generator is always at a multiple of it."""


class DrawsFromGlobalRNG(LeydenError):
    """Raised if a sampler draws from the global generators in the middle of its epoch."""


class TailSampler:
    """Replaces a loader's sampler while its iterator is created, and yields the rest of the sampler's epoch.

    Args:
        sampler: the loader's own sampler or batch sampler.
        skip: the number of batches to skip, or of samples if the loader does not batch.
        rewind: restores the random state from before the epoch. Only needed if the uninterrupted run would have reused
            its persistent workers. New workers create two iterators of the sampler, with a seed drawn in between, while
            reused workers create one. The first iterator is therefore empty, and `rewind` precedes the second one.
    """

    def __init__(self, sampler: Iterable[Any], skip: int, rewind: Callable[[], None] | None = None) -> None:
        self.sampler = sampler
        self.skip = skip
        self.rewind = rewind
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        if self.rewind is not None:
            if self._is_first:
                self._is_first = False
                return iter(())
            self.rewind()
        return Tail(self.sampler, self.skip)


class Tail:
    """The iterator of a `TailSampler`. It skips on the first call of `next`, when the sampler would first draw."""

    def __init__(self, sampler: Iterable[Any], skip: int) -> None:
        self._sampler = sampler
        self._skip = skip
        self._slices = skip > 0 and can_slice(sampler)
        # A custom sampler may draw as soon as its iterator is created, even if the iterator is never read.
        self._rest: Iterator[Any] = iter(()) if self._slices else iter(sampler)

    def __iter__(self) -> Tail:
        return self

    def __next__(self) -> Any:
        return next(self.advance())

    def advance(self) -> Iterator[Any]:
        """Skips, unless it has already, and returns the iterator over the rest."""
        if self._skip:
            skip, self._skip = self._skip, 0
            if self._slices:
                self._rest = tail_of(self._sampler, skip)
            elif _makes_plain_batches(self._sampler):
                inner: Any = self._sampler
                samples = iter(inner.sampler)
                _draw(samples, skip * inner.batch_size)
                self._rest = iter(BatchSampler(samples, inner.batch_size, inner.drop_last))
            else:
                _draw(self._rest, skip)
        return self._rest


def _makes_plain_batches(sampler: Any) -> bool:
    return getattr(type(sampler), "__iter__", None) is BatchSampler.__iter__


def _draw(iterator: Iterator[Any], count: int) -> None:
    """Draws and drops indices of a sampler that cannot be sliced.

    Raises:
        DrawsFromGlobalRNG: if drawing changes the global generators after the first index.
    """
    next(iterator, None)
    if count == 1:
        return
    before = _global_states()
    next(itertools.islice(iterator, count - 2, None), None)
    after = _global_states()
    if before[1:] != after[1:] or not torch.equal(before[0], after[0]):
        raise DrawsFromGlobalRNG("the sampler draws from the global random generators during the epoch")


def _global_states() -> tuple[Tensor, tuple[Any, ...], Any]:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return torch.get_rng_state(), random.getstate(), None
    name, keys, *rest = numpy.get_state()
    return torch.get_rng_state(), random.getstate(), (name, keys.tobytes(), *rest)


# slices of torch's own samplers ---------------------------------------------------------------------------------------
def can_slice(sampler: Any) -> bool:
    """Returns True if `tail_of` can slice a sampler: torch's own samplers, sequences, and batches of these."""
    if type(sampler) in (list, tuple, range):
        return True
    if _makes_plain_batches(sampler):
        return can_slice(sampler.sampler)
    kind = next((kind for kind in TAILS if getattr(type(sampler), "__iter__", None) is kind.__iter__), None)
    return kind is not None and (
        kind is SequentialSampler or _matches_torch(kind, getattr(sampler, "replacement", False))
    )


def _matches_torch(kind: Any, replacement: bool) -> bool:
    """Compares our slice with torch's sampler on a few indices, in case a later torch has changed the sampler."""

    def small() -> Any:
        generator = torch.Generator().manual_seed(1)
        if kind is RandomSampler:
            return RandomSampler(range(7), replacement=replacement, num_samples=80, generator=generator)
        if kind is SubsetRandomSampler:
            return SubsetRandomSampler(range(80), generator=generator)
        return WeightedRandomSampler([1.0] * 99, 80, replacement=replacement, generator=generator)

    return list(tail_of(small(), 37)) == list(small())[37:]


def tail_of(sampler: Any, skip: int) -> Iterator[Any]:
    """Returns the items of a sampler after the first `skip`, and draws the same random numbers as the sampler.

    Numbers for the skipped items are drawn eagerly, the rest lazily. Requires `can_slice(sampler)`.
    """
    if type(sampler) in (list, tuple, range):
        return itertools.islice(sampler, skip, None)
    if _makes_plain_batches(sampler):
        samples = tail_of(sampler.sampler, skip * sampler.batch_size)
        return iter(BatchSampler(samples, sampler.batch_size, sampler.drop_last))
    for kind, tail in TAILS.items():
        if type(sampler).__iter__ is kind.__iter__:
            return tail(sampler, skip)
    raise TypeError(f"{type(sampler).__name__} cannot be sliced")


def _sequential_tail(sampler: SequentialSampler, skip: int) -> Iterator[int]:
    return iter(range(skip, len(sampler.data_source)))


def _subset_tail(sampler: SubsetRandomSampler, skip: int) -> Iterator[int]:
    order = torch.randperm(len(sampler.indices), generator=sampler.generator)
    return map(sampler.indices.__getitem__, _integers(order, skip))


def _weighted_tail(sampler: WeightedRandomSampler, skip: int) -> Iterator[int]:
    return _integers(
        torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator), skip
    )


def _random_tail(sampler: RandomSampler, skip: int) -> Iterator[int]:
    generator = sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    tail = _replacement_tail if sampler.replacement else _permutation_tail
    return tail(len(sampler.data_source), sampler.num_samples, skip, generator)


def _replacement_tail(size: int, count: int, skip: int, generator: torch.Generator) -> Iterator[int]:
    """Draws blocks of 32 like the sampler. Skipped blocks are drawn in larger ones, from the same stream of numbers."""
    chunks, skipped = count // REPLACEMENT_CHUNK, min(skip // REPLACEMENT_CHUNK, count // REPLACEMENT_CHUNK)
    burn = skipped * REPLACEMENT_CHUNK
    for start in range(0, burn, CHUNK):
        torch.randint(size, (min(CHUNK, burn - start),), dtype=torch.int64, generator=generator)

    def chunk(number: int) -> list[int]:
        length = REPLACEMENT_CHUNK if number < chunks else count % REPLACEMENT_CHUNK
        return torch.randint(size, (length,), dtype=torch.int64, generator=generator).tolist()

    # A partially skipped chunk is drawn eagerly; the following ones are drawn when the sampler reaches them.
    offset = skip - burn
    begun = chunk(skipped)[offset:] if offset else []

    def rest() -> Iterator[int]:
        yield from begun
        for number in range(skipped + bool(offset), chunks + 1):
            yield from chunk(number)

    return rest()


def _permutation_tail(size: int, count: int, skip: int, generator: torch.Generator) -> Iterator[int]:
    """Draws whole permutations and the head of a last one, which the sampler draws even if it uses no index of it."""
    whole = count // size
    number, offset = divmod(skip, size)
    number, offset = (number, offset) if number <= whole else (whole, size)
    scratch = torch.empty(size if number else 0, dtype=torch.int64)
    for _ in range(number):
        torch.randperm(size, generator=generator, out=scratch)
    begun = torch.randperm(size, generator=generator) if offset else None

    def rest() -> Iterator[int]:
        at = number
        if begun is not None:
            yield from _integers(begun, offset, size if at < whole else count % size)
            at += 1
        for current in range(at, whole + 1):
            order = torch.randperm(size, generator=generator)
            yield from _integers(order, 0, size if current < whole else count % size)

    return rest()


def _integers(values: Tensor, start: int, stop: int | None = None) -> Iterator[int]:
    stop = len(values) if stop is None else stop
    for at in range(start, stop, CHUNK):
        yield from values[at : min(at + CHUNK, stop)].tolist()


TAILS: dict[Any, Callable[[Any, int], Iterator[int]]] = {
    RandomSampler: _random_tail,
    SequentialSampler: _sequential_tail,
    SubsetRandomSampler: _subset_tail,
    WeightedRandomSampler: _weighted_tail,
}
