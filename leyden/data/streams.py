"""Shards loaders that cannot be indexed: ranks take turns in a common stream of batches, or read their own loaders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.core.tree import batch_size_of
from leyden.data.generators import Generators, parts_of
from leyden.data.huggingface import check_split
from leyden.data.limits import length_of
from leyden.data.rng import live_state, plain_state, rng_state, set_live_state, set_rng_state
from leyden.data.sharding import (
    NO_SAMPLES,
    DataRanks,
    Share,
    draw_separately,
    is_indexed,
    restore_own_state,
    shard_indices,
)
from leyden.data.sources import Composite, Source, State, source_of


def shard(loader: Any, ranks: DataRanks, presharded: bool = False, exchanges_sizes: bool = True) -> Any:
    """Returns a loader that yields one rank's shard.

    Args:
        loader: any iterable of batches.
        ranks: the ranks that share the loader.
        presharded: True if the user has sharded the data, so each rank's loader already is its shard.
        exchanges_sizes: True if ranks exchange the sizes of their batches when these cannot be known otherwise. Not
            needed if a rank may stop before the others. Presharded loaders that may differ in length always exchange
            sizes, so every rank knows when another one has stopped.

    Raises:
        ConfigurationError: for a DistributedSampler of another number of ranks, a stream of `datasets` or Ray Data that
            is split already, or a global batch size that is impossible.
    """
    parts = _parts(loader)
    check_split(parts, ranks.rank, ranks.size, presharded)
    if not presharded and any(type(part).__module__.startswith("ray.data.") for part in parts):
        raise ConfigurationError(
            "Ray Data deals its rows to the workers, and Leyden would split each worker's share again. Set "
            "use_distributed_sampler=False."
        )
    own = [sampler for sampler in parts if isinstance(sampler, DistributedSampler)]
    for sampler in own:
        if (sampler.num_replicas, sampler.rank) != (ranks.size, ranks.rank):
            raise ConfigurationError(
                f"the loader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, but this is "
                f"rank {ranks.rank} of {ranks.size}. Leave the sampler out, because Leyden shards the loader, or pass "
                "it this run's num_replicas and rank."
            )
    if ranks.global_batch is not None and (own or presharded or not is_indexed(loader)):
        raise ConfigurationError(
            f"global_batch_size={ranks.global_batch} needs a DataLoader with a batch_size that Leyden shards, not a "
            f"{type(loader).__name__} that yields whole batches: leave it out."
        )
    if own:
        # A DistributedSampler pads, so all ranks have the same number of samples in each batch.
        return loader
    if presharded:
        stream = RankStream(loader, ranks, True, True)
        stream.warn_of_lengths()
        # Ranks that are known to have the same number of batches need not exchange sizes.
        return stream if exchanges_sizes or len(set(stream.lengths)) > 1 or None in stream.lengths else loader
    return shard_indices(loader, ranks) if is_indexed(loader) else RankStream(loader, ranks, False, exchanges_sizes)


def _parts(loader: Any) -> list[Any]:
    loaders = getattr(loader, "flattened", [loader])
    return [part for one in loaders for part in parts_of(one)]


class RankStream(Composite):
    """One rank's batches of a stream: of each `ranks.size` consecutive batches, the one with the rank's number.

    Args:
        loader: any iterable of batches; all ranks read the same one unless it is presharded.
        ranks: the ranks that share the loader.
        presharded: True if the loader yields only this rank's batches.
        exchanges_sizes: see `shard`.
    """

    def __init__(self, loader: Any, ranks: DataRanks, presharded: bool, exchanges_sizes: bool) -> None:
        self.loader = loader
        self.ranks, self.presharded, self.exchanges_sizes = ranks, presharded, exchanges_sizes
        length = length_of(loader)
        # The ranks' own loaders may differ in length: the longest ends the epoch.
        self.lengths = ranks.gather(length) if presharded else [length]

    def warn_of_lengths(self) -> None:
        """Warns if the lengths of the ranks' loaders differ by more than one batch, unlike in an even split."""
        known = [length for length in self.lengths if length is not None]
        if self.ranks.rank == 0 and known and max(known) - min(known) > 1:
            warn(
                f"the ranks' own loaders have {', '.join(map(str, self.lengths))} batches. Ranks that run out first "
                "wait for the others and contribute nothing: give all ranks the same number of batches.",
            )

    @property
    def span(self) -> int:
        """The number of batches of the stream per global batch."""
        return 1 if self.presharded else self.ranks.size

    def __len__(self) -> int:
        if None in self.lengths:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return -(-max(length for length in self.lengths if length is not None) // self.span)

    def source(self, allow_replay: bool) -> Source:
        return StreamSource(self, allow_replay)

    def mapped(self, function: Callable[[Any], Any]) -> RankStream:
        return RankStream(function(self.loader), self.ranks, self.presharded, self.exchanges_sizes)


class StreamSource(Source):
    """Reads whole global batches of a stream and keeps this rank's batch, so the position is the same on every rank.

    All ranks must read the same batches. A shared stream therefore starts from rank 0's random state, and then draws
    from a separate copy, so a rank's own draws cannot make the streams diverge.
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
    def can_seek(self) -> bool:
        return self.inner.can_seek

    def start(self, epoch: int | None) -> Iterator[Any]:
        self._origin = (0, 0)
        if self.loader.presharded:
            return self._groups(self.inner.start(epoch))
        own = rng_state(devices=False)
        agreed = self.loader.ranks.agree({"rng": own, "owned": self._owned.states()})
        set_rng_state(agreed["rng"])
        self._owned.restore(agreed["owned"])
        iterator = self.inner.start(epoch)
        self._stream = restore_own_state(own, agreed["rng"])
        return self._groups(iterator)

    def _groups(self, iterator: Iterator[Any]) -> Iterator[tuple[Any, Share]]:
        """Yields this rank's batch (or NO_SAMPLES) of each global batch, with its share."""
        loader, ranks = self.loader, self.loader.ranks
        index = 0 if loader.presharded else ranks.rank
        ended = False
        while True:
            # An exhausted iterator must not be read again, because its workers have shut down.
            group = [] if ended else self._read(iterator)
            ended = len(group) < loader.span
            if group:
                # A presharded loader that ends first repeats its own last batch.
                self._filler = group[0] if loader.presharded or len(group) <= index else None
            if ranks.even and group and not loader.presharded:
                group = list(itertools.islice(itertools.cycle(group), loader.span))
            share = self._share(group, index)
            if share is None:
                return
            own = group[index : index + 1] or [NO_SAMPLES]
            # No reference to a batch is kept here while its step runs.
            group = []
            yield own.pop(), share

    def _share(self, group: list[Any], index: int) -> Share | None:
        """Returns this rank's share of a global batch; None if no rank has a batch left.

        `group` has the batches that this rank has read of the global batch, and its own at `index`.
        """
        known = [_size_of(batch) for batch in group]
        sizes = [1 if size is None else size for size in known]
        has_batch = index < len(group)
        here = sizes[index] if has_batch else 0
        total, batches, idle, unsized = sum(sizes), len(group), self.loader.span - len(group), known.count(None)
        even = len(set(sizes)) == 1
        if self.loader.exchanges_sizes:
            ranks = self.loader.ranks
            counts = [here, batches, int(not has_batch), unsized, here * here]
            total, batches, idle, unsized, squares = ranks.total(counts)
            # The mean of the squares equals the square of the mean only if all sizes are equal.
            even = ranks.size * squares == total * total
        return Share(here, total, idle > 0, even and not idle, not unsized) if batches else None

    def _read(self, iterator: Iterator[Any]) -> list[Any]:
        if self.loader.presharded:
            return list(itertools.islice(iterator, 1))
        if self._stream is None:
            self._stream = self.loader.ranks.agree(live_state(devices=False))
        group, self._stream = draw_separately(iterator, self.loader.span, self._stream)
        return group

    def position(self, batches: int) -> State:
        begun, drawn = self._origin
        drawn += (batches - begun) * self.loader.span
        length = length_of(self.loader.loader)
        # The last global batch may be smaller than the others.
        drawn = drawn if length is None else min(drawn, length)
        stream = None if self._stream is None else plain_state(self._stream)
        world = self.loader.ranks.size if self.loader.presharded else None
        return {"batches": batches, "drawn": drawn, "inner": self.inner.position(drawn), "stream": stream, "of": world}

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        inner = state.get("inner", state)
        if self.loader.presharded and state.get("of") != self.loader.ranks.size:
            raise ConfigurationError(
                f"the checkpoint was saved with another number of ranks than {self.loader.ranks.size}, and the loaders "
                "of use_distributed_sampler=False cannot be redistributed: resume on the same number of ranks, or let "
                "Leyden shard the loader (use_distributed_sampler=True)."
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
        if None in self.loader.lengths or self.loader.presharded:
            return length_of(self.loader)
        remaining = (self.loader.lengths[0] or 0) - _drawn(state)
        return int(state["batches"]) + -(-max(0, remaining) // self.loader.span)

    def rest(self, ended: bool = True) -> State:
        return self.inner.rest(ended)

    def restore_rest(self, state: State) -> None:
        self.inner.restore_rest(state)

    def filler(self) -> Any:
        return self._filler


def _drawn(state: State) -> int:
    """Returns the number of batches of the stream before a position, which may also be from a single process."""
    return int(state["drawn"] if "inner" in state else state["batches"])


def _size_of(batch: Any) -> int | None:
    """Returns the number of samples in a batch; None if unknown, and all batches then have the same weight."""
    try:
        return batch_size_of(batch)
    except ConfigurationError:
        return None
