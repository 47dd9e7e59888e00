"""Heartbeat of a custom training loop, for the watchdog of `leyden launch`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from leyden.launch.heartbeat import BATCHES, MARKS, STEP, Heartbeat, Phase
from leyden.launch.watchdog import watched
from leyden.strategies.ranks import Ranks


class LoopBeat:
    """Records the loop's progress for the watchdog: each batch of a prepared loader, and each backward.

    `limit` is that of `watched`, which writes its report to `folder`; None for no watchdog.
    """

    def __init__(self, ranks: Ranks, limit: float | str | None, folder: str) -> None:
        self._ranks, self._limit, self._folder = ranks, limit, folder
        self.is_watched = False
        """True while a watchdog reads these records."""
        self._heartbeat = Heartbeat()
        self._watch = ExitStack()
        self._words = self._heartbeat.words

    def begin(self) -> None:
        """Starts the watchdog; later calls do nothing. Called once objects are prepared, when the ranks are known."""
        limit, self._limit = self._limit, None
        if limit is not None:
            self._watch.enter_context(watched(self._heartbeat, self._ranks, limit, self._folder))
            self._words = self._heartbeat.words
            self.is_watched = self._heartbeat.is_watched
            self._heartbeat.begin_fit(self._words[BATCHES])
            self._heartbeat.mark(Phase.LOOP)

    def end(self) -> None:
        """Stops the watchdog; the loop has ended."""
        self._limit = None
        self._watch.close()
        self.is_watched = False
        self._words = self._heartbeat.words

    def begin_pass(self, epoch: int, batch: int, steps: int) -> None:
        """Records the start of a pass over a loader: its number, the batches of it that are done, and all steps."""
        self._heartbeat.begin_epoch(epoch, batch, self._words[BATCHES], steps)

    def batch(self, steps: int) -> None:
        """Records a completed batch."""
        self._words[BATCHES] += 1
        self._words[STEP] = steps

    def backward(self) -> None:
        """Records progress in batches that no prepared loader has drawn."""
        self._words[MARKS] += 1

    def end_pass(self) -> None:
        """Records that no loader is being iterated: until the next pass, no batches are expected."""
        self._heartbeat.mark(Phase.LOOP)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Marks the block as saving a checkpoint."""
        with self._heartbeat.during(Phase.SAVING):
            yield
