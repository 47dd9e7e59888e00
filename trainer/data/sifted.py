"""Leaves samples that raise out of their batches (`on_bad_sample="skip"`), and counts what is left on all ranks."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from leyden.strategies.errors import ConfigurationError, LeydenError, kind_of
from leyden.trainer.data.limits import with_collate
from leyden.trainer.data.rng import isolated_rng
from leyden.trainer.data.samples import Sift, Sifted, named, names_samples
from leyden.trainer.data.sharded_source import ShardedSource
from leyden.trainer.data.sharding import NO_SAMPLES, DataRanks, RankBatches, Share, is_indexed, shard_indices
from leyden.trainer.data.sources import Composite, Source, State, source_of

HOPELESS = 10
"""Global batches one after the other of which nothing is left, after which the data set is taken to be broken."""
FIRST, MANY = 100, 0.1
"""Samples that a run begins with, and the part of them that may raise before a second warning says so."""
log = logging.getLogger("leyden")


def sifting(loader: Any, ranks: DataRanks) -> SiftingLoader:
    """Returns a loader that leaves out the samples that raise.

    Args:
        loader: a DataLoader over an indexed data set, or this rank's share of one.
        ranks: the ranks that share it.

    Raises:
        ConfigurationError: for any other loader.
    """
    if not is_indexed(loader) or not names_samples(loader):
        raise ConfigurationError(
            "on_bad_sample='skip' needs one DataLoader with batches of a data set with __getitem__, and this is "
            f"{_described(loader)}: catch the error where the sample is made, or leave on_bad_sample at 'raise'."
        )
    if ranks.size == 1 and not isinstance(loader.batch_sampler, RankBatches):
        # Its positions are in samples, as those of every sharded loader.
        loader = shard_indices(loader, DataRanks())
    return SiftingLoader(with_collate(loader, Sift(loader.collate_fn)), ranks)


def _described(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return kind_of(loader)
    how = ""
    if "dataset" not in vars(loader):
        how = " with `dataset` as a property"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        how = " with an __iter__ of its own"
    elif names_samples(loader):
        how = " without batches"
    return f"{kind_of(loader)} over {kind_of(loader.dataset)}{how}"


class SiftingLoader(Composite):
    """A DataLoader whose batches are `Sifted`.

    Args:
        loader: with a `Sift` for its collate_fn.
        ranks: the ranks that share it.
    """

    def __init__(self, loader: DataLoader[Any], ranks: DataRanks) -> None:
        self.loader, self.ranks = loader, ranks

    @property
    def batch_size(self) -> int | None:
        return self.loader.batch_size

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def __iter__(self) -> Iterator[Any]:
        return self.source(False).start(None)

    def __len__(self) -> int:
        return len(self.loader)

    def source(self, allow_replay: bool) -> Source:
        return SiftedSource(self, allow_replay)

    def mapped(self, function: Callable[[Any], Any]) -> SiftingLoader:
        return SiftingLoader(function(self.loader), self.ranks)


class SiftedSource(Source):
    """The source of a `SiftingLoader`. Positions are those of the loader in it: a bad sample keeps its place."""

    shares = True
    loader: SiftingLoader

    def __init__(self, loader: SiftingLoader, allow_replay: bool) -> None:
        super().__init__(loader.loader, allow_replay)
        self.inner = source_of(loader.loader, allow_replay)
        self._ranks = loader.ranks
        self._filler: Any = None
        self._has_warned, self._in_vain = False, 0
        self._seen = self._lost = 0
        """Of the first samples, on all ranks."""

    @property
    def finds_places(self) -> bool:
        return self.inner.finds_places

    def start(self, epoch: int | None) -> Iterator[Any]:
        return CountedBatches(self.inner.start(epoch), self)

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        return CountedBatches(self.inner.resume(epoch, state), self)

    def position(self, batches: int) -> State:
        return self.inner.position(batches)

    def ahead(self, batches: int) -> State | None:
        return self.inner.ahead(batches)

    def rewind(self, place: State) -> None:
        self.inner.rewind(place)

    def rest(self, ended: bool = True) -> State:
        return self.inner.rest(ended)

    def restore_rest(self, state: State) -> None:
        self.inner.restore_rest(state)

    def length_after(self, state: State) -> int | None:
        return self.inner.length_after(state)

    def filler(self) -> Any:
        if self._filler is None and isinstance(self.inner, ShardedSource):
            self._filler = _first_good(self.inner)
        return self._filler

    def counted(self, item: Any) -> tuple[Any, Share]:
        """What is left of this rank's batch (NO_SAMPLES if nothing is), and its share of what is left on all ranks."""
        batch, planned = item if self.inner.shares else (item, None)
        here, lost = 0, 0
        if isinstance(batch, Sifted):
            here, lost = batch.size, len(batch.bad)
            self._report(batch)
            batch = batch.batch if here else NO_SAMPLES
        total, absent, squares, lost = self._ranks.total([here, int(not here), here * here, lost])
        even = not absent and self._ranks.size * squares == total * total
        share = Share(here, total, absent > 0, even, rest=planned.rest if planned is not None else 0, lost=lost)
        self._warn_of_many(share)
        self._check_hope(share)
        if here and self._ranks.size > 1:
            # For a step of other ranks of which this one has nothing.
            self._filler = batch
        return batch, share

    def _report(self, batch: Sifted) -> None:
        for bad in batch.bad:
            log.info("%s is left out, since it raised %s", bad.what, bad.reason)
        if batch.bad and not self._has_warned:
            self._has_warned = True
            first = batch.bad[0]
            warnings.warn(
                f"{first.what} raised {first.reason}, and is left out of its batch (on_bad_sample='skip'). Others are "
                "counted, and logged with their index by logging.getLogger('leyden') at the level INFO.",
                stacklevel=2,
            )
            log.warning("%s raised:\n%s", first.what, first.traceback)

    def _warn_of_many(self, share: Share) -> None:
        """Warns if many of the first samples have raised."""
        if self._seen >= FIRST:
            return
        self._seen += share.total + share.lost
        self._lost += share.lost
        if self._lost <= MANY * max(self._seen, FIRST):
            return
        if self._ranks.rank == 0:
            warnings.warn(
                f"{self._lost} of the first {self._seen} samples raised and were left out (on_bad_sample='skip'): the "
                "model trains on what is left of the data. The log has the traceback of the first one.",
                stacklevel=2,
            )
        self._seen = FIRST

    def _check_hope(self, share: Share) -> None:
        """Raises once nothing but errors comes; all ranks know the same totals."""
        self._in_vain = 0 if share.total else self._in_vain + 1
        if self._in_vain == HOPELESS:
            raise LeydenError(
                f"of the last {HOPELESS} batches every sample raised (the warning above has the first error): "
                "on_bad_sample='skip' leaves out single samples, and here the data set itself does not work."
            )


def _first_good(source: ShardedSource) -> Any:
    """A batch of the first good sample in the order, for a rank that had none yet; None without one near its start."""
    loader, order = source.loader, source.batches.order
    samples = named(loader)
    with isolated_rng([loader]):
        drawn = order.head(HOPELESS * source.span)
        for index in itertools.chain.from_iterable(drawn) if source.batches.of_batches else drawn:
            sifted: Sifted = loader.collate_fn([samples[index]])
            if sifted.size:
                return sifted.batch
    return None


class CountedBatches(Iterator[tuple[Any, Share]]):
    """The batches of a loader, each as `SiftedSource.counted` returns it."""

    def __init__(self, iterator: Iterator[Any], source: SiftedSource) -> None:
        self._iterator, self._source = iterator, source

    def __next__(self) -> tuple[Any, Share]:
        return self._source.counted(next(self._iterator))
