"""`training_step(dataloader_iter)`: a step that draws its own batches, as many as it likes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from leyden.strategies.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.trainer.loops.fit import FitLoop
    from leyden.trainer.trainer import Trainer


class Draws(Iterator[tuple[Any, int, int]]):
    """The `dataloader_iter` of such a step: an iterator of (batch, batch_idx, dataloader_idx) that counts what was drawn.

    Args:
        loop: whose batches and counters these are.
    """

    def __init__(self, loop: FitLoop) -> None:
        self._loop = loop
        self._batches = loop.batches()
        self.is_last = False
        """The epoch's last batch has been drawn."""

    def __next__(self) -> tuple[Any, int, int]:
        batch, self.is_last = next(self._batches)
        index = self._loop.progress.batch
        self._loop.count.batch(batch)
        transfer = self._loop.trainer.transfer
        return (batch if transfer is None else transfer(batch, 0)), index, 0

    def turns(self) -> Iterator[tuple[Draws, bool]]:
        """One turn for each training step, until everything has been drawn."""
        while not self.is_last:
            yield self, False


def draws_itself(training_step: Callable[..., Any]) -> bool:
    """True for a step whose batch is called `dataloader_iter`."""
    return next(iter(inspect.signature(training_step).parameters), "") == "dataloader_iter"


def check_drawing(trainer: Trainer) -> None:
    """Refuses what cannot be done with batches that are only known once they have been drawn.

    Raises:
        ConfigurationError: with several ranks of data, or accumulation.
    """
    if trainer.strategy.data_size > 1:
        raise ConfigurationError(
            "training_step(dataloader_iter) draws its own batches, so ranks cannot weigh them or end together: take the batch as "
            "an argument, or run on one device."
        )
    if trainer.accumulation is not None:
        raise ConfigurationError(
            "training_step(dataloader_iter) draws its own batches, so accumulation cannot count them: draw several in one "
            "step instead."
        )
