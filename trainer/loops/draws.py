"""`training_step(dataloader_iter)`: a step that draws its own batches, as many as it likes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyden.trainer.loops.fit import FitLoop


class Draws(Iterator[tuple[Any, int, int]]):
    """What such a step is handed: gives (batch, batch_idx, dataloader_idx), on the device, and counts what was drawn.

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
