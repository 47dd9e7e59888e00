"""PreparedLoader: a custom loop's loader for this rank and device, which saves and resumes its position."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from leyden.accelerator.prepared.dispatch import Filled, ListPart
from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState
from leyden.data.cursor import LoaderCursor, lookahead
from leyden.data.positions import check_position
from leyden.data.rng import rng_state, set_rng_state
from leyden.data.sharding import RankBatches
from leyden.trainer.engine.prepared import unchanged

if TYPE_CHECKING:
    from leyden.accelerator.loop.stepping import Stepping

State = dict[str, Any]


class PreparedLoader:
    """The loader that `Accelerator.prepare` returns. Other attributes (`dataset`, `collate_fn`, …) are the original's.

    After `load_state` its next pass continues from the checkpoint's position.

    Args:
        loader: the loader of this rank's part.
        stepping: the loop's engine, notified when a pass starts, when a batch has ended, and when the pass ends.
        move: function that moves a batch to the device; None leaves batches in place.
        given: the loader before it was prepared.

    Attributes:
        iteration: the epoch: number of passes that reached the loader's last batch.
        position: number of batches drawn in the current pass.
        end_of_dataloader: True if the current batch is the last one of its pass.
    """

    _is_accelerate_prepared = True

    def __init__(
        self, loader: Iterable[Any], stepping: Stepping, move: Callable[[Any], Any] | None, given: Any
    ) -> None:
        self.given = given
        self._stepping = stepping
        self._move = move
        self.replace_loader(loader)
        self.iteration = 0
        self.position = 0
        self.end_of_dataloader = False
        self.is_active = False
        self.pending: State | None = None
        """State of a checkpoint, from which the next pass continues."""
        self.samples: list[tuple[int, int]] | None = None
        """Per rank: samples in the current batch, and how many are not duplicates; None if there are no duplicates."""
        self._full_batch_rows: set[int] = set()
        """Row counts of tensors that were gathered in full batches."""
        self._exhausted = True

    def __getattr__(self, name: str) -> Any:
        return getattr(_inner(self, "given", name), name)

    def __copy__(self) -> PreparedLoader:
        return self._rebuilt(copy.copy(self.given), self.loader)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedLoader:
        # The run's engine and strategy are shared with the copy.
        for shared in (self._stepping, self._stepping.strategy):
            memo[id(shared)] = shared
        return self._rebuilt(copy.deepcopy(self.given, memo), copy.deepcopy(self.loader, memo))

    def _rebuilt(self, given: Any, loader: Iterable[Any]) -> PreparedLoader:
        made = PreparedLoader(loader, self._stepping, self._move, given)
        made.set_epoch(self.iteration)
        return made

    def __reduce__(self) -> Any:
        """Pickles the original loader, since ranks and devices belong to this process."""
        return unchanged, (self.given,)

    def __repr__(self) -> str:
        return f"PreparedLoader({self.given!r})"

    def __len__(self) -> int:
        if self.cursor.length is None:
            raise TypeError(f"{type(self.given).__name__} has no length")
        return self.cursor.length

    @property
    def left(self) -> int | None:
        """Remaining batches of this pass, including the current one; None if the length is unknown."""
        return None if self.cursor.length is None else self.cursor.length - self.position + 1

    @property
    def is_regular(self) -> bool:
        """True if every rank is known to have a full batch of the same size now."""
        batches: Any = getattr(self.loader, "batch_sampler", None)
        if not isinstance(batches, RankBatches) or batches.batch_size is None:
            return False
        return self.position < batches.batches_of(len(batches.sampler))  # type: ignore[arg-type]

    def rows_of_samples(self, rows: int) -> int:
        """Returns how many of a tensor's rows belong to samples of the current batch, on one process.

        Scripts repeat a loss to the full batch size, which is too many rows for a shorter last batch. With several rows
        per sample, a shorter last batch may also happen to have that many rows. In that case the full batches had
        several rows per sample, too, and all rows are kept.
        """
        batches: Any = getattr(self.given, "batch_sampler", None)
        if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
            return rows
        size, last_size = batches.batch_size, len(batches.sampler) % batches.batch_size
        if batches.drop_last or not last_size or self.position < len(batches):
            self._full_batch_rows.add(rows)
            return rows
        has_several_rows = size % last_size == 0 and size // last_size * size in self._full_batch_rows
        return rows if rows != size or has_several_rows else last_size

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, which is passed on to the sampler's and dataset's `set_epoch`."""
        self.iteration = epoch

    def replace_loader(self, loader: Iterable[Any]) -> None:
        """Replaces the underlying loader, from the next pass on."""
        self.loader = loader
        # A script that resumes in the middle of a pass asks for it explicitly, so replaying batches is acceptable.
        self.cursor = LoaderCursor(loader, allow_replay=True)
        self._is_marked = self._stepping.strategy.ranks.world_size > 1
        self._counts: Any = getattr(getattr(loader, "batch_sampler", None), "counts", getattr(loader, "counts", None))

    def __iter__(self) -> Iterator[Any]:
        return self.read()

    def read(self, skip: int | None = None) -> Iterator[Any]:
        """Returns an iterator over a pass, from batch `skip` on or from a checkpoint's position."""
        self._stepping.synchronise_rng()
        # Eagerly, since a plain DataLoader draws random numbers when its iterator is created.
        iterator = self._begin(skip)
        return self._batches(iterator)

    def _begin(self, skip: int | None) -> Iterator[Any]:
        """Starts a pass from batch `skip` on, or from the position of a loaded checkpoint."""
        saved, self.pending = self.pending, None
        self.end_of_dataloader = False
        if saved is None or (saved["rest"] is not None and not skip):
            # A pass that the script had left is only continued if the script asks for it.
            return self._start(skip)
        position = saved["position"]
        is_complete = position == self.cursor.length
        if is_complete and skip in (None, 0):
            self._drain(saved)
            return self._start(skip)
        if skip in (None, position, saved.get("asked")):
            self.position = position
            if is_complete:
                # The script repeats the completed pass, and skips all of it.
                self.iteration = saved["iteration"]
            return self._resumed(saved, self.iteration)
        if skip:
            self.position = skip
            return self.cursor.seek(self.iteration, skip, like=saved["place"])
        return self._start(skip)

    def _start(self, skip: int | None) -> Iterator[Any]:
        """Starts a pass from batch `skip` on, without a checkpoint's position."""
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

    def _drain(self, saved: State) -> None:
        for _ in self._resumed(saved, saved["iteration"]):
            pass
        # A script may have set the epoch already, to this pass or to the previous one.
        self.iteration = max(self.iteration, saved["iteration"] + 1)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        # Local names, since a look-up in a class with `__getattr__` costs as much as a call.
        total, move, stepping, draw = self.cursor.length, self._move, self._stepping, self._next
        # Only a loader without a length is drawn one batch ahead.
        batches = lookahead(iterator) if total is None else iterator
        self.is_active, self._exhausted = True, False
        stepping.begin_loader(self)
        try:
            while total is None or self.position < total:
                try:
                    # No local variable may hold the batch, or it would stay in memory while the next one is loaded.
                    yield draw(batches, total) if move is None else move(draw(batches, total))
                    stepping.end_turn()
                except StopIteration:
                    if total is not None:
                        warn(
                            f"the loader reports {total} batches but ended after {self.position}. Give it the right "
                            "length, or none."
                        )
                    break
            else:
                # The last next() of a plain loop, in which a generator finishes and workers shut down.
                next(iterator, None)
            # A loader that reports too long a length ends before that.
            self.end_of_dataloader = self._exhausted = True
        finally:
            if self.end_of_dataloader:
                # Also if the loop breaks in the last batch.
                self.iteration += 1
            self.is_active = False
            stepping.end_loader(self)

    def _next(self, batches: Iterator[Any], total: int | None) -> Any:
        """Draws the next batch, and records its position and whether it is the last one."""
        position = self.position + 1
        if total is None:
            batch, self.end_of_dataloader = next(batches)
        else:
            self.end_of_dataloader = position == total
            batch = next(batches)
        self.position = position
        return self._unmarked(batch) if self._is_marked else batch

    def _unmarked(self, batch: Any) -> Any:
        """Strips the metadata of a loader of several ranks from a batch, and records its duplicates."""
        if self.cursor.shares:
            batch, _ = batch
        if self._counts is not None:
            self.samples = self._counts.popleft()
        elif isinstance(batch, Filled):
            self.samples, batch = self.loader.dataset.counts(batch.last), batch.item  # type: ignore[attr-defined]
        else:
            self.samples = self.loader.counts_at(self.position) if isinstance(self.loader, ListPart) else None
        return batch

    def state_dict(self) -> State:
        """Returns the position, inside a pass or between two.

        After a pass that the script left early, it also holds the position reached, for `skip_first_batches`.
        """
        inside = self.is_active
        if self.pending is not None:
            return self.pending
        is_begun = inside or not (self._exhausted or self.end_of_dataloader)
        return {
            "iteration": self.iteration,
            "position": self.position if is_begun else None,
            "place": self.cursor.state_dict(self.position) if is_begun else None,
            "rest": None if inside else self.cursor.rest_state(self._exhausted),
        }

    def check_state_dict(self, state: Any) -> None:
        """Raises StateError for a state that `state_dict` cannot have returned."""
        saved = SavedState(state)
        saved.integer("iteration", least=0)
        saved.value("rest")
        if saved.value("place") is not None:
            saved.integer("position", least=0)
            check_position(saved.nested("place"))

    def load_state_dict(self, state: State) -> None:
        """Loads a state of `state_dict`."""
        self.iteration = state["iteration"]
        self.pending = None
        if state["place"] is not None:
            self.pending = state
            if state["position"] == self.cursor.length:
                # Saved in the epoch's last batch, so the next pass is the next epoch.
                self.iteration += 1
        if state["rest"] is not None:
            self.cursor.load_rest_state(state["rest"])


class SkippedLoader:
    """A loader, prepared or not, whose passes start at batch `skip` of the epoch.

    Earlier batches are not loaded if the loader's order can be computed without reading them.
    """

    def __init__(self, loader: Any, skip: int) -> None:
        self.loader = loader
        self.skip = skip

    def __getattr__(self, name: str) -> Any:
        return getattr(_inner(self, "loader", name), name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.skip)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, PreparedLoader):
            return self.loader.read(self.skip)
        return LoaderCursor(self.loader, allow_replay=True).seek(None, self.skip)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Returns a loader whose passes start at batch `num_batches`.

    Args:
        dataloader: the loader, prepared or not.
        num_batches: position in the epoch, counted from its start. After `load_state` this is the checkpoint's own
            position, so nothing is skipped twice.

    Example:
        >>> list(skip_first_batches([1, 2, 3], 2))
        [3]
    """
    return SkippedLoader(dataloader, num_batches)


def _inner(outer: Any, part: str, name: str) -> Any:
    """Returns the wrapped object; raises AttributeError while a copy or unpickled wrapper does not have it yet."""
    if part not in vars(outer):
        raise AttributeError(name)
    return vars(outer)[part]
