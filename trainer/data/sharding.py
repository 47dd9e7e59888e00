"""Sharding: one global order of samples that all ranks draw alike, and the share of each rank in every global batch."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from leyden.strategies.base import Strategy
from leyden.trainer.data.generators import Generators
from leyden.trainer.data.rebuild import with_index_sampler
from leyden.trainer.data.rng import live_state, plain_state, rng_state, set_live_state, set_rng_state
from leyden.trainer.data.seek import can_slice, tail_of

State = dict[str, Any]
IN_ORDER = (SequentialSampler, list, tuple, range)
"""Samplers that draw no random number."""


class Nothing:
    """In the place of a batch where this rank has no sample of a global batch."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()


@dataclass(frozen=True, slots=True)
class Share:
    """How many samples of a global batch are here, and how many there are on all ranks."""

    here: int
    total: int

    def weight(self, ranks: int) -> float:
        """What this rank's mean loss is multiplied by, so that the average over ranks is the mean over all samples.

        Example:
            >>> Share(2, 3).weight(2), Share(1, 3).weight(2)
            (1.3333333333333333, 0.6666666666666666)
        """
        return self.here * ranks / self.total if self.total else 1.0


def block(count: int, rank: int, ranks: int) -> slice:
    """The contiguous block of one rank; what does not divide goes to the first ranks.

    Example:
        >>> [list(range(7))[block(7, rank, 3)] for rank in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]
    """
    each, extra = divmod(count, ranks)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))


class Order:
    """The order of an epoch: what the loader's own sampler gives, drawn on every rank with rank 0's random numbers.

    Before the first draw rank 0 tells where its generators stand. A rank whose own stand there too goes on from where
    the draw has left them, as one process would; one that stands elsewhere is left where it was. A sampler of the user's
    may draw during the whole epoch: it does so from a stream of its own from then on, so that nothing which a rank draws
    for itself (dropout over a smaller last batch) can bring the orders apart.

    Args:
        sampler: gives samples, or batches of them.
        agree: gives every rank what rank 0 hands in.
    """

    def __init__(self, sampler: Iterable[Any], agree: Callable[[State], State]) -> None:
        self.sampler = sampler
        self.state: State | None = None
        """Rank 0's random numbers from before the first draw; None until then."""
        self._agree = agree
        self._generators = Generators(_Holder(sampler))
        self._fixed = can_slice(sampler)
        self._iterator: Iterator[Any] | None = None
        self._stream: State = {}
        self._skip = 0

    def begin(self, state: State | None = None, skip: int = 0) -> None:
        """Begins anew at the next draw.

        Args:
            state: what `self.state` was in a run that this one goes on from; None to agree on one.
            skip: what that run had drawn.
        """
        self.state, self._skip, self._iterator = state, skip, None

    def draw(self, count: int) -> list[Any]:
        """The next `count` of the order; fewer at its end."""
        if self._iterator is None:
            self._start()
        assert self._iterator is not None
        if self._fixed:
            return list(itertools.islice(self._iterator, count))
        own = live_state(devices=False)
        set_live_state(self._stream)
        drawn = list(itertools.islice(self._iterator, count))
        self._stream = live_state(devices=False)
        set_live_state(own)
        return drawn

    def start(self) -> None:
        """Draws up to the place now rather than at the next draw."""
        if self._iterator is None:
            self._start()

    def head(self, count: int) -> list[Any]:
        """The first `count` of this epoch's order once more; random numbers, and the place of this order, are as before."""
        own, generators, keeper = live_state(devices=False), self._generators.states(), stateful_of(self.sampler)
        kept = None if keeper is None else keeper.state_dict()
        again = Order(self.sampler, self._agree)
        again.begin(self.state)
        drawn = again.draw(count)
        self._generators.restore(generators)
        if keeper is not None:
            keeper.load_state_dict(kept)
        set_live_state(own)
        return drawn

    def _start(self) -> None:
        resumes, mine = self.state is not None, self._now()
        # Where nothing is drawn there is nothing to agree upon.
        state = self.state = self.state or (mine if type(self.sampler) in IN_ORDER else self._agree(mine))
        set_rng_state(state["rng"])
        self._generators.restore(state["generators"])
        keeper = stateful_of(self.sampler)
        if keeper is not None and state["sampler"] is not None:
            keeper.load_state_dict(state["sampler"])
        skip = self._skip
        if skip and self._fixed:
            iterator = tail_of(self.sampler, skip)
        else:
            iterator = iter(self.sampler)
            next(itertools.islice(iterator, skip, skip), None)
        # A sampler of torch's draws all that it needs of the global generators for its first index.
        self._iterator = itertools.chain(list(itertools.islice(iterator, 1)), iterator)
        self._stream = live_state(devices=False)
        after = plain_state(self._stream)
        own = mine["rng"]
        goes_on = (
            [] if resumes else [name for name in own if name in after and alike(own[name], state["rng"].get(name))]
        )
        set_rng_state({**own, **{name: after[name] for name in goes_on}})

    def _now(self) -> State:
        keeper = stateful_of(self.sampler)
        return {
            "rng": rng_state(devices=False),
            "generators": self._generators.states(),
            "sampler": None if keeper is None else keeper.state_dict(),
        }


