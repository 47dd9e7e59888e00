"""How ranks stop together: when one of them wants to stop or validate, all of them do so at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.events.signals import Signals
    from leyden.trainer.loops.clock import Clock
    from leyden.trainer.run.state import Run

Answer = Callable[[], list[bool]]


class Agreement:
    """What the ranks of a fit have agreed on.

    At the end of a window each rank sends the others what it wants (to stop, to end the epoch), and reads what all of
    them sent at the end of the window before, which has arrived by then. So nobody waits, and a request takes effect
    one window later, on all ranks. At the end of an epoch, and after a validation, the ranks wait for each other, so
    that both end as in one process.

    Args:
        run: of this rank, with its request to stop and its signals.
        clock: the training time of this rank; that of the first rank counts.

    Attributes:
        stops: somebody set `should_stop`.
        time_is_up: `max_time` is over, by the first rank's clock.
        validation_is_due: by an interval in time, on the first rank's clock.
    """

    def __init__(self, run: Run, clock: Clock) -> None:
        self._run, self._ranks, self._signals, self._clock = run, run.strategy.ranks, run.signals, clock
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
        clock, decides_on_time = self._clock, self._ranks.is_global_zero
        return self._ranks.exchange_flags(
            (
                *self._signals.pending_here(),
                self._run.should_stop,
                decides_on_time and clock.time_is_up(),
                decides_on_time and clock.validation_is_due(),
                self._wants_cut,
            )
        )

    def _take(self) -> bool:
        assert self._answer is not None
        *came, self.stops, self.time_is_up, self.validation_is_due, cut = self._answer()
        self._answer = None
        self._signals.agree(came)
        return cut


class Pass:
    """An evaluation, which a signal interrupts: on several ranks on all of them, whichever has received it.

    They may have different numbers of batches: one that has no more keeps answering until nobody has any.

    Args:
        ranks: all of them.
        signals: those that came to this rank.
    """

    def __init__(self, ranks: Ranks, signals: Signals) -> None:
        self._ranks, self._signals = ranks, signals
        self._is_alone = ranks.world_size == 1
        self._answer: Answer | None = None

    def breaks_off(self) -> bool:
        """Called before each batch: True if the pass is interrupted here. What is sent is read before the next one."""
        if self._answer is not None:
            self._take()
        if self._signals.received is not None:
            return True
        if not self._is_alone:
            self._answer = self._ask(goes_on=True)
        return False

    def ends(self) -> bool:
        """Called after this rank's last batch: waits for the others; True if one of them was interrupted."""
        if self._is_alone:
            return False
        goes_on = True
        if self._answer is not None:
            self._take()
        while goes_on and self._signals.received is None:
            self._answer = self._ask(goes_on=False)
            goes_on = self._take()
        return self._signals.received is not None

    def _ask(self, goes_on: bool) -> Answer:
        return self._ranks.exchange_flags((*self._signals.pending_here(), goes_on))

    def _take(self) -> bool:
        assert self._answer is not None
        *came, goes_on = self._answer()
        self._answer = None
        self._signals.agree(came)
        return goes_on
