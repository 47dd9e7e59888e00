"""Waits, which measures how long training waits for its data, and warns of a loader that is too slow."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

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
"""Seconds per batch below which workers do not help: to hand a batch over takes them a good part of that."""


class Waits:
    """The time that a fit waits for training batches. The first rank of each machine warns, once.

    Batches are timed until there are enough to judge the loader by, in each epoch again. The rest come from the
    loader's own iterator, with nothing in between.

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
        return itertools.chain.from_iterable(self._parts(iterator)) if self._is_on else iterator

    def _parts(self, iterator: Iterator[Any]) -> Iterator[Iterator[Any]]:
        self._has_ended = False
        yield self._measured(iterator)
        if not self._has_ended:
            # One that has ended must not be asked again: its workers are shut down.
            yield iterator

    def _measured(self, iterator: Iterator[Any]) -> Iterator[Any]:
        before: float | None = None
        wait = 0.0
        try:
            for _ in range(FIRST):
                yield next(iterator)
            while self._is_on and (self._batches < ENOUGH or self._total < SECONDS):
                asked = perf_counter()
                if before is not None:
                    self._total += asked - before
                    self._waited += wait
                    self._batches += 1
                # Emptied as it is passed on: a name would keep the batch while the next one is loaded.
                drawn = [next(iterator)]
                before, wait = asked, perf_counter() - asked
                yield drawn.pop()
        except StopIteration:
            self._has_ended = True
            return
        self._judge()

    def _judge(self) -> None:
        """Warns if training has waited for a good part of the time that was measured."""
        if self._waited >= PART * self._total and self._waited >= LEAST * self._batches:
            self._is_on = False
            warnings.warn(
                f"data took {self._waited / self._total:.0%} of the time of training over {self._batches} batches "
                f"({self._waited / self._batches:.3g} of {self._total / self._batches:.3g} s each): "
                f"{_fix(self._run.loaders.train_loader)}.",
                stacklevel=2,
            )
        self._begin()


def _fix(loader: Any) -> str:
    workers, cores = _workers_of(loader), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if workers is None:
        return "load them ahead, as a DataLoader with num_workers does"
    if not cores or workers < cores:
        return f"raise num_workers (now {workers}{f', with {cores} cores' if cores else ''}) in the training loader"
    return (
        f"num_workers={workers} is as many as there are cores, so make samples cheaper to load, or store them prepared"
    )


def _workers_of(loader: Any) -> int | None:
    """The workers of a loader, or of the one in it; of several the fewest. None if it has none to raise."""
    parts = getattr(loader, "flattened", None)
    if parts is not None:
        known = [found for found in map(_workers_of, parts) if found is not None]
        return min(known, default=None)
    workers = getattr(loader, "num_workers", None)
    if isinstance(workers, int):
        return workers
    inner = getattr(loader, "loader", None)
    return None if inner is None else _workers_of(inner)
