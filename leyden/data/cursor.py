"""LoaderCursor, which reads a training loader like a plain loop, and resumes at the position of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from leyden.data.limits import length_of
from leyden.data.rng import live_state, plain_state, set_rng_state
from leyden.data.sample_rng import with_sample_rng
from leyden.data.sharding import DataRanks, shard_indices
from leyden.data.sources import State, TorchSource, source_of

if TYPE_CHECKING:
    from leyden.data.indices import BatchIndices

END = object()


class LoaderCursor:
    """A loader and its position in the epoch.

    A resume is exact for samples that depend on their index alone. With 0 workers it is also exact for random
    transforms that draw global random numbers, or from a generator that is an attribute of the loader, its sampler or
    its dataset. In workers random transforms are exact with `sample_rng`. A sampler that keeps other state between
    epochs needs a `state_dict`.

    Args:
        loader: a DataLoader, a CombinedLoader, a list of batches or any other iterable.
        allow_replay: True to load and drop the batches before a position if there is no other way to reach it.
        sample_rng: True to seed each sample by (seed, epoch, index); see `SampleRNG`.

    Attributes:
        loader: the given loader, or a copy with seeded samples.
        length: the number of batches per epoch; None if the loader has no length.
        shares: True if the loader is sharded over ranks. Each item is then a pair of a batch (or `NO_SAMPLES`) and this
            rank's `Share`.

    Example:
        >>> cursor = LoaderCursor([1, 2, 3])
        >>> batches = cursor.start(0)
        >>> next(batches)
        1
        >>> list(LoaderCursor([1, 2, 3]).resume(0, cursor.state_dict(1)))
        [2, 3]
    """

    def __init__(self, loader: Iterable[Any], *, allow_replay: bool = False, sample_rng: bool = False) -> None:
        self.loader = with_sample_rng(loader) if sample_rng else loader
        self.length = length_of(self.loader)
        self.epoch: int | None = None
        self._full_length, self._offset = self.length, 0
        self._base_source = self._source = source_of(self.loader, allow_replay)
        self.shares = self._source.shares
        self._tracked: _Tracked | None = None

    def start(self, epoch: int | None = None) -> Iterator[Any]:
        """Starts an epoch. A loader with a length returns its own iterator, without a wrapper.

        The epoch is passed to `set_epoch` of the loader, its samplers and its dataset if they have it; None skips that.
        """
        self.epoch, self._source, self.length, self._offset = epoch, self._base_source, self._full_length, 0
        self._tracked = None
        iterator = self._source.start(epoch)
        return self._track(iterator, 0) if self._needs_tracking else iterator

    def state_dict(self, batches: int) -> State:
        """Returns the position after `batches` batches of this epoch. A lookahead may have drawn one more.

        The caller saves the current global random state, and restores it after `resume`.
        """
        state = {"epoch": self.epoch, "batches": batches, "ahead": None}
        tracked = self._tracked
        batches += self._offset
        if tracked is not None and tracked.drawn == batches + 1:
            # The position and the random state from before the lookahead batch was loaded.
            return {**state, "source": tracked.position, "ahead": plain_state(tracked.rng)}
        return {**state, "source": self._source.position(batches)}

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        """Continues at a position from `state_dict`, in the same order, without loading earlier batches.

        The global random state is undefined afterwards. Restore it from the checkpoint.

        Raises:
            ConfigurationError: if the loader cannot start at the position; names the fix.
        """
        self.epoch = epoch
        self._tracked = None
        source, batches = state["source"], state["batches"]
        if source is None:
            # A checkpoint of another trainer has only the number of batches, and perhaps the loader's own state.
            return self.seek(epoch, batches, own=state["loader"])
        # A single process counts batches differently when it continues a stream that several ranks had shared.
        self._offset = 0 if self.shares else source.get("inner", source)["batches"] - batches
        iterator = self._resumed(epoch, source if self.shares else source.get("inner", source))
        length = self._source.length_after(source)
        self.length = None if length is None else length - self._offset
        if not self._needs_tracking:
            return iterator
        tracked = self._track(iterator, batches + self._offset)
        if state["ahead"] is not None:
            # Loads the lookahead batch with the random state of its first load. The checkpoint's state is from later.
            set_rng_state(state["ahead"])
            tracked.draw_ahead(state["source"], live_state(devices=False))
        return tracked

    def seek(self, epoch: int | None, batches: int, like: State | None = None, own: Any = None) -> Iterator[Any]:
        """Starts an epoch after some batches of its order, without loading these if the loader allows that.

        `like` is a `state_dict` from an epoch whose order to repeat, and `own` the loader's own state at that batch, if
        known.
        """
        if like is not None:
            self._source.rewind(like["source"])
        # Before the position holds the generators' states: a sampler may seed its generator in `set_epoch`.
        self._source.set_epoch(epoch)
        place = self._source.fresh_position(batches) if own is None else self._source.position_from(batches, own)
        if place is not None:
            return self.resume(epoch, {"batches": batches, "ahead": None, "source": place})
        iterator = self.start(epoch)
        for _ in range(batches):
            next(iterator, None)
        return iterator

    def indices(self, start: int, stop: int) -> list[BatchIndices] | None:
        """Returns the dataset indices of the samples in some batches of this epoch, by drawing its order again.

        `stop` is the batch after the last one.

        Returns:
            One entry per batch; None if the order cannot be reproduced (see `indices_of`).
        """
        from leyden.data.indices import indices_of

        return indices_of(self._source, start + self._offset, stop + self._offset)

    def filler(self) -> Any:
        """Returns a batch for a rank that has none, to run a step whose result does not count."""
        return self._source.filler()

    def _resumed(self, epoch: int | None, state: State) -> Iterator[Any]:
        """Resumes by batches. If the saved run had another batch size, resumes the rest of the epoch by samples."""
        base = self._base_source
        if self.shares or not isinstance(base, TorchSource) or not base.goes_by_samples(state):
            self._source = base
            return base.resume(epoch, state)
        from leyden.data.sharded_source import ShardedSource

        self._source = ShardedSource(shard_indices(base.loader, DataRanks()))
        return map(itemgetter(0), self._source.resume(epoch, state))

    def rest_state(self, ended: bool = True) -> State:
        """Returns the state that the loader keeps between epochs: its generators and its own state.

        `ended` is True if the last epoch exhausted the loader, and False if a limit ended it.
        """
        return {"rest": self._source.rest(ended)}

    def load_rest_state(self, state: State) -> None:
        """Restores what `rest_state` returned, before the `start` of the next epoch."""
        self._source.restore_rest(state["rest"])

    @property
    def _needs_tracking(self) -> bool:
        """True if a `_Tracked` iterator is needed, which takes 0.1 ms per batch: for a loader without a length."""
        return self.length is None and self._source.can_seek

    def _track(self, iterator: Iterator[Any], drawn: int) -> _Tracked:
        self._tracked = _Tracked(iterator, self._source.position, drawn)
        return self._tracked


class _Tracked:
    """The iterator of a loader without a length. It saves the position before each draw, because a lookahead follows.

    `position` returns the position after a number of batches, of which `drawn` have been drawn.
    """

    def __init__(self, iterator: Iterator[Any], position: Any, drawn: int) -> None:
        self._iterator = iterator
        self._position = position
        self._ahead: Any = None
        self.drawn = drawn
        self.position: State = {}
        self.rng: State = {}

    def __iter__(self) -> _Tracked:
        return self

    def __next__(self) -> Any:
        if self._ahead is not None:
            (batch,), self._ahead = self._ahead, None
            if batch is END:
                raise StopIteration
            return batch
        # A loader's state may hold live objects that the draw changes.
        self.position, self.rng = deepcopy(self._position(self.drawn)), live_state(devices=False)
        self.drawn += 1
        return next(self._iterator)

    def draw_ahead(self, position: State, rng: State) -> None:
        """Draws the lookahead batch of the saved run, and keeps it for the next call."""
        self.position, self.rng = position, rng
        self.drawn += 1
        self._ahead = (next(self._iterator, END),)


class lookahead(Iterator[tuple[Any, bool]]):
    """Reads one batch ahead, and yields each batch with True if it is the last, else False.

    Example:
        >>> list(lookahead(iter("ab")))
        [('a', False), ('b', True)]
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._next: Any = None
        self._begun = False

    def __next__(self) -> tuple[Any, bool]:
        if not self._begun:
            self._begun = True
            self._next = next(self._iterator, END)
        batch = self._next
        if batch is END:
            raise StopIteration
        self._next = next(self._iterator, END)
        return batch, self._next is END
