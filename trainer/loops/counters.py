"""Counts what a fit has done so far, batch by batch: the batches of this rank, and the samples of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.strategies.batch import batch_size_of
from leyden.strategies.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer


class Count:
    """Counts into the Trainer's progress.

    Args:
        trainer: of this rank.

    Attributes:
        shares: each batch comes with a `Share`, which knows the samples of all ranks.
        window_samples: samples before the open window.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._progress = trainer.progress
        self._engine = trainer.accelerator
        self._readers = trainer.strategy.data_size
        self._tells = True
        self.shares = False
        self.window_samples = 0

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
