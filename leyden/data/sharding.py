"""Shards a DataLoader by index: all ranks draw one global order, and each loads its share of every global batch."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from leyden.data.generators import Generators
from leyden.data.limits import with_index_sampler
from leyden.data.rng import live_state, plain_state, rng_state, set_live_state, set_rng_state
from leyden.data.seek import Items, as_list, can_slice, cuts, tail_of
from leyden.data.seekable_shuffle import SeekableShuffle
from leyden.strategies.base import Strategy
from leyden.strategies.readers import Readers

State = dict[str, Any]
IN_ORDER = (SequentialSampler, SeekableShuffle, list, tuple, range)
"""Samplers that draw no random numbers."""


class NoSamples:
    """Placeholder for the batch of a rank that has no sample of a global batch."""

    def __repr__(self) -> str:
        return "NO_SAMPLES"


NO_SAMPLES = NoSamples()


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's share of a global batch.

    Attributes:
        here: the number of samples on this rank.
        total: the number of samples on all ranks.
        idle: True if at least one rank has no sample.
        even: True if all ranks have the same number of samples.
        sized: True if batch sizes are known; otherwise every batch counts as one sample.
        rest: the size of the epoch's last global batch if it is known to be smaller than the others; else 0.
        lost: the number of samples left out of the global batch because they raised.
    """

    here: int
    total: int
    idle: bool = False
    even: bool = True
    sized: bool = True
    rest: int = 0
    lost: int = 0

    def weight(self, ranks: int) -> float:
        """Returns the weight of this rank's mean loss, such that the average over ranks is the mean over all samples.

        Example:
            >>> Share(2, 3).weight(2), Share(1, 3).weight(2)
            (1.3333333333333333, 0.6666666666666666)
        """
        return self.here * ranks / self.total if self.total else 1.0


def block(count: int, rank: int, ranks: int) -> slice:
    """Returns the contiguous block of one rank; the first ranks take the remainder.

    Example:
        >>> [list(range(7))[block(7, rank, 3)] for rank in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]
    """
    each, extra = divmod(count, ranks)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))


class Order:
    """The global order of an epoch: the loader's own sampler, drawn on every rank with rank 0's random state.

    Before the first draw, rank 0 broadcasts the state of its generators: `agree` returns rank 0's argument on every
    rank. A rank whose state is equal advances it by the draw, like a single process. A rank with another state keeps
    its own.

    A custom sampler may draw random numbers throughout the epoch. After the start it draws from a separate stream, so a
    rank's own draws (such as dropout over a smaller last batch) cannot make the orders diverge.
    """

    def __init__(self, sampler: Iterable[Any], agree: Callable[[State], State]) -> None:
        self.sampler = sampler
        self.state: State | None = None
        """Rank 0's random state from before the first draw; None until then."""
        self._agree = agree
        # In place of a loader, so that the sampler's generators have the same paths in every kind of loader.
        self._generators = Generators(SimpleNamespace(sampler=sampler))
        self.is_sliced = can_slice(sampler)
        """True if the sampler can start at any position; others are drawn from their beginning."""
        self._cuts = cuts(sampler)
        self._items: Items | None = None
        self._iterator: Iterator[Any] | None = None
        self._created: Iterator[Any] | None = None
        self._stream: State = {}
        self._resumes, self._skip = False, 0

    def restart(self, state: State | None = None, skip: int = 0) -> None:
        """Restarts the order at the next draw, after `skip` items.

        `state` is the value of `self.state` in the run being resumed; None to agree on a new one.
        """
        self.state, self._skip, self._resumes = state, skip, state is not None
        self._items = self._iterator = self._created = None

    @property
    def stream(self) -> State:
        """The random state from which a custom sampler, which cannot be sliced, draws next."""
        return plain_state(self._stream)

    def draw(self, count: int) -> list[Any]:
        """Returns the next `count` items of the order; fewer at its end."""
        return as_list(self.cut(count))

    def cut(self, count: int) -> Any:
        """Returns what `draw` does, as a sequence or tensor of which only the items that are read need be computed."""
        if self._items is None and self._iterator is None:
            self.start()
        if self._items is not None:
            return self._items.cut(count)
        assert self._iterator is not None
        if self.is_sliced:
            return list(itertools.islice(self._iterator, count))
        drawn, self._stream = draw_separately(self._iterator, count, self._stream)
        return drawn

    def head(self, count: int) -> list[Any]:
        """Returns the first `count` items of this epoch again. Random state and the current position do not change."""
        own, generators, stateful = live_state(devices=False), self._generators.states(), stateful_of(self.sampler)
        sampler_state = None if stateful is None else stateful.state_dict()
        again = Order(self.sampler, self._agree)
        again.restart(self.state)
        drawn = again.draw(count)
        self._generators.restore(generators)
        if stateful is not None:
            stateful.load_state_dict(sampler_state)
        set_live_state(own)
        return drawn

    def create_iterator(self) -> None:
        """Creates the sampler's iterator when a plain loader would, because some samplers draw their order then."""
        if self._resumes:
            return
        self.state = self._iterator = None
        mine = self.current_state()
        agreed = self._agree(mine)
        self._apply(agreed)
        self._created = iter(self.sampler)
        if equal_states(self.current_state(), agreed):
            # This sampler only draws for its first index, so `start` handles it.
            set_rng_state(mine["rng"])
        else:
            self.state, self._iterator = agreed, self._created
            self._stream = restore_own_state(mine["rng"], agreed["rng"])

    def start(self) -> None:
        """Starts at the position given to `restart`. The next `draw` would do so otherwise."""
        mine = self.current_state()
        # Samplers that draw nothing need no agreement.
        state = self.state = self.state or (mine if type(self.sampler) in IN_ORDER else self._agree(mine))
        self._apply(state)
        # Draws the first index, for which torch's samplers draw everything they need from the global generators.
        if self._cuts:
            self._items = Items(self.sampler, self._skip)
            self._items.begin()
        else:
            self._iterator = self._begun()
        self._stream = restore_own_state(mine["rng"], {} if self._resumes else state["rng"])
        self._created = None

    def _begun(self) -> Iterator[Any]:
        if self._skip and self.is_sliced:
            iterator = tail_of(self.sampler, self._skip)
        else:
            iterator = self._created or iter(self.sampler)
            next(itertools.islice(iterator, self._skip, self._skip), None)
        return itertools.chain(list(itertools.islice(iterator, 1)), iterator)

    def _apply(self, state: State) -> None:
        set_rng_state(state["rng"])
        self._generators.restore(state["generators"])
        stateful = stateful_of(self.sampler)
        if stateful is not None and state["sampler"] is not None:
            stateful.load_state_dict(state["sampler"])

    def current_state(self) -> State:
        """Returns this rank's current random state, from which a new order would be drawn."""
        stateful = stateful_of(self.sampler)
        return {
            "rng": rng_state(devices=False),
            "generators": self._generators.states(),
            "sampler": None if stateful is None else stateful.state_dict(),
        }


