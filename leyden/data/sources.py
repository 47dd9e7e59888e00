"""Sources: one class per kind of loader, which starts it, saves its position, and resumes it there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.data.generators import Generators, parts_of
from leyden.data.huggingface import begin_anew, why_inexact
from leyden.data.limits import length_of
from leyden.data.rng import rng_state, set_rng_state
from leyden.data.sample_rng import SampleRNG
from leyden.data.seek import DrawsFromGlobalRNG, Tail, TailSampler
from leyden.data.sharding import RankBatches, has_state
from leyden.data.workers import iterator_of, replaced

State = dict[str, Any]


class Composite(ABC):
    """A loader made of other loaders, each with its own position."""

    def __iter__(self) -> Iterator[Any]:
        return self.source(False).start(None)

    @abstractmethod
    def source(self, allow_replay: bool) -> Source:
        """Returns the source that starts and resumes this loader."""

    @abstractmethod
    def mapped(self, function: Callable[[Any], Any]) -> Composite:
        """Returns the same composite with `function` applied to each of its loaders."""


class Source(ABC):
    """Starts a loader, saves its position and resumes it there.

    A sharded source (`shares`) yields each batch with this rank's `Share` of the global batch.

    States are nested dicts of tensors and plain Python. A position holds the random state from before the iterator was
    created and the current one. If other loaders draw random numbers between the creation and the first batch, it also
    holds the state from before the first batch, because samplers only then choose their order.

    Args:
        loader: any iterable of batches.
        allow_replay: True to load and drop the batches before a position if there is no other way to reach it.
    """

    shares = False

    def __init__(self, loader: Any, allow_replay: bool = False) -> None:
        self.loader = loader
        self.allow_replay = allow_replay
        self.generators = Generators(loader)
        self.before: State | None = None
        self.first: State | None = None

    @property
    def can_seek(self) -> bool:
        """True if `resume` can start inside an epoch; False if it refuses all such positions."""
        return True

    def start(self, epoch: int | None) -> Iterator[Any]:
        """Starts an epoch like `iter(loader)`; `epoch` is None for a pass without a number."""
        self._begin(epoch)
        self.before = self._capture()
        return iterator_of(self.loader)

    def position(self, batches: int) -> State:
        """Returns the position after `batches` batches of the epoch."""
        state = {"batches": batches, "before": self.before, "generators": self.generators.states()}
        if self.first is not None and batches:
            state["first"] = self.first
        return state

    def capture_first(self) -> None:
        """Saves the random state before the first batch, if other loaders have drawn since `start`."""
        self.first = Source._capture(self)

    def drop_first(self) -> None:
        """Drops the state that `capture_first` saved, before another pass begins."""
        self.first = None

    def fresh_position(self, batches: int) -> State | None:
        """Returns the position after `batches` batches of a new epoch; None if it can only be reached by reading."""
        return None

    def position_from(self, batches: int, state: Any) -> State | None:
        """Returns the position at which the loader's own state is `state`. Stateless loaders use `fresh_position`."""
        return self.fresh_position(batches)

    @abstractmethod
    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        """Returns an iterator at a saved position. The caller then restores the global random state."""

    def rest(self, ended: bool = True) -> State:
        """Returns the state that outlives an epoch. `ended` is True if the epoch exhausted the loader."""
        return {"generators": self.generators.states()}

    def restore_rest(self, state: State) -> None:
        """Restores what `rest` returned; the next call is `start`."""
        self.generators.restore(state["generators"])

    def length_after(self, state: State) -> int | None:
        """Returns the length of an epoch resumed at a position, including the batches before it; None if unknown."""
        return length_of(self.loader)

    def filler(self) -> Any:
        """Returns a batch for a rank that has none, to run a step whose result does not count. Keeps the RNG state."""
        return None

    def _begin(self, epoch: int | None) -> None:
        """Prepares the loader for an epoch from its start."""
        begin_anew(self.loader)
        why = None if epoch is None or self.allow_replay else why_inexact(self.loader)
        if why is not None:
            warn(f"this run cannot be resumed in mid-epoch: {why}.")
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int | None) -> None:
        """Calls `set_epoch` once on every part of the loader that has it."""
        if epoch is None:
            return
        # `parts_of` yields no part twice.
        for part in parts_of(self.loader):
            method = getattr(part, "set_epoch", None)
            if callable(method):
                method(epoch)

    def _capture(self) -> State:
        return {"rng": rng_state(devices=False), "generators": self.generators.states()}

    def rewind(self, place: State) -> None:
        """Restores the random state from before a position's epoch, if the position holds it."""
        if place["before"] is not None:
            self._rewind(place["before"])

    def _rewind(self, before: State) -> None:
        """Restores the random state from before the iterator was created."""
        set_rng_state(before["rng"])
        self.generators.restore(before["generators"])

    def _go_to_first(self) -> None:
        """Restores the random state from before the first batch, if other loaders had drawn before it."""
        if self.first is not None:
            Source._rewind(self, self.first)

    def _replay(self, batches: int) -> Iterator[Any]:
        begin_anew(self.loader)
        iterator = iterator_of(self.loader)
        if batches:
            self._go_to_first()
        for _ in range(batches):
            next(iterator, None)
        return iterator


