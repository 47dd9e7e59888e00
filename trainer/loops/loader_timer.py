"""Measures how long training waits for its data, and warns about a slow loader."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Iterator, Mapping
from time import perf_counter
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from leyden.core.rank_zero import warn
from leyden.data.combined import CombinedLoader
from leyden.data.sources import Composite

if TYPE_CHECKING:
    from leyden.trainer.run import Run

WARM_UP_BATCHES = 5
"""First batches of an epoch, which are not timed: workers are starting and filling their queues."""
MIN_BATCHES = 50
"""Timed batches, over one or more epochs, before the loader is judged."""
MIN_SECONDS = 10.0
"""Seconds of training before the loader is judged, so that short runs never warn."""
MAX_WAIT_FRACTION = 0.3
"""Fraction of the training time that may go to waiting for data."""
MIN_WAIT_PER_BATCH = 1e-3
"""Seconds per batch below which workers do not help: passing a batch between processes costs about as much."""


class LoaderTimer:
    """Times how long a fit waits for training batches. The first rank of each machine warns, once.

    In each epoch batches are timed until there are enough to judge the loader. All further batches come directly from
    the loader's own iterator. A batch followed by a validation is not counted.

    Args:
        run: the run of the fit.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_on = not run.arguments.barebones and run.strategy.ranks.local_rank == 0
        self._is_exhausted = False
        self._judged = (0.0, 0.0)
        """Seconds waited, and in total, of the batches that were judged before."""
        self._waited, self._total, self._batches = 0.0, 0.0, 0

    @property
    def share(self) -> float:
        """The share of the time of all timed batches that went to waiting for data; 0 before any."""
        waited, total = self._judged[0] + self._waited, self._judged[1] + self._total
        return waited / total if total else 0.0

    def _reset(self) -> None:
        self._judged = (self._judged[0] + self._waited, self._judged[1] + self._total)
        self._waited, self._total, self._batches = 0.0, 0.0, 0

    def timed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an iterator and times some of them. It neither prefetches nor keeps batches."""
        if self._run.profiler is not None:
            iterator = self._run.profiler.drawn("train_dataloader_next", iterator)
        return itertools.chain.from_iterable(self._timed_then_rest(iterator)) if self._is_on else iterator

    def _timed_then_rest(self, iterator: Iterator[Any]) -> Iterator[Iterator[Any]]:
        self._is_exhausted = False
        yield self._timed_batches(iterator)
        if not self._is_exhausted:
            # An exhausted iterator must not be called again: its workers have shut down.
            yield iterator

    def _timed_batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        previous_start: float | None = None
        wait, progress, validations = 0.0, self._run.progress, -1
        try:
            for _ in range(WARM_UP_BATCHES):
                yield next(iterator)
            while self._is_on and (self._batches < MIN_BATCHES or self._total < MIN_SECONDS):
                start = perf_counter()
                if previous_start is not None and progress.validations == validations:
                    self._total += start - previous_start
                    self._waited += wait
                    self._batches += 1
                # A list that is emptied by the yield: a local name would keep the batch while the next one is loaded.
                drawn = [next(iterator)]
                previous_start, wait, validations = start, perf_counter() - start, progress.validations
                yield drawn.pop()
        except StopIteration:
            self._is_exhausted = True
            return
        self._warn_if_slow()

    def _warn_if_slow(self) -> None:
        """Warns if training waited for a large part of the measured time, and resets the measurement."""
        is_slow = self._waited >= MAX_WAIT_FRACTION * self._total
        if is_slow and self._waited >= MIN_WAIT_PER_BATCH * self._batches:
            self._is_on = False
            warn(
                f"data took {self._waited / self._total:.0%} of the training time over {self._batches} batches "
                f"({self._waited / self._batches:.3g} of {self._total / self._batches:.3g} s each): "
                f"{_fix(self._run.loaders.train_loader, self._run.strategy.ranks.local_size, self._run.module)}.",
            )
        self._reset()


def _fix(loader: Any, ranks: int, module: nn.Module | None = None) -> str:
    """Returns advice on a slow loader, for a machine whose cores are shared by this many ranks.

    Args:
        loader: the training loader.
        ranks: the number of ranks on this machine.
        module: the module in training.
    """
    if module is not None and any(_reaches(dataset, module) for dataset in _streams_of(loader)):
        # In a worker they would come from a copy of the weights, which does not learn.
        return (
            "the loader's samples come from the module in training, so generate more of them in one forward pass, "
            "without gradients"
        )
    workers, cores = _workers_of(loader), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if workers is None:
        return "prefetch batches in the background, as a DataLoader with num_workers does"
    shared = f" for {ranks} ranks" if ranks > 1 else ""
    if not cores or workers < cores // ranks:
        known = f", with {cores} cores{shared}" if cores else ""
        return f"raise num_workers (now {workers}{known}) in the training loader"
    all_used = f"is this rank's share of {cores} cores{shared}" if shared else f"already uses all {cores} cores"
    return f"num_workers={workers} {all_used}, so make samples cheaper to load, or store them preprocessed"


def _workers_of(loader: Any) -> int | None:
    """Returns `num_workers` of a loader, or the smallest of its inner loaders; None if it has no such setting."""
    if isinstance(loader, CombinedLoader):
        counts = [workers for workers in map(_workers_of, loader.flattened) if workers is not None]
        return min(counts, default=None)
    if isinstance(loader, Composite):
        return _workers_of(getattr(loader, "loader", None))
    workers = getattr(loader, "num_workers", None)
    return workers if isinstance(workers, int) else None


def _streams_of(loader: Any) -> list[Any]:
    """Returns the IterableDatasets of a loader, or of its inner loaders."""
    if isinstance(loader, CombinedLoader):
        return [dataset for inner in loader.flattened for dataset in _streams_of(inner)]
    if isinstance(loader, Composite):
        return _streams_of(getattr(loader, "loader", None))
    dataset = getattr(loader, "dataset", None)
    return [dataset] if isinstance(dataset, IterableDataset) else []


def _reaches(found: Any, module: nn.Module, depth: int = 4) -> bool:
    """Returns True if an object holds the module or a part of it, in an attribute, a closure or a container."""
    if isinstance(found, nn.Module):
        own = {id(part) for part in module.modules()}
        return any(id(part) in own for part in found.modules())
    if not depth or isinstance(found, str | bytes | int | float | Tensor | type | ModuleType):
        return False
    held = [getattr(found, "__self__", None), *getattr(found, "__dict__", {}).values()]
    if isinstance(found, Mapping):
        held += found.values()
    elif isinstance(found, list | tuple):
        held += found
    elif isinstance(found, functools.partial):
        held += [found.func, *found.args]
    elif isinstance(found, FunctionType):
        held += inspect.getclosurevars(found).nonlocals.values()
    return any(_reaches(item, module, depth - 1) for item in held)