class _Holder:
    """Stands in for a loader, so that the generators of its sampler are found by the same paths everywhere."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler


def stateful_of(sampler: Any) -> Any:
    """The sampler, or the one that it makes batches of, if it knows its place itself."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None)):
            return candidate
    return None


def alike(one: Any, other: Any) -> bool:
    """True for two equal states: nests of dicts, tensors and plain Python."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    return bool(one == other)


class RankBatches:
    """The index sampler of one rank's loader: its block of each global batch.

    Args:
        order: of all ranks; of samples, or of batches where `batch_size` is None.
        rank: this rank among the data ranks.
        ranks: their number.
        batch_size: samples of each rank in a global batch. None where the user's own batch sampler makes the batches:
            `ranks` consecutive ones are the global batch.
        drop_last: leave out a global batch that is not full.

    Attributes:
        shares: of each global batch whose indices were drawn and whose batch was not yet taken.
    """

    def __init__(self, order: Order, rank: int, ranks: int, batch_size: int | None, drop_last: bool = False) -> None:
        self.order = order
        self.sampler = order.sampler
        self.rank, self.ranks = rank, ranks
        self.batch_size, self.drop_last = batch_size, drop_last
        self.shares: deque[Share] = deque()
        self._last: list[Any] = []

    @property
    def span(self) -> int:
        """What a global batch takes of the order."""
        return self.ranks * (self.batch_size or 1)

    def __len__(self) -> int:
        return self.batches_of(len(self.sampler))  # type: ignore[arg-type]

    def batches_of(self, count: int) -> int:
        """Global batches of so much of the order."""
        return count // self.span if self.drop_last else -(-count // self.span)

    def __iter__(self) -> Iterator[list[Any]]:
        self.shares.clear()
        while True:
            drawn = self.order.draw(self.span)
            if not drawn or (self.drop_last and len(drawn) < self.span):
                return
            if self.batch_size is None:
                here = drawn[self.rank] if self.rank < len(drawn) else []
                total = sum(len(batch) for batch in drawn)
            else:
                here, total = drawn[block(len(drawn), self.rank, self.ranks)], len(drawn)
            self.shares.append(Share(len(here), total))
            # Only the last global batch can leave a rank without a sample.
            if not here:
                self._last = self._last or (drawn if self.batch_size else drawn[0])
                return
            self._last = here
            yield here

    def filler(self, loader: DataLoader[Any]) -> Any:
        """The rank's last batch once more (another rank's, where it had none), for a step whose result does not count."""
        dataset: Any = loader.dataset
        together = getattr(dataset, "__getitems__", None)
        samples = together(self._last) if callable(together) else [dataset[index] for index in self._last]
        return loader.collate_fn(samples)


def shard_indices(loader: DataLoader[Any], rank: int, ranks: int, agree: Callable[[State], State]) -> DataLoader[Any]:
    """A copy of a DataLoader over a data set with an index, which loads one rank's share of each global batch.

    Args:
        loader: makes batches, by `batch_size` or a batch sampler.
        rank: this rank among the data ranks.
        ranks: their number.
        agree: gives every rank what rank 0 hands in.
    """
    batches: Any = loader.batch_sampler
    if type(batches) is BatchSampler:
        order = Order(batches.sampler, agree)
        return with_index_sampler(loader, RankBatches(order, rank, ranks, batches.batch_size, batches.drop_last))
    return with_index_sampler(loader, RankBatches(Order(batches, agree), rank, ranks, None))


def shard(loader: Any, strategy: Strategy) -> Any:
    """What one rank reads of a loader.

    Args:
        loader: any iterable of batches.
        strategy: tells rank and number of data ranks, and how they talk.
    """
    rank, ranks, agree = strategy.data_rank, strategy.data_size, strategy.broadcast
    if (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and type(loader).__iter__ is DataLoader.__iter__
    ):
        return shard_indices(loader, rank, ranks, agree)
    return loader