def draw_separately(iterator: Iterator[Any], count: int, stream: State) -> tuple[list[Any], State]:
    """Draws up to `count` items with the `live_state` of a stream, and leaves the rank's own state unchanged.

    Returns:
        The items, and the `live_state` after drawing them.
    """
    own = live_state(devices=False)
    set_live_state(stream)
    drawn = list(itertools.islice(iterator, count))
    after = live_state(devices=False)
    set_live_state(own)
    return drawn, after


def restore_own_state(own: State, agreed: State) -> State:
    """Restores the rank's own generators after a draw with rank 0's state.

    Generators whose state was equal to rank 0's keep the state after the draw, as in a single process.

    Args:
        own: the rank's `rng_state` from before the draw.
        agreed: rank 0's `rng_state` from before the draw.

    Returns:
        The `live_state` after the draw.
    """
    stream = live_state(devices=False)
    after = plain_state(stream)
    moved = [name for name in own if name in after and name in agreed and equal_states(own[name], agreed[name])]
    set_rng_state({**own, **{name: after[name] for name in moved}})
    return stream


def has_state(item: Any) -> bool:
    """Returns True for an object with `state_dict` and `load_state_dict`."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def stateful_of(sampler: Any) -> Any:
    """Returns the sampler, or the one that it batches, if it has a `state_dict`; else None."""
    return next(filter(has_state, (sampler, getattr(sampler, "sampler", None))), None)


def equal_states(one: Any, other: Any) -> bool:
    """Returns True if two states, nested dicts of tensors and plain Python, are equal."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(equal_states(one[k], other[k]) for k in one)
        )
    return bool(one == other)


