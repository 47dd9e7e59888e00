"""The batches of a fit: counted, and drawn by the step itself if that is a `training_step(dataloader_iter)`."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from leyden.strategies.batch import batch_size_of
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.launch.heartbeat import BATCHES, STEP, Phase

if TYPE_CHECKING:
    from leyden.strategies.launch.heartbeat import Heartbeat
    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.run.state import Run


class Count:
    """Counts batches, and the samples in them as far as their size is known. Each batch is a sign of life.

    Args:
        progress: holds the counts.
        engine: knows the share of each batch.
        heartbeat: of this rank.

    Attributes:
        shares: each batch comes with a `Share`, which knows the samples of all ranks.
    """

    def __init__(self, progress: Progress, engine: Engine, heartbeat: Heartbeat) -> None:
        self._progress, self._engine, self._heartbeat = progress, engine, heartbeat
        self._words = heartbeat.words
        self._has_begun = False
        self._readers = engine.strategy.data_size
        self._knows_size = True
        self.shares = False
        self._at_window = (0, 0)
        """Samples, and bad ones, before the open window of several batches."""

    def begin_loader(self, shares: bool) -> None:
        """Begins another loader, whose batches come with a `Share` or not."""
        self.shares = shares

    def begin_epoch(self) -> None:
        """Begins the batches that are left of an epoch."""
        progress, heartbeat = self._progress, self._heartbeat
        if not self._has_begun:
            self._has_begun = True
            heartbeat.begin_fit(progress.batches)
        heartbeat.begin_epoch(progress.epoch, progress.batch, progress.batches, progress.global_step)
        self._words = heartbeat.words

    def end_epoch(self) -> None:
        """Ends the batches of an epoch."""
        self._heartbeat.mark(Phase.EPOCH)

    def begin_window(self) -> None:
        """Notes where a window of several batches begins."""
        self._at_window = self._progress.samples, self._progress.bad_samples

    def at_window_start(self, batch: int, accumulates: bool) -> Progress:
        """The progress at the start of the open window.

        Args:
            batch: index in the epoch of its first batch.
            accumulates: it may have several; of a single one, nothing is counted while it is open.
        """
        progress = self._progress
        counts = self._at_window if accumulates else (progress.samples, progress.bad_samples)
        return progress.at_window_start(batch, *counts)

    def passed_over(self, batch: Any) -> None:
        """Counts a batch that is drawn and not trained on."""
        self.batch(batch)
        self._progress.count_passed_over()

    def batch(self, batch: Any) -> None:
        """Counts a batch as done (or, where the step draws by itself, as drawn)."""
        samples = 0
        if self._knows_size and self.shares:
            share = self._engine.share
            assert share is not None
            self._knows_size = share.sized
            samples = share.total if share.sized else 0
            self._progress.count_bad(share.lost)
        elif self._knows_size:
            try:
                # A DistributedSampler of the user's gives each rank as many.
                samples = batch_size_of(batch) * self._readers
            except ConfigurationError:
                self._knows_size = False
        progress, words = self._progress, self._words
        progress.count_batch(samples)
        words[BATCHES], words[STEP] = progress.batches, progress.global_step


class DrawnBatches(Iterator[tuple[Any, int, int]]):
    """The `dataloader_iter` of such a step: an iterator of (batch, batch_idx, dataloader_idx) that counts its batches.

    Args:
        batches: those that are left of the epoch, each with whether it is the last one.
        progress: whose batch is drawn next.
        count: counts each batch.
        bring: returns what was drawn as the batch on the device.
    """

    def __init__(
        self, batches: Iterator[tuple[Any, bool]], progress: Progress, count: Count, bring: Callable[[Any], Any]
    ) -> None:
        self._batches, self._progress, self._count, self._bring = batches, progress, count, bring
        self.is_last = progress.ended or progress.cut
        """The epoch's last batch has been drawn."""

    def __next__(self) -> tuple[Any, int, int]:
        drawn, self.is_last = next(self._batches)
        index = self._progress.batch
        batch = self._bring(drawn)
        self._count.batch(batch)
        return batch, index, 0


def pass_over(left: Iterator[tuple[Any, bool]], number: int, count: Count, engine: Engine) -> bool:
    """Draws batches without training on them; returns True if the epoch has none left.

    Args:
        left: the batches that are left, each with whether it is the last one.
        number: how many are drawn, at most.
        count: counts each batch.
        engine: receives the share of each, and in the end again of that of the batch that is being trained.
    """
    share, ended, drawn = engine.share, False, 0
    for batch, is_last in itertools.islice(left, number):
        ended, drawn = is_last, drawn + 1
        if count.shares:
            batch, own = batch
            engine.begin_batch(own)
        count.passed_over(batch)
    if share is not None:
        engine.begin_batch(share)
    # A loader may end before its length.
    return ended or drawn < number


def warn_of_length(promised: int, found: int) -> None:
    """Warns of a training loader that has ended before its length."""
    warnings.warn(
        f"the training loader says that it has {promised} batches and ended after {found}: give it the right length, "
        "or none at all.",
        stacklevel=3,
    )


def draws_itself(training_step: Callable[..., Any]) -> bool:
    """True for a step whose batch is called `dataloader_iter`."""
    return next(iter(inspect.signature(training_step).parameters), "") == "dataloader_iter"


def check_drawing(run: Run) -> None:
    """Refuses what cannot be done with batches that are only known once they have been drawn.

    Raises:
        ConfigurationError: with several ranks of data, a pipeline, or accumulation.
    """
    why = None
    if run.strategy.data_size > 1:
        why = "so ranks cannot weigh them or end together: take the batch as an argument, or run on one device"
    elif run.strategy.outputs.are_in_parts:
        why = (
            "so a pipeline cannot cut them into micro-batches: take the batch as an argument, or use a strategy "
            "without pp"
        )
    elif run.arguments.on_bad_sample == "skip":
        why = "and on_bad_sample='skip' may leave nothing of one: take the batch as an argument"
    elif run.accumulation is not None:
        why = "so accumulation cannot count them: draw several in one step instead"
    if why is not None:
        raise ConfigurationError(f"training_step(dataloader_iter) draws its own batches, {why}.")
