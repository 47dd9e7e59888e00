"""Leaves samples that raise out of their batches (`on_bad_sample="skip"`), and counts the remaining ones."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from leyden.core.errors import ConfigurationError, LeydenError, kind_of
from leyden.core.rank_zero import warn
from leyden.data.limits import copied
from leyden.data.rng import isolated_rng
from leyden.data.samples import Sift, Sifted, named, names_samples
from leyden.data.sharded_source import ShardedSource
from leyden.data.sharding import NO_SAMPLES, DataRanks, RankBatches, Share, is_indexed, shard_indices
from leyden.data.sources import Composite, Source, State, source_of

MOST_EMPTY = 10
"""Number of consecutive global batches without a good sample after which the run ends in an error."""
FIRST, MANY = 100, 0.1
"""Number of first samples of a run, and the fraction of them that may raise before a second warning."""
log = logging.getLogger("leyden")


def sifting(loader: Any, ranks: DataRanks) -> SiftingLoader:
    """Returns a loader that leaves out samples that raise, from a DataLoader or this rank's share of one.

    Raises:
        ConfigurationError: for any other loader.
    """
    if not is_indexed(loader) or not names_samples(loader):
        raise ConfigurationError(
            "on_bad_sample='skip' needs a single DataLoader that batches a dataset with __getitem__, not "
            f"{_described(loader)}: catch the error where the sample is loaded, or use on_bad_sample='raise'."
        )
    if ranks.size == 1 and not isinstance(loader.batch_sampler, RankBatches):
        # Positions then count samples, as in every sharded loader.
        loader = shard_indices(loader, DataRanks())
    return SiftingLoader(copied(loader, collate_fn=Sift(loader.collate_fn)), ranks)


def _described(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return kind_of(loader)
    how = ""
    if "dataset" not in vars(loader):
        how = " with `dataset` as a property"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        how = " with its own __iter__"
    elif names_samples(loader):
        how = " without batches"
    return f"{kind_of(loader)} over {kind_of(loader.dataset)}{how}"


class SiftingLoader(Composite):
    """A DataLoader whose batches are `Sifted`: its `collate_fn` is a `Sift`."""

    def __init__(self, loader: DataLoader[Any], ranks: DataRanks) -> None:
        self.loader, self.ranks = loader, ranks

    @property
    def batch_size(self) -> int | None:
        return self.loader.batch_size

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def source(self, allow_replay: bool) -> Source:
        return SiftedSource(self, allow_replay)

    def mapped(self, function: Callable[[Any], Any]) -> SiftingLoader:
        return SiftingLoader(function(self.loader), self.ranks)


class SiftedSource(Source):
    """The source of a `SiftingLoader`. Positions are those of the inner loader, so bad samples count."""

    shares = True
    loader: SiftingLoader

    def __init__(self, loader: SiftingLoader, allow_replay: bool) -> None:
        super().__init__(loader.loader, allow_replay)
        self.inner = source_of(loader.loader, allow_replay)
        self._ranks = loader.ranks
        self._filler: Any = None
        self._has_warned, self._empty_in_a_row = False, 0
        self._seen = self._lost = 0
        """How many of the first samples of all ranks have been seen, and left out."""

    @property
    def can_seek(self) -> bool:
        return self.inner.can_seek

    def start(self, epoch: int | None) -> Iterator[Any]:
        return map(self.counted, self.inner.start(epoch))

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        return map(self.counted, self.inner.resume(epoch, state))

    def position(self, batches: int) -> State:
        return self.inner.position(batches)

    def fresh_position(self, batches: int) -> State | None:
        return self.inner.fresh_position(batches)

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
        """Counts the good samples of all ranks in a global batch, an item of the inner loader.

        Returns:
            The good samples of this rank's batch, or NO_SAMPLES if there are none, and the rank's share.
        """
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
        self._check_progress(share)
        if here and self._ranks.size > 1:
            # Kept for a step in which only other ranks have samples.
            self._filler = batch
        return batch, share

    def _report(self, batch: Sifted) -> None:
        for bad in batch.bad:
            log.info("%s is left out, since it raised %s", bad.what, bad.reason)
        if batch.bad and not self._has_warned:
            self._has_warned = True
            first = batch.bad[0]
            warn(
                f"{first.what} raised {first.reason}, and is left out of its batch (on_bad_sample='skip'). Further "
                "ones are counted, and logged with their index by logging.getLogger('leyden') at level INFO.",
                every_rank=True,
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
            warn(
                f"{self._lost} of the first {self._seen} samples raised and were left out (on_bad_sample='skip'): the "
                "model trains on the remaining data only. The log has the traceback of the first one.",
                every_rank=True,
            )
        self._seen = FIRST

    def _check_progress(self, share: Share) -> None:
        """Raises after too many batches without a good sample. All ranks raise together, because totals are equal."""
        self._empty_in_a_row = 0 if share.total else self._empty_in_a_row + 1
        if self._empty_in_a_row == MOST_EMPTY:
            raise LeydenError(
                f"every sample of the last {MOST_EMPTY} batches raised (the warning above has the first error). "
                "on_bad_sample='skip' is for single bad samples, but here the dataset itself fails: fix it first."
            )


def _first_good(source: ShardedSource) -> Any:
    """Returns a batch of the first good sample in the order, for a rank that has had none yet.

    None if there is no good sample near the start.
    """
    loader, order = source.loader, source.batches.order
    samples = named(loader)
    with isolated_rng([loader]):
        drawn = order.head(MOST_EMPTY * source.span)
        for index in itertools.chain.from_iterable(drawn) if source.batches.of_batches else drawn:
            sifted: Sifted = loader.collate_fn([samples[index]])
            if sifted.size:
                return sifted.batch
    return None
