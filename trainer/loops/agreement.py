"""Makes ranks stop and validate together: when one rank requests it, all ranks act on it at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.events.signals import Signals
    from leyden.trainer.loops.clock import Clock
    from leyden.trainer.run import Run

Exchange = Callable[[], list[bool]]


class Agreement:
    """The requests that the ranks of a fit share: to stop, to end the epoch, or to validate.

    At the end of each window a rank sends its requests to all ranks, and reads the requests sent at the end of the
    previous window, which have arrived by then. So no rank waits, and a request takes effect one window later, on all
    ranks. At the end of an epoch and after a validation the ranks wait for each other, so that a request takes effect
    there as it does in a single process.

    Args:
        run: this rank's run, with its signals and its `should_stop`.
        clock: this rank's training time; only global rank 0's clock decides.

    Attributes:
        stops: True if any rank set `should_stop`.
        time_is_up: True if `max_time` has passed on global rank 0's clock.
        validation_is_due: True if a validation is due by time on global rank 0's clock.
    """

    def __init__(self, run: Run, clock: Clock) -> None:
        self._run, self._ranks, self._signals, self._clock = run, run.strategy.ranks, run.signals, clock
        self._pending: Exchange | None = None
        self._requests_cut = False
        self.stops = self.time_is_up = self.validation_is_due = False

    def read(self, cut: bool) -> bool:
        """Reads the requests that the ranks sent one window ago.

        Args:
            cut: True if this rank requests the end of the epoch.

        Returns:
            True if all ranks end the epoch with this window.
        """
        check = self._run.strategy.check_exchange
        if check is not None:
            # Before ranks that have exchanged all gradients meet, in other collectives, those that have not.
            check()
        self._requests_cut = self._requests_cut or cut
        return self._receive() if self._pending is not None else False

    def send(self, wait: bool) -> None:
        """Sends this rank's requests, which `read` receives at the end of the next window.

        Args:
            wait: receive the requests of all ranks now (see `exchange`).
        """
        if wait:
            self.exchange()
        else:
            self._pending = self._send()

    def exchange(self, epoch_ends: bool = False) -> None:
        """Sends this rank's requests and waits for those of all ranks.

        Args:
            epoch_ends: True if the epoch has ended; drops this rank's request to end it.
        """
        if epoch_ends:
            self._requests_cut = False
        if self._pending is not None:
            # Completes the pending collective; its result is stale.
            self._pending()
        self._pending = self._send()
        self._receive()

    def _send(self) -> Exchange:
        clock, decides_on_time = self._clock, self._ranks.is_global_zero
        return self._ranks.exchange_flags(
            (
                *self._signals.pending_here(),
                self._run.should_stop,
                decides_on_time and clock.time_is_up(),
                decides_on_time and clock.validation_is_due(),
                self._requests_cut,
            )
        )

    def _receive(self) -> bool:
        assert self._pending is not None
        *received, self.stops, self.time_is_up, self.validation_is_due, cut = self._pending()
        self._pending = None
        self._signals.agree(received)
        return cut


class InterruptiblePass:
    """Interrupts a pass over data on all ranks when any rank receives a signal.

    Ranks may have different numbers of batches. A rank without batches left keeps joining the exchange until all ranks
    have finished.

    Args:
        ranks: the ranks of the run.
        signals: the signals received by this rank.
    """

    def __init__(self, ranks: Ranks, signals: Signals) -> None:
        self._ranks, self._signals = ranks, signals
        self._is_alone = ranks.world_size == 1
        self._pending: Exchange | None = None

    def interrupted_before_batch(self) -> bool:
        """Returns True if a signal interrupts the pass before this batch.

        Several ranks agree on a signal between two batches, so each of them is interrupted one batch after it arrived.
        """
        if self._pending is not None:
            self._receive()
        if self._signals.received is not None:
            return True
        if not self._is_alone:
            self._pending = self._send(has_batches=True)
        return False

    def interrupted_at_end(self) -> bool:
        """Waits, after this rank's last batch, for the other ranks; returns True if a signal interrupted any rank."""
        if self._is_alone:
            return False
        any_has_batches = True
        if self._pending is not None:
            self._receive()
        while any_has_batches and self._signals.received is None:
            self._pending = self._send(has_batches=False)
            any_has_batches = self._receive()
        return self._signals.received is not None

    def _send(self, has_batches: bool) -> Exchange:
        return self._ranks.exchange_flags((*self._signals.pending_here(), has_batches))

    def _receive(self) -> bool:
        assert self._pending is not None
        *received, any_has_batches = self._pending()
        self._pending = None
        self._signals.agree(received)
        return any_has_batches
