"""PreparedLoader: a loader of the user's own loop for this rank and device, which can save and resume its position."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.saved_state import SavedState
from leyden.trainer.accelerator.dispatch import Filled, ListPart
from leyden.trainer.data.cursor import LoaderCursor, lookahead
from leyden.trainer.data.positions import check_position
from leyden.trainer.data.rng import rng_state, set_rng_state
from leyden.trainer.data.sharding import RankBatches

if TYPE_CHECKING:
    from leyden.trainer.accelerator.stepping import Stepping

State = dict[str, Any]


class PreparedLoader:
    """A loader as `Accelerator.prepare` returns it. Other attributes are the loader's own: `dataset`, `collate_fn`, ….

    After `load_state` its next pass continues at the checkpoint's place.

    Args:
        loader: what this rank reads.
        stepping: notes when a pass begins, when a batch is done with, and when the pass ends.
        move: brings a batch to the device; None to leave it.
        given: the loader before it was prepared; the same if left out.

    Attributes:
        iteration: passes that were read to their end: the epoch.
        position: batches of the current pass so far.
        end_of_dataloader: the current batch is the last one of its pass.
    """

    def __init__(
        self, loader: Iterable[Any], stepping: Stepping, move: Callable[[Any], Any] | None, given: Any = None
    ) -> None:
        self.given = loader if given is None else given
        self.exchange(loader)
        self.iteration = 0
        self.position = 0
        self.end_of_dataloader = False
        self.is_active = False
        self.pending: State | None = None
        """The place of a checkpoint, from which the next pass starts."""
        self.samples: list[tuple[int, int]] | None = None
        """For each rank: samples in the last batch, and how many of them are no repeats; None if none is."""
        self._rows: set[int] = set()
        self._stepping = stepping
        self._move = move
        self._ended = True

    def __getattr__(self, name: str) -> Any:
        return getattr(_held(self, "given", name), name)

    def __copy__(self) -> PreparedLoader:
        return self._again(copy.copy(self.given), self.loader)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedLoader:
        # The run's engine and strategy are no parts of the loader.
        for shared in (self._stepping, self._stepping.strategy):
            memo[id(shared)] = shared
        return self._again(copy.deepcopy(self.given, memo), copy.deepcopy(self.loader, memo))

    def _again(self, given: Any, loader: Iterable[Any]) -> PreparedLoader:
        made = PreparedLoader(loader, self._stepping, self._move, given)
        made.set_epoch(self.iteration)
        return made

    def __reduce__(self) -> Any:
        """Pickles the loader that was prepared, since ranks and devices belong to this process."""
        return _as_it_is, (self.given,)

    def __repr__(self) -> str:
        return f"PreparedLoader({self.given!r})"

    def __len__(self) -> int:
        if self.cursor.length is None:
            raise TypeError(f"{type(self.given).__name__} has no length")
        return self.cursor.length

    @property
    def left(self) -> int | None:
        """Batches of this pass from the current one on; None if that is unknown."""
        return None if self.cursor.length is None else self.cursor.length - self.position + 1

    @property
    def is_regular(self) -> bool:
        """True if every rank certainly has a full batch now, of the same size."""
        batches: Any = getattr(self.loader, "batch_sampler", None)
        if not isinstance(batches, RankBatches) or batches.batch_size is None:
            return False
        return self.position < batches.batches_of(len(batches.sampler))  # type: ignore[arg-type]

    def rows_of_samples(self, rows: int) -> int:
        """The number of a tensor's rows that stand for samples, on one process.

        A loss that a script repeats for each sample of a full batch has too many rows in a last batch that is shorter.
        Several rows for each sample may come to the same number: these came with the full batches, too.

        Args:
            rows: of a tensor that belongs to the current batch.
        """
        batches: Any = getattr(self.given, "batch_sampler", None)
        if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
            return rows
        size, here = batches.batch_size, len(batches.sampler) % batches.batch_size
        if batches.drop_last or not here or self.position < len(batches):
            self._rows.add(rows)
            return rows
        several = size % here == 0 and size // here * size in self._rows
        return rows if rows != size or several else here

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next pass, which sampler and data set get by their own `set_epoch`."""
        self.iteration = epoch

    def exchange(self, loader: Iterable[Any]) -> None:
        """Replaces the loader that is read, from the next pass on."""
        self.loader = loader
        # A script that resumes at a place means it, whatever that costs its loader.
        self.cursor = LoaderCursor(loader, allow_replay=True)
        self._shares = self.cursor.shares
        self._counts: Any = getattr(getattr(loader, "batch_sampler", None), "counts", getattr(loader, "counts", None))

    def __iter__(self) -> Iterator[Any]:
        return self.read()

    def read(self, skip: int | None = None) -> Iterator[Any]:
        """A pass from batch `skip` on, or from a checkpoint's place."""
        self._stepping.synchronise_rng()
        # Started now, since a plain loader draws its random numbers when its iterator is made.
        iterator = self._begin(skip)
        return self._give(iterator)

    def _begin(self, skip: int | None) -> Iterator[Any]:
        saved, self.pending = self.pending, None
        self.end_of_dataloader = False
        if saved is not None:
            position = saved["position"]
            goes_on = skip in (None, position, saved.get("asked"))
            if position == self.cursor.length and skip in (None, 0):
                self._finish(saved)
            elif goes_on:
                self.position = position
                if position == self.cursor.length:
                    # The script means the pass whose last batch is done, and skips all of it.
                    self.iteration = saved["iteration"]
                return self._resumed(saved, self.iteration)
            elif skip:
                self.position = skip
                return self.cursor.seek(self.iteration, skip, like=saved["place"])
        if skip and self.cursor.length is not None and skip > self.cursor.length:
            raise ConfigurationError(
                f"skip_first_batches(loader, {skip}): the loader has {self.cursor.length} batches."
            )
        self.position = skip or 0
        return self.cursor.seek(self.iteration, skip) if skip else self.cursor.start(self.iteration)

    def _resumed(self, saved: State, iteration: int) -> Iterator[Any]:
        now = rng_state()
        iterator = self.cursor.resume(iteration, saved["place"])
        set_rng_state(now)
        return iterator

    def _finish(self, saved: State) -> None:
        for _ in self._resumed(saved, saved["iteration"]):
            pass
        # A script may have set it, to this pass or to the one before.
        self.iteration = max(self.iteration, saved["iteration"] + 1)

    def _give(self, iterator: Iterator[Any]) -> Iterator[Any]:
        total, move, stepping = self.cursor.length, self._move or _as_it_is, self._stepping
        # Only a loader without a length is drawn one batch ahead.
        batches = lookahead(iterator) if total is None else iterator
        self.is_active, self._ended = True, False
        stepping.begin_loader(self)
        try:
            while total is None or self.position < total:
                try:
                    # No variable holds the batch: it would stay in memory while the next one is loaded.
                    yield move(self._next(batches, total))
                    stepping.end_turn()
                except StopIteration:
                    self._check_end(total)
                    break
            else:
                # The plain loop's last next(), in which a generator finishes and workers are shut down.
                next(iterator, None)
            self.iteration += 1
            self._ended = True
        finally:
            self.is_active = False
            stepping.end_loader(self)

    def _next(self, batches: Iterator[Any], total: int | None) -> Any:
        """Draws the next batch, without what a sharded loader adds to it, and notes whether it is the last one."""
        if total is None:
            batch, self.end_of_dataloader = next(batches)
        else:
            self.end_of_dataloader = self.position + 1 == total
            batch = next(batches)
        self.position += 1
        if self._shares:
            batch, _ = batch
        if self._counts is not None:
            self.samples = self._counts.popleft()
        elif isinstance(batch, Filled):
            self.samples, batch = self.loader.dataset.counts(batch.last), batch.item  # type: ignore[attr-defined]
        else:
            self.samples = self.loader.counts_at(self.position) if isinstance(self.loader, ListPart) else None
        return batch

    def _check_end(self, total: int | None) -> None:
        if total is not None:
            warnings.warn(
                f"the loader says that it has {total} batches and ended after {self.position}: give it the right "
                "length, or none at all.",
                stacklevel=3,
            )

    def state_dict(self) -> State:
        """The place: inside a pass, or between two."""
        inside = self.is_active
        if self.pending is not None:
            return self.pending
        return {
            "iteration": self.iteration,
            "position": self.position if inside else None,
            "place": self.cursor.state_dict(self.position) if inside else None,
            "rest": None if inside else self.cursor.rest_state(self._ended),
        }

    def check_state_dict(self, state: Any) -> None:
        """Raises StateError for what `state_dict` cannot have returned."""
        saved = SavedState(state)
        saved.integer("iteration", least=0)
        saved.value("rest")
        if saved.value("place") is not None:
            saved.integer("position", least=0)
            check_position(saved.nested("place"))

    def load_state_dict(self, state: State) -> None:
        """Loads what `state_dict` returned."""
        self.iteration = state["iteration"]
        self.pending = None
        if state["place"] is not None:
            self.pending = state
            if state["position"] == self.cursor.length:
                # Saved with the epoch's last batch: nothing of it is left, and the next pass is the next epoch.
                self.iteration += 1
        else:
            self.cursor.load_rest_state(state["rest"])


class SkippedLoader:
    """A loader, prepared or not, whose passes begin at a batch, counted from the epoch's start.

    Loads nothing before it where the loader's order can be sought.
    """

    def __init__(self, loader: Any, skip: int) -> None:
        self.loader = loader
        self.skip = skip

    def __getattr__(self, name: str) -> Any:
        return getattr(_held(self, "loader", name), name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.skip)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, PreparedLoader):
            return self.loader.read(self.skip)
        return LoaderCursor(self.loader, allow_replay=True).seek(None, self.skip)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Returns a loader whose passes begin at a batch.

    Args:
        dataloader: prepared or not.
        num_batches: the place in the epoch, counted from its start. After `load_state` that is the checkpoint's own
            place, so nothing is skipped twice.

    Example:
        >>> list(skip_first_batches([1, 2, 3], 2))
        [3]
    """
    return SkippedLoader(dataloader, num_batches)


def _as_it_is(batch: Any) -> Any:
    return batch


def _held(outer: Any, part: str, name: str) -> Any:
    """Returns the part whose attributes an object shows; while it is being copied, it has none yet."""
    if part not in vars(outer):
        raise AttributeError(name)
    return vars(outer)[part]
