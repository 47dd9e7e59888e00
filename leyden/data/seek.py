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

from leyden.core.errors import LeydenError
from leyden.data.seekable_shuffle import SeekableShuffle

Piece = tuple[Any, int, int]
"""A tensor or sequence of items, and the part of it to read, from start to stop."""
Draw = Callable[[int], Piece | None]
"""Draws the next piece; None at the end. The argument says how many items will be read now."""
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
        kind in (SequentialSampler, SeekableShuffle) or _matches_torch(kind, getattr(sampler, "replacement", False))
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

    return as_list(Items(small(), 37).cut(99)) == list(small())[37:]


class Items(Iterable[Any]):
    """The items of an order from a position on, read one by one, or cut into parts that are not copied.

    Args:
        sampler: a sampler for which `can_slice` is True, and which does not batch.
        skip: the number of items to skip. Numbers for these are drawn at once, the rest when they are reached.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        self._next = _pieces_of(sampler, skip)
        self._piece: Any = ()
        self._at, self._stop = 0, 0

    def begin(self, wanted: int = 1) -> bool:
        """Draws the next piece if this one is used up. Returns False at the end."""
        while self._at >= self._stop:
            # Two permutations would take twice the memory.
            self._piece = ()
            piece = self._next(wanted)
            if piece is None:
                return False
            self._piece, self._at, self._stop = piece
        return True

    def cut(self, count: int) -> Any:
        """Returns the next `count` items as a tensor, range, list or other sequence; fewer at the end."""
        parts = []
        while count and self.begin(count):
            stop = min(self._at + count, self._stop)
            count -= stop - self._at
            # A part of a permutation would keep all of it while the next one is drawn.
            parts.append(as_list(self._piece[self._at : stop]) if count else self._piece[self._at : stop])
            self._at = stop
        return parts[0] if len(parts) == 1 else list(itertools.chain(*map(as_list, parts)))

    def __iter__(self) -> Iterator[Any]:
        # Not beyond a piece: the next one is only drawn when it is reached.
        while self.begin():
            yield from as_list(self.cut(min(CHUNK, self._stop - self._at)))


def as_list(items: Any) -> list[Any]:
    """Returns the items of a sequence or tensor as a list of plain Python objects."""
    return items.tolist() if hasattr(items, "tolist") else list(items)


def tail_of(sampler: Any, skip: int) -> Iterator[Any]:
    """Returns the items of a sampler after the first `skip`, and draws the same random numbers as the sampler.

    Numbers for the skipped items are drawn eagerly, the rest lazily. Requires `can_slice(sampler)`.
    """
    if _makes_plain_batches(sampler):
        samples = tail_of(sampler.sampler, skip * sampler.batch_size)
        return iter(BatchSampler(samples, sampler.batch_size, sampler.drop_last))
    return iter(Items(sampler, skip))


def cuts(sampler: Any) -> bool:
    """Returns True if the items of a sampler can be cut into parts."""
    return can_slice(sampler) and not _makes_plain_batches(sampler)


def _pieces_of(sampler: Any, skip: int) -> Draw:
    if type(sampler) in (list, tuple, range):
        return _each([(sampler, skip, len(sampler))])
    for kind, pieces in TAILS.items():
        if type(sampler).__iter__ is kind.__iter__:
            return pieces(sampler, skip)
    raise TypeError(f"{type(sampler).__name__} cannot be sliced")


def _each(pieces: Iterable[Piece]) -> Draw:
    iterator = iter(pieces)
    return lambda wanted: next(iterator, None)


def _sequential_pieces(sampler: SequentialSampler, skip: int) -> Draw:
    count = len(sampler.data_source)
    return _each([(range(count), skip, count)])


def _shuffled_pieces(sampler: SeekableShuffle, skip: int) -> Draw:
    return _each([(sampler.order, skip, len(sampler))])


class _Chosen:
    """The entries of `indices` in a drawn order."""

    def __init__(self, indices: Any, order: Tensor) -> None:
        self._indices, self._order = indices, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: slice) -> _Chosen:
        return _Chosen(self._indices, self._order[place])

    def __iter__(self) -> Iterator[Any]:
        return map(self._indices.__getitem__, self._order.tolist())


def _subset_pieces(sampler: SubsetRandomSampler, skip: int) -> Draw:
    order = torch.randperm(len(sampler.indices), generator=sampler.generator)
    return _each([(_Chosen(sampler.indices, order), skip, len(order))])


def _weighted_pieces(sampler: WeightedRandomSampler, skip: int) -> Draw:
    count, replacement = sampler.num_samples, sampler.replacement
    drawn = torch.multinomial(sampler.weights, count, replacement, generator=sampler.generator)
    return _each([(drawn, skip, count)])


def _random_pieces(sampler: RandomSampler, skip: int) -> Draw:
    generator = sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    pieces = _replacement_pieces if sampler.replacement else _permutation_pieces
    return pieces(len(sampler.data_source), sampler.num_samples, skip, generator)


def _replacement_pieces(size: int, count: int, skip: int, generator: torch.Generator) -> Draw:
    """Draws whole blocks of 32 like the sampler, several of them at once, from the same stream of numbers."""
    drawn = 0

    def draw(wanted: int) -> Piece | None:
        nonlocal drawn
        blocks = -(-wanted // REPLACEMENT_CHUNK)
        length = min(blocks * REPLACEMENT_CHUNK, count - drawn)
        drawn += length
        piece = torch.randint(size, (length,), dtype=torch.int64, generator=generator)
        return (piece, 0, length) if length else None

    # A partially skipped block is drawn now; the following ones are drawn when the sampler reaches them.
    begun: list[Piece] = []
    while drawn < min(skip, count):
        piece = draw(min(CHUNK, skip - drawn))
        if piece is not None and drawn > skip:
            begun.append((piece[0], piece[2] - (drawn - skip), piece[2]))
    return lambda wanted: begun.pop() if begun else draw(wanted)


def _permutation_pieces(size: int, count: int, skip: int, generator: torch.Generator) -> Draw:
    """Draws whole permutations and the head of a last one, which the sampler draws even if it uses no index of it."""
    whole = count // size
    number, offset = divmod(skip, size)
    number, offset = (number, offset) if number <= whole else (whole, size)
    scratch = torch.empty(size if number else 0, dtype=torch.int64)
    for _ in range(number):
        torch.randperm(size, generator=generator, out=scratch)

    def piece(number: int, start: int = 0) -> Piece:
        return torch.randperm(size, generator=generator), start, size if number < whole else count % size

    begun = [piece(number, offset)] if offset else []
    # Neither `map` nor `pop` keeps a permutation: who reads it drops it before the next one is drawn.
    rest = map(piece, range(number + len(begun), whole + 1))
    return lambda wanted: begun.pop() if begun else next(rest, None)


TAILS: dict[Any, Callable[[Any, int], Draw]] = {
    RandomSampler: _random_pieces,
    SequentialSampler: _sequential_pieces,
    SubsetRandomSampler: _subset_pieces,
    WeightedRandomSampler: _weighted_pieces,
    SeekableShuffle: _shuffled_pieces,
}
