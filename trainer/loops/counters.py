"""Counts what a fit has done so far, batch by batch: the batches of this rank, and the samples of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.strategies.batch import batch_size_of
from leyden.strategies.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.events.progress import Progress


class Count:
    """Counts batches, and the samples in them as far as they tell their size.

    Args:
        progress: holds the counts.
        engine: knows the share of each batch.

    Attributes:
        shares: each batch comes with a `Share`, which knows the samples of all ranks.
        window_samples: samples before the open window.
    """

    def __init__(self, progress: Progress, engine: Engine) -> None:
        self._progress, self._engine = progress, engine
        self._readers = engine.strategy.data_size
        self._tells = True
        self.shares = False
        self.window_samples = 0

    def begin_loader(self, shares: bool) -> None:
        """Another loader is read, whose batches come with a `Share` or not."""
        self.shares = shares

    def begin_window(self) -> None:
        """Notes where a window of several batches begins."""
        self.window_samples = self._progress.samples

    def batch(self, batch: Any) -> None:
        """A batch is done (or, where the step draws by itself, drawn)."""
        samples = 0
        if self._tells and self.shares:
            share = self._engine.share
            assert share is not None
            self._tells = share.told
            samples = share.total if share.told else 0
        elif self._tells:
            try:
                # A DistributedSampler of the user's gives each rank as many.
                samples = batch_size_of(batch) * self._readers
            except ConfigurationError:
                self._tells = False
        self._progress.count_batch(samples)
