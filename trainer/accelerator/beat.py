"""The signs of life of the user's own loop, for the watchdog that `leyden launch --hang_timeout` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from leyden.strategies.launch.heartbeat import BATCHES, MARKS, STEP, Heartbeat, Phase
from leyden.strategies.launch.watchdog import watched
from leyden.strategies.ranks import Ranks


class LoopBeat:
    """Stores how far the loop is: a batch when a prepared loader has drawn one, and that it goes on when it goes
    backward. Without a limit nobody reads what it stores.

    Args:
        ranks: of the Accelerator.
        limit: seconds that a batch may take, or "auto"; None for no watchdog.
        folder: where a report is wanted.
    """

    def __init__(self, ranks: Ranks, limit: float | str | None, folder: str) -> None:
        self._ranks, self._limit, self._folder = ranks, limit, folder
        self._heartbeat = Heartbeat()
        self._watch = ExitStack()
        self._words = self._heartbeat.words

    def begin(self) -> None:
        """Watches the loop from here on; once. The ranks are known when something is prepared."""
        limit, self._limit = self._limit, None
        if limit is not None:
            self._watch.enter_context(watched(self._heartbeat, self._ranks, limit, self._folder))
            self._words = self._heartbeat.words
            self._heartbeat.begin_fit(self._words[BATCHES])
            self._heartbeat.mark(Phase.LOOP)

    def end(self) -> None:
        """Ends the watch: the loop is over."""
        self._limit = None
        self._watch.close()
        self._words = self._heartbeat.words

    def begin_pass(self, epoch: int, batch: int, steps: int) -> None:
        """A pass over a loader begins: its number, the batches of it that are done, and the steps of the loop."""
        self._heartbeat.begin_epoch(epoch, batch, self._words[BATCHES], steps)

    def batch(self, steps: int) -> None:
        """A batch is done."""
        self._words[BATCHES] += 1
        self._words[STEP] = steps

    def backward(self) -> None:
        """The loop goes on, in batches of which no prepared loader knows."""
        self._words[MARKS] += 1

    def end_pass(self) -> None:
        """No loader is read: until the next pass, the loop does what it likes."""
        self._heartbeat.mark(Phase.LOOP)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The loop saves a checkpoint."""
        with self._heartbeat.during(Phase.SAVING):
            yield