class SequenceSource(Source):
    """The source of a list of batches, or of a loader that is read by index like one."""

    def fresh_position(self, batches: int) -> State | None:
        return {"batches": batches, "before": None, "generators": {}}

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        self.set_epoch(epoch)
        self.before = state["before"]
        self.generators.restore(state["generators"])
        return self._batches_from(state["batches"])

    def _batches_from(self, index: int) -> Iterator[Any]:
        while True:
            try:
                batch = self.loader[index]
            except IndexError:
                return
            index += 1
            yield batch
            del batch


class StatefulSource(Source):
    """The source of a loader with `state_dict` and `load_state_dict`, which tracks its own position."""

    @property
    def can_seek(self) -> bool:
        return self.allow_replay or why_inexact(self.loader) is None

    def position(self, batches: int) -> State:
        return {**super().position(batches), "loader": self.loader.state_dict()}

    def position_from(self, batches: int, state: Any) -> State | None:
        return {"batches": batches, "before": self._capture(), "generators": {}, "loader": state}

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        self.set_epoch(epoch)
        self.before = state["before"]
        self._rewind(state["before"])
        why = why_inexact(self.loader) if state["batches"] else None
        if why is not None:
            if not self.allow_replay:
                raise ConfigurationError(
                    f"the loader cannot continue at batch {state['batches']}: {why}. Or set allow_replay=True to load "
                    "and drop the batches before."
                )
            iterator = self._replay(state["batches"])
        else:
            self.loader.load_state_dict(state["loader"])
            iterator = iterator_of(self.loader)
        self.generators.restore(state["generators"])
        return iterator

    def rest(self, ended: bool = True) -> State:
        return {**super().rest(), "loader": self.loader.state_dict(), "ended": ended}

    def restore_rest(self, state: State) -> None:
        self.loader.load_state_dict(state["loader"])
        if not state["ended"] or isinstance(self.loader, DataLoader):
            # Repeats the uninterrupted run, which abandons an iterator in the middle and then requests a new one.
            # StatefulDataLoader needs this at the end of an epoch too: otherwise it would create two iterators for the
            # next epoch, and draw a seed for each.
            iterator_of(self.loader)
        super().restore_rest(state)


class ForeignSource(Source):
    """The source of an iterable without index or state, which can only be read from the beginning."""

    @property
    def can_seek(self) -> bool:
        return self.allow_replay

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        if state["batches"] and not self.allow_replay:
            raise ConfigurationError(
                f"{type(self.loader).__name__} cannot continue at batch {state['batches']}, because it has no "
                "state_dict. Define state_dict and load_state_dict, or set allow_replay=True to load and drop the "
                "batches before."
            )
        self.set_epoch(epoch)
        self.before, self.first = state["before"], state.get("first")
        self._rewind(state["before"])
        iterator = self._replay(state["batches"])
        self.generators.restore(state["generators"])
        return iterator


