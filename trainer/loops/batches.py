"""Counts the batches of a fit, and passes them to a `training_step(dataloader_iter)` that draws its own."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.core.tree import batch_size_of
from leyden.launch.heartbeat import BATCHES, STEP, Phase

if TYPE_CHECKING:
    from leyden.launch.heartbeat import Heartbeat
    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.run import Run


class BatchCounter:
    """Counts batches and, while batch sizes are known, samples. Each batch also updates the heartbeat.

    Args:
        progress: holds the counts.
        engine: holds the current batch's `Share`.
        heartbeat: this rank's heartbeat.

    Attributes:
        shares: True if each batch comes with a `Share`, which knows the sample counts of all ranks.
    """

    def __init__(self, progress: Progress, engine: Engine, heartbeat: Heartbeat) -> None:
        self._progress, self._engine, self._heartbeat = progress, engine, heartbeat
        self._words = heartbeat.words
        self._has_begun = False
        self._data_size = engine.strategy.data_size
        self._knows_size = True
        self.shares = False
        self._before_window = (0, 0)
        """Samples and bad samples counted before the open accumulation window."""

    def begin_loader(self, shares: bool) -> None:
        """Switches to another loader; `shares` tells whether its batches come with a `Share`."""
        self.shares = shares

    def begin_epoch(self) -> None:
        """Begins to count the remaining batches of an epoch."""
        progress, heartbeat = self._progress, self._heartbeat
        if not self._has_begun:
            self._has_begun = True
            heartbeat.begin_fit(progress.batches)
        heartbeat.begin_epoch(progress.epoch, progress.batch, progress.batches, progress.global_step)
        self._words = heartbeat.words

    def end_epoch(self) -> None:
        """Ends the batches of an epoch: from here on the heartbeat reports the epoch's end."""
        self._heartbeat.mark(Phase.EPOCH)

    def begin_window(self) -> None:
        """Records the sample counts at the start of an accumulation window."""
        self._before_window = self._progress.samples, self._progress.bad_samples

    def at_window_start(self, batch: int, accumulates: bool) -> Progress:
        """Returns the progress at the start of the open window.

        Args:
            batch: index within the epoch of the window's first batch.
            accumulates: True if windows may have several batches. A window of one batch counts nothing while open.
        """
        progress = self._progress
        counts = self._before_window if accumulates else (progress.samples, progress.bad_samples)
        return progress.at_window_start(batch, *counts)

    def skip(self, remaining: Iterator[tuple[Any, bool]], number: int) -> bool:
        """Draws and counts batches without training on them; returns True if the epoch has none left.

        Args:
            remaining: the remaining batches, each with whether it is the last.
            number: the maximum number of batches to draw.
        """
        engine, epoch_ended, drawn = self._engine, False, 0
        current_share = engine.share
        for batch, is_last in itertools.islice(remaining, number):
            epoch_ended, drawn = is_last, drawn + 1
            if self.shares:
                batch, share = batch
                engine.begin_batch(share)
            self.count(batch)
            self._progress.count_passed_over()
        if current_share is not None:
            engine.begin_batch(current_share)
        # A loader may end before its reported length, without a batch marked as the last.
        return epoch_ended or drawn < number

    def count(self, batch: Any) -> None:
        """Counts a batch as trained, or as drawn if the step draws its own batches."""
        samples = 0
        if self._knows_size and self.shares:
            share = self._engine.share
            assert share is not None
            self._knows_size = share.sized
            samples = share.total if share.sized else 0
            self._progress.count_bad(share.lost)
        elif self._knows_size:
            try:
                # The user's own DistributedSampler yields the same number of samples on each rank.
                samples = batch_size_of(batch) * self._data_size
            except ConfigurationError:
                self._knows_size = False
        progress, words = self._progress, self._words
        progress.count_batch(samples)
        words[BATCHES], words[STEP] = progress.batches, progress.global_step


class DataloaderIter(Iterator[tuple[Any, int, int]]):
    """The argument of `training_step(dataloader_iter)`: yields (batch, batch_idx, dataloader_idx) and counts batches.

    Args:
        batches: the epoch's remaining batches, each with whether it is the last.
        progress: supplies the index of the next batch.
        counter: counts each batch.
        prepare: converts an item of the loader to a batch on the device.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Any, bool]],
        progress: Progress,
        counter: BatchCounter,
        prepare: Callable[[Any], Any],
    ) -> None:
        self._batches, self._progress, self._counter, self._prepare = batches, progress, counter, prepare
        self.is_last = progress.ended or progress.cut
        """True once the epoch's last batch has been drawn."""

    def __next__(self) -> tuple[Any, int, int]:
        drawn, self.is_last = next(self._batches)
        index = self._progress.batch
        batch = self._prepare(drawn)
        self._counter.count(batch)
        return batch, index, 0


def warn_of_length(reported: int, actual: int) -> None:
    """Warns that a training loader ended before its reported length."""
    warn(
        f"the training loader reports {reported} batches but ended after {actual}: fix its length, or let it report "
        "none.",
        every_rank=True,
    )


def takes_iterator(training_step: Callable[..., Any]) -> bool:
    """True for a step whose first parameter is named `dataloader_iter`: it draws its own batches."""
    return next(iter(inspect.signature(training_step).parameters), "") == "dataloader_iter"


def check_iterator(run: Run) -> None:
    """Rejects features that need each batch before the step: a `training_step(dataloader_iter)` draws its own.

    Raises:
        ConfigurationError: with several data ranks, a pipeline, `on_bad_sample="skip"`, or accumulation.
    """
    why = None
    if run.strategy.data_size > 1:
        why = (
            "so ranks can neither weight them nor end an epoch together: take the batch as an argument, or run on one "
            "device"
        )
    elif run.strategy.outputs.are_in_parts:
        why = (
            "so a pipeline cannot split them into micro-batches: take the batch as an argument, or use a strategy "
            "without pp"
        )
    elif run.arguments.on_bad_sample == "skip":
        why = "and on_bad_sample='skip' may leave one without samples: take the batch as an argument"
    elif run.accumulation is not None:
        why = "so accumulation cannot count them: draw several batches in one step instead"
    if why is not None:
        raise ConfigurationError(f"training_step(dataloader_iter) draws its own batches, {why}.")
