"""Loaders without an index to share: each rank takes whole batches of one stream, or reads a loader that is its own already."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from leyden.strategies.batch import batch_size_of
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.data.generators import Generators, parts_of
from leyden.trainer.data.limits import length_of
from leyden.trainer.data.rng import live_state, plain_state, rng_state, set_live_state, set_rng_state
from leyden.trainer.data.sharding import NOTHING, DataRanks, Share, alike, is_indexed, shard_indices
from leyden.trainer.data.sources import Composite, Source, State, source_of


def shard(loader: Any, ranks: DataRanks, foreign: bool = False, asks: bool = True) -> Any:
    """What one rank reads of a loader.

    Args:
        loader: any iterable of batches.
        ranks: who shares it.
        foreign: each rank's loader is its own share already, by the user's doing.
        asks: ranks tell each other of each batch how large theirs is, where only they know. Not needed where a rank may
            stop before the others; loaders that are foreign and may be of different lengths ask all the same, so that each knows
            when another has stopped.

    Raises:
        ConfigurationError: for a DistributedSampler of another number of ranks, or a global batch that cannot be kept.
    """
    own = [sampler for sampler in _samplers(loader) if isinstance(sampler, DistributedSampler)]
    for sampler in own:
        if (sampler.num_replicas, sampler.rank) != (ranks.size, ranks.rank):
            raise ConfigurationError(
                f"the loader's DistributedSampler is of rank {sampler.rank} of {sampler.num_replicas}, and this is rank {ranks.rank} of "
                f"{ranks.size}: leave the sampler out, Leyden shards the loader, or give it num_replicas and rank of this run."
            )
    if ranks.global_batch is not None and (own or foreign or not is_indexed(loader)):
        raise ConfigurationError(
            f"global_batch_size={ranks.global_batch} needs a DataLoader with a batch_size that Leyden shards, not a "
            f"{type(loader).__name__} that gives whole batches: leave it out."
        )
    if own:
        # It pads, so that all ranks have as many samples in each batch.
        return loader
    if foreign:
        stream = RankStream(loader, ranks, True, True)
        stream.tell_of_lengths()
        # Ranks that are known to have as many batches need not ask for each.
        return stream if asks or len(set(stream.lengths)) > 1 or None in stream.lengths else loader
    return shard_indices(loader, ranks) if is_indexed(loader) else RankStream(loader, ranks, False, asks)


def _samplers(loader: Any) -> list[Any]:
    loaders = getattr(loader, "flattened", [loader])
    return [part for one in loaders for part in parts_of(one)]


class RankStream(Composite):
    """One rank's batches of a stream: of each `ranks.size` consecutive ones that with its number.

    Args:
        loader: any iterable of batches; all ranks read the same, unless it is foreign.
        ranks: who shares it.
        foreign: the loader gives this rank's batches alone.
        asks: see `shard`.
    """

    def __init__(self, loader: Any, ranks: DataRanks, foreign: bool, asks: bool) -> None:
        self.loader = loader
        self.ranks, self.foreign, self.asks = ranks, foreign, asks
        length = length_of(loader)
        # The ranks' own loaders may be of different lengths: the longest ends the epoch.
        self.lengths = ranks.gather(length) if foreign else [length]

    def tell_of_lengths(self) -> None:
        """Warns where some ranks have so much less to do than others that no fair split can be meant."""
        known = [length for length in self.lengths if length is not None]
        if self.ranks.rank == 0 and known and max(known) - min(known) > 1:
            warnings.warn(
                f"the ranks' own loaders have {', '.join(map(str, self.lengths))} batches: those that end first wait for the others, "
                "and take part with nothing. Give them as many.",
                stacklevel=2,
            )

    @property
    def span(self) -> int:
        """Batches of the stream in a global batch."""
        return 1 if self.foreign else self.ranks.size

    def __iter__(self) -> Iterator[Any]:
        return self.source(False).start(None)

    def __len__(self) -> int:
        if None in self.lengths:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return -(-max(length for length in self.lengths if length is not None) // self.span)

    def source(self, allow_replay: bool) -> Source:
        return StreamSource(self, allow_replay)

    def mapped(self, function: Callable[[Any], Any]) -> RankStream:
        return RankStream(function(self.loader), self.ranks, self.foreign, self.asks)


class StreamSource(Source):
    """Reads global batches of a stream whole, so that its place is the same on every rank, and keeps this rank's part.

    All ranks must read the same, so a shared stream draws its random numbers from rank 0's as they are at the start of the epoch,
    and from a copy of its own from then on: what a rank draws for itself cannot bring the streams apart.
    """

    shares = True
    loader: RankStream

    def __init__(self, loader: RankStream, allow_replay: bool) -> None:
        super().__init__(loader, allow_replay)
        self.inner = source_of(loader.loader, allow_replay)
        self._owned = Generators(loader.loader)
        self._origin: tuple[int, int] = (0, 0)
        self._stream: State | None = None
        self._filler: Any = None

    @property
    def finds_places(self) -> bool:
        return self.inner.finds_places

    def start(self, epoch: int | None) -> Iterator[Any]:
        self._origin = (0, 0)
        if self.loader.foreign:
            return self._groups(self.inner.start(epoch))
        own = rng_state(devices=False)
        agreed = self.loader.ranks.agree({"rng": own, "owned": self._owned.states()})
        set_rng_state(agreed["rng"])
        self._owned.restore(agreed["owned"])
        iterator = self.inner.start(epoch)
        self._stream = live_state(devices=False)
        after = plain_state(self._stream)
        moved = [name for name in own if name in after and alike(own[name], agreed["rng"].get(name))]
        set_rng_state({**own, **{name: after[name] for name in moved}})
        return self._groups(iterator)

    def _groups(self, iterator: Iterator[Any]) -> Iterator[tuple[Any, Share]]:
        loader, ranks = self.loader, self.loader.ranks
        ended = False
        while True:
            # Workers that have been shut down cannot be asked again.
            group = [] if ended else self._read(iterator)
            ended = len(group) < loader.span
            place = 0 if loader.foreign else ranks.rank
            if group:
                # A rank that reads what only it has must have kept something, if it is the first to end.
                self._filler = group[0] if loader.foreign or len(group) <= place else None
            if ranks.even and group and not loader.foreign:
                group = list(itertools.islice(itertools.cycle(group), loader.span))
            told = [_size_of(batch) for batch in group]
            sizes = [1 if size is None else size for size in told]
            held = [group[place]] if place < len(group) else [NOTHING]
            here = sizes[place] if place < len(sizes) else 0
            total, going, idle, untold = sum(sizes), len(group), loader.span - len(group), told.count(None)
            even = len(set(sizes)) == 1
            if loader.asks:
                total, going, idle, untold, squares = ranks.total(
                    [here, going, held[0] is NOTHING, untold, here * here]
                )
                # The mean of squares is the square of the mean only where all are equal.
                even = ranks.size * squares == total * total
            group = []
            if not going:
                return
            yield held.pop(), Share(here, total, idle > 0, even and not idle, not untold)

    def _read(self, iterator: Iterator[Any]) -> list[Any]:
        if self.loader.foreign:
            return list(itertools.islice(iterator, 1))
        if self._stream is None:
            self._stream = self.loader.ranks.agree(live_state(devices=False))
        own = live_state(devices=False)
        set_live_state(self._stream)
        group = list(itertools.islice(iterator, self.loader.span))
        self._stream = live_state(devices=False)
        set_live_state(own)
        return group

    def position(self, batches: int) -> State:
        begun, drawn = self._origin
        drawn += (batches - begun) * self.loader.span
        length = length_of(self.loader.loader)
        # The last global batch may take less of the stream than the others.
        drawn = drawn if length is None else min(drawn, length)
        stream = None if self._stream is None else plain_state(self._stream)
        world = self.loader.ranks.size if self.loader.foreign else None
        return {"batches": batches, "drawn": drawn, "inner": self.inner.position(drawn), "stream": stream, "of": world}

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        inner = state.get("inner", state)
        if self.loader.foreign and state.get("of") != self.loader.ranks.size:
            raise ConfigurationError(
                f"the checkpoint was saved with another number of ranks, and only the user's own sharding knows where each of these "
                f"{self.loader.ranks.size} goes on: resume on as many ranks, or let Leyden shard the loader "
                "(use_distributed_sampler=True)."
            )
        self._origin = (int(state["batches"]), _drawn(state))
        own = live_state(devices=False)
        iterator = self.inner.resume(epoch, inner)
        set_live_state(own)
        self._stream = None
        if state.get("stream") is not None:
            set_rng_state(state["stream"])
            self._stream = live_state(devices=False)
            set_live_state(own)
        return self._groups(iterator)

    def length_after(self, state: State) -> int | None:
        if None in self.loader.lengths or self.loader.foreign:
            return length_of(self.loader)
        left = (self.loader.lengths[0] or 0) - _drawn(state)
        return int(state["batches"]) + -(-max(0, left) // self.loader.span)

    def rest(self, ended: bool = True) -> State:
        return self.inner.rest(ended)

    def restore_rest(self, state: State) -> None:
        self.inner.restore_rest(state)

    def filler(self) -> Any:
        return self._filler


def _drawn(state: State) -> int:
    """Batches of the stream before a place; of one process, all that it did."""
    return int(state["drawn"] if "inner" in state else state["batches"])


def _size_of(batch: Any) -> int | None:
    """Samples in a batch; None for one that does not tell, of which each weighs the same."""
    try:
        return batch_size_of(batch)
    except ConfigurationError:
        return None