class TorchSource(Source):
    """The source of a torch DataLoader.

    A resume advances the sampler before the iterator is created, so skipped samples are not loaded.
    """

    loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any], allow_replay: bool = False) -> None:
        super().__init__(loader, allow_replay)
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        self._iterator: Any = None
        self._origin = (0, 0)
        self.had_workers = False
        """True if persistent workers were started in an earlier epoch, including those of the resumed run."""

    @property
    def can_seek(self) -> bool:
        return self.allow_replay or not self.is_iterable or self._has_stateful_dataset()

    @property
    def origin(self) -> tuple[int, int]:
        """Where this process began to read the epoch: the number of earlier batches, and of earlier items."""
        return self._origin

    @property
    def index_sampler(self) -> Any:
        return getattr(self.loader, self._sampler_attribute)

    def start(self, epoch: int | None) -> Iterator[Any]:
        self._begin(epoch)
        self._origin = (0, 0)
        self.before = self._capture()
        if self.before["again"] and self.loader._iterator is None:
            return self._build(0, self.before)
        self.had_workers = self.loader.persistent_workers
        return self._kept(iterator_of(self.loader))

    def position(self, batches: int) -> State:
        state = super().position(batches)
        if not self.is_iterable:
            begun, drawn = self._origin
            state["drawn"] = drawn + (batches - begun) * self.span
        if self._iterator is not None:
            # After an incomplete last batch, the dataset may already be at the start of its next pass.
            state["ended"] = getattr(self._iterator._dataset_fetcher, "ended", False)
            state["dataset"] = self.loader.dataset.state_dict()  # type: ignore[attr-defined]
        if isinstance(self.loader.dataset, SampleRNG):
            state["sample_seed"] = self.loader.dataset.seed
        return state

    @property
    def span(self) -> int:
        """Number of items of the order per batch: the batch size, or 1 for a custom batch sampler."""
        batches: Any = self.loader.batch_sampler
        return int(batches.batch_size) if type(batches) is BatchSampler else 1

    def goes_by_samples(self, state: State) -> bool:
        """Returns True if a position counts global batches of another size, usually from another number of ranks."""
        if self.is_iterable or self.loader.batch_sampler is None or "drawn" not in state:
            return False
        return "order" in state or bool(state["drawn"] != state["batches"] * self.span)

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        before = state["before"]
        self._restore_seed(state)
        self._origin = (state["batches"], state.get("drawn", state["batches"] * self.span))
        self.set_epoch(epoch)
        self.before, self.first = before, state.get("first")
        self._rewind(before)
        iterator = self._resume_iterable(state) if self.is_iterable else self._resume_indexed(state["batches"], before)
        self.had_workers = self.loader.persistent_workers
        self.generators.restore(state["generators"])
        return iterator

    def fresh_position(self, batches: int) -> State | None:
        if self.is_iterable:
            return None
        # No generators are restored afterwards: they keep the state in which drawing the order leaves them.
        return {"batches": batches, "before": self._capture(), "generators": {}}

    def rest(self, ended: bool = True) -> State:
        state = {**super().rest(), "had_workers": self.had_workers or self.loader._iterator is not None}
        if isinstance(self.loader.dataset, SampleRNG):
            state["sample_seed"] = self.loader.dataset.seed
        sampler = self._stateful_sampler()
        if sampler is not None:
            state["sampler"] = sampler.state_dict()
        if self._has_stateful_dataset():
            # The dataset may count its passes, or be in the middle of one that a limit ended.
            state["dataset"], state["ended"] = self.loader.dataset.state_dict(), ended  # type: ignore[attr-defined]
        return state

    def restore_rest(self, state: State) -> None:
        self._restore_seed(state)
        self.had_workers = state["had_workers"] and self.loader.persistent_workers
        sampler = self._stateful_sampler()
        if sampler is not None and state.get("sampler") is not None:
            sampler.load_state_dict(state["sampler"])
        if "dataset" in state and self._has_stateful_dataset():
            dataset: Any = self.loader.dataset
            dataset.load_state_dict(state["dataset"])
            if not state["ended"]:
                # Repeats the uninterrupted run, which abandons an iterator in the middle (see StatefulSource).
                iter(dataset)
        super().restore_rest(state)

    def _restore_seed(self, state: State) -> None:
        if isinstance(self.loader.dataset, SampleRNG) and "sample_seed" in state:
            self.loader.dataset.seed = state["sample_seed"]

    def _capture(self) -> State:
        again = self.loader.persistent_workers and (self.had_workers or self.loader._iterator is not None)
        sampler = self._stateful_sampler()
        # The sampler's state is saved before the epoch, because workers prefetch indices, which advances it too far.
        return {**super()._capture(), "again": again, "sampler": None if sampler is None else sampler.state_dict()}

    def _rewind(self, before: State) -> None:
        super()._rewind(before)
        sampler = self._stateful_sampler()
        if sampler is not None and before["sampler"] is not None:
            sampler.load_state_dict(before["sampler"])

    def _stateful_sampler(self) -> Any:
        candidates = (
            self.loader.batch_sampler,
            getattr(self.loader.batch_sampler, "sampler", None),
            self.loader.sampler,
        )
        return next(filter(has_state, candidates), None)

    def _resume_indexed(self, batches: int, before: State) -> Iterator[Any]:
        length = length_of(self.loader)
        if length is not None and batches > length:
            raise ConfigurationError(
                f"the checkpoint is at batch {batches} of an epoch, but the loader has only {length}: use the dataset "
                "and batch_size of the saved run."
            )
        # Drops the persistent workers of this process, which are at another position.
        self.loader._iterator = None
        if self._sampler_attribute not in vars(self.loader):
            if batches and not self.allow_replay:
                raise ConfigurationError(
                    f"{self._sampler_attribute} is a property of {type(self.loader).__name__}, so the training loader "
                    f"cannot begin at batch {batches}: pass it to DataLoader.__init__ instead, or set "
                    "allow_replay=True to load and drop the batches before."
                )
            self._rewind(before)
            return self._replay(batches)
        try:
            return self._build(batches, before)
        except DrawsFromGlobalRNG:
            if not self.allow_replay:
                sampler = getattr(self.index_sampler, "sampler", self.index_sampler)
                raise ConfigurationError(
                    f"the sampler of the training loader ({type(sampler).__name__}) draws from the global "
                    "random generators during the epoch, so its position cannot be restored. Give it its own "
                    "torch.Generator, or set allow_replay=True to load and drop the batches before."
                ) from None
        self.loader._iterator = None
        self._rewind(before)
        return self._replay(batches)

    @property
    def _sampler_attribute(self) -> str:
        """The attribute of the loader that its iterator reads indices from."""
        return "sampler" if self.loader.batch_sampler is None else "batch_sampler"

    def _build(self, batches: int, before: State) -> Iterator[Any]:
        """Creates the iterator over the remaining batches, and leaves the loader unchanged."""
        original = self.index_sampler
        rewind = (lambda: self._rewind(before)) if before["again"] else None
        with replaced(self.loader, self._sampler_attribute, TailSampler(original, batches, rewind)):
            iterator: Any = iterator_of(self.loader)
        iterator._index_sampler = original
        if isinstance(iterator._sampler_iter, Tail) and (batches or rewind):
            if batches and not self.loader.num_workers:
                # Not with workers, for which the first indices are drawn when the iterator is created.
                self._go_to_first()
            iterator._sampler_iter = iterator._sampler_iter.advance()
        return iterator  # type: ignore[no-any-return]

    def _kept(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Keeps the iterator if its dataset is stateful, because `position` then reads it. Returns the iterator."""
        if self._has_stateful_dataset():
            self._iterator = iterator
        return iterator

    def _has_stateful_dataset(self) -> bool:
        """Returns True for an iterable dataset with a complete `state_dict` that is read in this process."""
        if not self.is_iterable or self.loader.num_workers or not has_state(self.loader.dataset):
            return False
        return why_inexact(self.loader) is None

    def _resume_iterable(self, state: State) -> Any:
        dataset: Any = self.loader.dataset
        self.loader._iterator = None
        if "dataset" in state and self._has_stateful_dataset():
            dataset.load_state_dict(state["dataset"])
            iterator: Any = self._kept(iterator_of(self.loader))
            if state["ended"]:
                iterator._dataset_fetcher.ended = True
            return iterator
        if state["batches"] and not self.allow_replay:
            why = why_inexact(self.loader)
            if why is None:
                what = "keeps its state in worker processes" if has_state(dataset) else "has no state_dict"
                why = (
                    f"the iterable dataset {type(dataset).__name__} {what}. Use torchdata's StatefulDataLoader, or a "
                    "dataset with state_dict and load_state_dict and num_workers=0"
                )
            raise ConfigurationError(
                f"the loader cannot continue at batch {state['batches']}: {why}. Or set allow_replay=True to load and "
                "drop the batches before."
            )
        return self._replay(state["batches"])


def _iterates_by_index(loader: Any) -> bool:
    """Returns True if iteration reads index 0, 1, …, so it can start at any index."""
    kind: Any = type(loader)
    if not hasattr(kind, "__getitem__"):
        return False
    own = getattr(kind, "__iter__", None)
    return own is None or own in (list.__iter__, tuple.__iter__, range.__iter__, Sequence.__iter__)


def source_of(loader: Iterable[Any], allow_replay: bool = False) -> Source:
    """Returns the source of a loader."""
    if isinstance(loader, Composite):
        return loader.source(allow_replay)
    if isinstance(getattr(loader, "batch_sampler", None), RankBatches):
        from leyden.data.sharded_source import ShardedSource

        return ShardedSource(loader, allow_replay)  # type: ignore[arg-type]
    if has_state(loader):
        return StatefulSource(loader, allow_replay)
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        return TorchSource(loader, allow_replay)
    if _iterates_by_index(loader):
        return SequenceSource(loader, allow_replay)
    return ForeignSource(loader, allow_replay)