class RankBatches:
    """The batch sampler of one rank's loader, which yields the rank's block of each global batch.

    Args:
        order: the global order of samples, or of batches from a custom batch sampler.
        rank: this rank among the data ranks.
        ranks: the number of data ranks.
        batch_size: the samples per rank in a global batch. None if the order is one of batches: `ranks` consecutive
            batches then form a global batch.
        drop_last: True to drop a global batch that is not full.
        span: the items of the order per global batch; `batch_size` per rank by default.
        even: True to repeat samples of the last global batch until all ranks have the same number.

    Attributes:
        shares: the shares of global batches whose indices have been drawn, but whose batches have not been read yet.
    """

    def __init__(
        self,
        order: Order,
        rank: int,
        ranks: int,
        batch_size: int | None,
        drop_last: bool = False,
        span: int | None = None,
        even: bool = False,
    ) -> None:
        self.order = order
        self.sampler = order.sampler
        self.rank, self.ranks = rank, ranks
        self.batch_size, self.of_batches = batch_size, batch_size is None
        self.span = span or ranks * (batch_size or 1)
        self.drop_last, self.even = drop_last, even
        self.shares: deque[Share] = deque()
        self._last: list[Any] = []
        self._rest = 0

    def __len__(self) -> int:
        return self.batches_of(len(self.sampler))  # type: ignore[arg-type]

    def batches_of(self, count: int) -> int:
        """Returns the number of global batches in `count` items of the order."""
        return count // self.span if self.drop_last else -(-count // self.span)

    def batches_after(self, drawn: int) -> int:
        """Returns the number of global batches in the rest of the order."""
        return self.batches_of(max(0, len(self.sampler) - drawn))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        if self.of_batches:
            self.order.create_iterator()
        return self._groups()

    def _groups(self) -> Iterator[list[Any]]:
        self.shares.clear()
        self._rest = self._last_batch()
        while True:
            drawn = self.order.cut(self.span)
            if not len(drawn) or (self.drop_last and len(drawn) < self.span):
                return
            here, share = self._split(drawn)
            self.shares.append(share)
            # Only the last global batch can leave a rank without a sample.
            if not here:
                self._last = self._last or (drawn[0] if self.of_batches else as_list(drawn))
                return
            self._last = here
            yield here

    def _split(self, drawn: Any) -> tuple[list[Any], Share]:
        """Returns this rank's part of a global batch, and its share."""
        if self.even and len(drawn) % self.ranks:
            missing = self.ranks - len(drawn) % self.ranks
            drawn = as_list(drawn)
            drawn += list(itertools.islice(itertools.cycle(drawn), missing))
        if self.of_batches:
            here = drawn[self.rank] if self.rank < len(drawn) else []
            sizes = [len(batch) for batch in drawn]
            total, even = sum(sizes), len(sizes) == self.ranks and len(set(sizes)) == 1
        else:
            here, total = as_list(drawn[block(len(drawn), self.rank, self.ranks)]), len(drawn)
            even = total % self.ranks == 0
        return here, Share(len(here), total, len(drawn) < self.ranks, even, rest=self._rest)

    def part(self, drawn: list[Any]) -> list[Any]:
        """Returns this rank's part of a global batch that was drawn before."""
        return self._split(drawn)[0]

    def _last_batch(self) -> int:
        """Returns the samples of the epoch's last global batch if it is known to be smaller than the others; else 0."""
        if self.drop_last or self.even or self.of_batches:
            return 0
        try:
            return len(self.sampler) % self.span  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return 0

    def filler(self, loader: DataLoader[Any]) -> Any:
        """Loads the rank's last batch again (another rank's if it had none), for a step whose result does not count."""
        dataset: Any = loader.dataset
        together = getattr(dataset, "__getitems__", None)
        samples = together(self._last) if callable(together) else [dataset[index] for index in self._last]
        return loader.collate_fn(samples)


@dataclass(frozen=True, slots=True)
class DataRanks:
    """The ranks that share a loader, and how they share it.

    Attributes:
        rank: this rank among the data ranks.
        size: the number of data ranks.
        agree: returns rank 0's argument on every rank.
        total: returns the sums of a few integers over the data ranks.
        gather: returns the objects of all data ranks.
        even: True to pad the last global batch with repeats.
        global_batch: the samples per global batch; None for the loader's batch_size × ranks.
    """

    rank: int = 0
    size: int = 1
    agree: Callable[[State], State] = lambda state: state
    total: Callable[[list[int]], list[int]] = lambda counts: counts
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    even: bool = False
    global_batch: int | None = None

    @classmethod
    def of(cls, strategy: Strategy, even: bool = False, global_batch: int | None = None) -> DataRanks:
        """Returns the data ranks of a strategy."""
        readers, agree = Readers(strategy), strategy.ranks.broadcast

        def total(counts: list[int]) -> list[int]:
            summed = readers.reduce(torch.tensor(counts), on_host=True, reduction="sum")
            return [int(count) for count in summed.tolist()]

        gather = readers.all_gather_object
        return cls(strategy.data_rank, strategy.data_size, agree, total, gather, even, global_batch)


def shard_indices(loader: DataLoader[Any], ranks: DataRanks) -> DataLoader[Any]:
    """Returns a copy of an indexed DataLoader that loads one rank's share of each global batch."""
    batches: Any = loader.batch_sampler
    rank, size, even = ranks.rank, ranks.size, ranks.even
    if type(batches) is not BatchSampler:
        order = Order(batches, ranks.agree)
        return with_index_sampler(loader, RankBatches(order, rank, size, None, even=even))
    order = Order(batches.sampler, ranks.agree)
    index_sampler = RankBatches(order, rank, size, batches.batch_size, batches.drop_last, ranks.global_batch, even)
    return with_index_sampler(loader, index_sampler)


def is_indexed(loader: Any) -> bool:
    """Returns True for a DataLoader that reads its dataset by index, and does not override `__iter__`."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and type(loader).__iter__ is DataLoader.__iter__
    )
