"""Waits, which measures how long training waits for its data, and warns of a loader that is too slow."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from leyden.trainer.data.combined import CombinedLoader
from leyden.trainer.data.sources import Composite

if TYPE_CHECKING:
    from leyden.trainer.run.state import Run

FIRST = 5
"""Batches of an epoch that are not measured: workers start, and fill their queues."""
ENOUGH = 50
"""Batches, of one epoch or several, by which a loader is judged."""
SECONDS = 10.0
"""Seconds of training that they must have taken, so that short runs hear nothing."""
PART = 0.3
"""Part of the time that training may wait."""
LEAST = 1e-3
"""Seconds per batch below which workers do not help: handing a batch over costs them much of that."""


class Waits:
    """The time that a fit waits for training batches. The first rank of each machine warns, once.

    Batches are timed until there are enough to judge the loader by, in each epoch again. The rest come from the
    loader's own iterator, with nothing in between. A batch that a validation follows does not count.

    Args:
        run: of the fit.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_on = not run.arguments.barebones and run.strategy.ranks.local_rank == 0
        self._has_ended = False
        self._begin()

    def _begin(self) -> None:
        self._waited, self._total, self._batches = 0.0, 0.0, 0

    def timed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of an iterator, of which some are timed. None is drawn ahead, and none is kept."""
        if self._run.profiler is not None:
            iterator = self._run.profiler.drawn("train_dataloader_next", iterator)
        return itertools.chain.from_iterable(self._parts(iterator)) if self._is_on else iterator

    def _parts(self, iterator: Iterator[Any]) -> Iterator[Iterator[Any]]:
        self._has_ended = False
        yield self._measured(iterator)
        if not self._has_ended:
            # One that has ended must not be asked again: its workers are shut down.
            yield iterator

    def _measured(self, iterator: Iterator[Any]) -> Iterator[Any]:
        before: float | None = None
        wait, progress, validations = 0.0, self._run.progress, -1
        try:
            for _ in range(FIRST):
                yield next(iterator)
            while self._is_on and (self._batches < ENOUGH or self._total < SECONDS):
                asked = perf_counter()
                if before is not None and progress.validations == validations:
                    self._total += asked - before
                    self._waited += wait
                    self._batches += 1
                # Emptied as it is passed on: a name would keep the batch while the next one is loaded.
                drawn = [next(iterator)]
                before, wait, validations = asked, perf_counter() - asked, progress.validations
                yield drawn.pop()
        except StopIteration:
            self._has_ended = True
            return
        self._judge()

    def _judge(self) -> None:
        """Warns if training has waited for much of the time that was measured."""
        if self._waited >= PART * self._total and self._waited >= LEAST * self._batches:
            self._is_on = False
            warnings.warn(
                f"data took {self._waited / self._total:.0%} of the time of training over {self._batches} batches "
                f"({self._waited / self._batches:.3g} of {self._total / self._batches:.3g} s each): "
                f"{_fix(self._run.loaders.train_loader, self._run.strategy.ranks.local_size)}.",
                stacklevel=2,
            )
        self._begin()


def _fix(loader: Any, ranks: int) -> str:
    """What to do about a slow loader, on a machine whose cores so many ranks share."""
    workers, cores = _workers_of(loader), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if workers is None:
        return "load them ahead, as a DataLoader with num_workers does"
    shared = f" for {ranks} ranks" if ranks > 1 else ""
    if not cores or workers < cores // ranks:
        known = f", with {cores} cores{shared}" if cores else ""
        return f"raise num_workers (now {workers}{known}) in the training loader"
    enough = f"is this rank's part of {cores} cores{shared}" if shared else "is as many as there are cores"
    return f"num_workers={workers} {enough}, so make samples cheaper to load, or store them prepared"


def _workers_of(loader: Any) -> int | None:
    """The workers of a loader, or of the one in it; of several the fewest. None if it has none to raise."""
    if isinstance(loader, CombinedLoader):
        known = [found for found in map(_workers_of, loader.flattened) if found is not None]
        return min(known, default=None)
    if isinstance(loader, Composite):
        return _workers_of(getattr(loader, "loader", None))
    workers = getattr(loader, "num_workers", None)
    return workers if isinstance(workers, int) else None
