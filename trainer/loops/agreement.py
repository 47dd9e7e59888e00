"""How ranks stop together: when one of them wants to stop or validate, all of them do so at the same step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyden.trainer.loops.clock import Clock
    from leyden.trainer.trainer import Trainer

Answer = Callable[[], list[bool]]


class Agreement:
    """What the ranks of a fit have agreed on.

    At the end of a window each rank sends the others what it wants (to stop, to end the epoch), and reads what all of them sent
    at the end of the window before, which has arrived by then. So nobody waits, and a request takes effect one window later,
    on all ranks. At the
    end of an epoch, and after a validation, the ranks wait for each other, so that both end as in one process.

    Args:
        trainer: of this rank.
        clock: the training time of this rank; that of the first rank counts.

    Attributes:
        stops: somebody set `should_stop`.
        time_is_up: `max_time` is over, by the first rank's clock.
        validation_is_due: by an interval in time, on the first rank's clock.
    """

    def __init__(self, trainer: Trainer, clock: Clock) -> None:
        self._trainer = trainer
        self._clock = clock
        self._answer: Answer | None = None
        self._wants_cut = False
        self.stops = self.time_is_up = self.validation_is_due = False

    def read(self, cut: bool) -> bool:
        """Reads what the ranks sent one window ago.

        Args:
            cut: this rank wants to end the epoch.

        Returns:
            Whether all ranks end it, with this window.
        """
        self._wants_cut = self._wants_cut or cut
        return self._take() if self._answer is not None else False

    def send(self) -> None:
        """Sends what this rank wants, to be read at the end of the next window."""
        self._answer = self._ask()

    def exchange(self, epoch_ends: bool = False) -> None:
        """Asks and waits for the answer.

        Args:
            epoch_ends: the epoch is over, and with it any request to end it.
        """
        if epoch_ends:
            self._wants_cut = False
        if self._answer is not None:
            # Older than what is asked now.
            self._answer()
        self._answer = self._ask()
        self._take()

    def _ask(self) -> Answer:
        trainer, clock = self._trainer, self._clock
        decides_on_time = trainer.is_global_zero
        return trainer.strategy.ranks.exchange_flags(
            (
                *_signals(trainer),
                trainer.should_stop,
                decides_on_time and clock.time_is_up(),
                decides_on_time and clock.validation_is_due(),
                self._wants_cut,
            )
        )

    def _take(self) -> bool:
        assert self._answer is not None
        *signals, self.stops, self.time_is_up, self.validation_is_due, cut = self._answer()
        self._answer = None
        _receive(self._trainer, signals)
        return cut


class Pass:
    """An evaluation on several ranks, which a signal to one of them interrupts on all.

    They may have different numbers of batches: one that has no more keeps answering until nobody has any.

    Args:
        trainer: of this rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._answer: Answer | None = None

    def breaks_off(self) -> bool:
        """Before each batch: true if the pass is interrupted here. What is sent now is read before the next batch."""
        if self._answer is not None:
            self._take()
        if self._trainer.signals.received is not None:
            return True
        self._answer = self._ask(goes_on=True)
        return False

    def ends(self) -> bool:
        """After the last batch of this rank: waits for the others; true if the pass was interrupted."""
        goes_on = True
        if self._answer is not None:
            self._take()
        while goes_on and self._trainer.signals.received is None:
            self._answer = self._ask(goes_on=False)
            goes_on = self._take()
        return self._trainer.signals.received is not None

    def _ask(self, goes_on: bool) -> Answer:
        return self._trainer.strategy.ranks.exchange_flags((*_signals(self._trainer), goes_on))

    def _take(self) -> bool:
        assert self._answer is not None
        *signals, goes_on = self._answer()
        self._answer = None
        _receive(self._trainer, signals)
        return goes_on


def _signals(trainer: Trainer) -> tuple[bool, bool]:
    pending = trainer.signals.pending
    return pending == signal.SIGINT, pending == signal.SIGTERM


def _receive(trainer: Trainer, flags: list[bool]) -> None:
    """A signal that came to any rank has come to all."""
    if trainer.signals.received is None and any(flags):
        trainer.signals.received = signal.SIGINT if flags[0] else signal.SIGTERM
