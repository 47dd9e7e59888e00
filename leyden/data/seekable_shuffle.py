"""SeekableShuffle, a sampler whose order is computed from (seed, epoch, position) and is never in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import Sampler

CHUNK = 65_536
"""Positions computed together when the sampler is iterated. Shorter orders are computed at once, and kept: 512 KB."""
ROUNDS, ROUNDS_OF_SHORT = 8, 24
"""Rounds of the network. Short orders have few bits to mix; the paper by Mitchell et al. uses 24 rounds."""
_BITS = (1 << 64) - 1
_ODD = -0x6B2FB644ECCEEE15
"""The odd constant 0x94D049BB133111EB of SplitMix64, as a signed integer."""


class SeekableShuffle(Sampler[int]):
    """Shuffles like `RandomSampler`, in an order that is a function of (seed, epoch, position).

    Memory does not grow with the data set, and any position is reached at once: in the order of 10⁹ samples,
    `RandomSampler` takes 8 GB (46 GB in a plain loop), and draws all of it before the first batch. The price is about
    0.3 ms per batch on a rank of several, against 0.02 ms (`benchmarks/samplers.py`).

    The order is a Feistel network over the numbers below a product a·b that is barely larger than the data set, and
    numbers that are too large are encrypted again (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains",
    CT-RSA 2002); R. Mitchell et al., "Bandwidth-Optimal Random Shuffling for GPUs", ACM TOPC 2022, test such shuffles.
    It draws no random numbers: `trainer.fit` and prepared loaders call `set_epoch`, a plain loop must do so itself.

    Args:
        data_source: the data set, or its number of samples.
        seed: chooses the order together with the epoch. All ranks need the same one.

    Example:
        >>> sampler = SeekableShuffle(10**9, seed=1)
        >>> sampler.set_epoch(3)
        >>> sampler[999_999_999] == sampler[999_999_990:].tolist()[-1]
        True
        >>> sorted(SeekableShuffle("abcd"))
        [0, 1, 2, 3]
    """

    def __init__(self, data_source: Sized | int, seed: int = 0) -> None:
        count = data_source if isinstance(data_source, int) else len(data_source)
        if isinstance(data_source, bool) or not 0 <= count < 2**62:
            raise ValueError(f"SeekableShuffle({data_source!r}): use a data set, or a number of samples.")
        self.count, self.seed, self.epoch = count, seed, 0
        self._order = Permutation(count, seed, 0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._order = Permutation(self.count, self.seed, epoch)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = self.order
        for start in range(0, self.count, CHUNK):
            yield from order[start : start + CHUNK].tolist()

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> OrderPart: ...
    def __getitem__(self, position: int | slice) -> int | OrderPart:
        return self.order[position]

    @property
    def order(self) -> OrderPart:
        """The order of this epoch; it stays as it is after `set_epoch`."""
        return OrderPart(self._order, range(self.count))


class OrderPart(Sequence[int]):
    """A part of an order. Its items are computed when they are read."""

    def __init__(self, permutation: Permutation, positions: range) -> None:
        self._permutation = permutation
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> OrderPart: ...
    def __getitem__(self, place: int | slice) -> int | OrderPart:
        found = self._positions[place]
        if isinstance(found, range):
            return OrderPart(self._permutation, found)
        return int(self._permutation(torch.tensor([found])))

    def tolist(self) -> list[int]:
        places = self._positions
        numbers: list[int] = self._permutation(torch.arange(places.start, places.stop, places.step)).tolist()
        return numbers


class Permutation:
    """A pseudorandom permutation of the numbers below `count`: a Feistel network on pairs (x // b, x % b)."""

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        self.count = count
        self._a = math.isqrt(max(count - 1, 0)) + 1
        self._b = -(-count // self._a) or 1
        key = _mixed(_mixed(_mixed(seed) ^ epoch) ^ count)
        rounds = ROUNDS if count > CHUNK else ROUNDS_OF_SHORT
        keys = [_mixed(key + number) for number in range(1, 2 * rounds + 1)]
        # A factor and a summand for each round.
        self._keys = [(_signed(one | 1), _signed(other)) for one, other in zip(keys[::2], keys[1::2], strict=True)]

    def __call__(self, positions: Tensor) -> Tensor:
        if self.count <= CHUNK:
            return self._short[positions]
        return self._walked(positions)

    @cached_property
    def _short(self) -> Tensor:
        return self._walked(torch.arange(self.count))

    def __getstate__(self) -> dict[str, Any]:
        """Workers compute a short order again, rather than receive it."""
        return {name: value for name, value in vars(self).items() if name != "_short"}

    def _walked(self, numbers: Tensor) -> Tensor:
        """Encrypts until each number is below `count`, which keeps the mapping one to one ("cycle walking")."""
        found = self._encrypted(numbers)
        while len(outside := (found >= self.count).nonzero().flatten()):
            found[outside] = self._encrypted(found[outside])
        return found

    def _encrypted(self, numbers: Tensor) -> Tensor:
        left = torch.div(numbers, self._b, rounding_mode="floor")
        right = numbers - left * self._b
        for number, (factor, summand) in enumerate(self._keys):
            # Products wrap around at 64 bits. The last shift leaves 43 bits, without a sign.
            mixed = (left if number % 2 else right) * factor
            mixed += summand
            mixed ^= mixed >> 32
            mixed *= _ODD
            mixed >>= 20
            mixed &= (1 << 43) - 1
            if number % 2:
                right = mixed.add_(right).remainder_(self._b)
            else:
                left = mixed.add_(left).remainder_(self._a)
        return left * self._b + right


def _mixed(number: int) -> int:
    """SplitMix64's output function (G. Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _BITS
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _BITS
    return number ^ number >> 31


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
