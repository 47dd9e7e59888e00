"""The end of a custom training loop, normal or preempted, and the release of its signal handlers and folder lock."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import inform
from leyden.trainer.events.departure import Departure
from leyden.trainer.events.signals import NOTICE, Signals

if TYPE_CHECKING:
    from leyden.accelerator.loop.stepping import Stepping
    from leyden.checkpoint.lock import RunLock
    from leyden.trainer.events.preemption import Preemption


class LoopEnd:
    """Catches preemption signals until the loop ends. Ctrl-C is not caught and keeps its usual effect.

    With several ranks, each call of `is_preempted` reads the flags that all ranks sent in the previous call, which have
    arrived by now, and sends this rank's own. So no rank waits, and all ranks learn of a preemption in the same call,
    one call after the signal.
    """

    def __init__(self, preemption: Preemption | None, stepping: Stepping, lock: RunLock | None) -> None:
        self._preemption, self._stepping, self._lock = preemption, stepping, lock
        self._ranks = stepping.strategy.ranks
        numbers, code = ((), 0) if preemption is None else (preemption.numbers, preemption.exit_code)
        self._signals = Signals(numbers, code, ending=())
        self._departure = Departure(preemption, self._signals, self._ranks, self._where, self._release)
        self._pending_flags: Callable[[], list[bool]] | None = None
        """Waits for the flags in flight and returns which are set on any rank, one per kind of signal."""
        self._was_reported = False
        """True once `is_preempted` has returned True."""
        self._handlers = ExitStack()
        if preemption is not None:
            self._handlers.enter_context(self._signals.caught_on(self._ranks.world_size))
            self._handlers.enter_context(self._departure)
        atexit.register(_at_exit, weakref.ref(self))
        weakref.finalize(self, _drop, self._signals, lock).atexit = False

    # preempted --------------------------------------------------------------------------------------------------------
    def is_preempted(self) -> bool:
        """Returns True on all ranks if any of them is preempted, but never inside an open window."""
        if self._preemption is None:
            return False
        if self._ranks.world_size > 1 and self._signals.received is None and not self._stepping.is_joining:
            self._exchange_flags()
        self._was_reported = self._was_reported or (self._signals.preempted and not self._stepping.is_within_window)
        return self._was_reported

    def _exchange_flags(self) -> None:
        self._read_flags()
        if self._signals.received is None:
            self._pending_flags = self._ranks.exchange_flags(self._signals.pending_here())
            if self._stepping.is_last_batch:
                # The next call may come only after an evaluation.
                self._read_flags()

    def _read_flags(self) -> None:
        if self._pending_flags is not None:
            wait_for_flags, self._pending_flags = self._pending_flags, None
            self._signals.agree(wait_for_flags())

    def begin_leaving(self, finish_saving: Callable[[], None]) -> None:
        """Runs the deferred save, and waits for the one in flight; refused unless `is_preempted` has returned True."""
        if not self._was_reported:
            raise ConfigurationError(
                "leave() ends a preempted loop, and check_preemption() has not returned True. Call check_preemption() "
                "first. For another reason to leave, such as a time limit, use Accelerator(preemption=Preemption("
                "should_preempt=function))."
            )
        self._stepping.finish_deferred()
        finish_saving()
        # If the grace period expires from here on, the loop's state is already saved.
        self._signals.exception()

    def leave(self) -> NoReturn:
        """Ends the process of a preempted loop, after `begin_leaving`, by a SystemExit."""
        inform(f"\npreempted by {self._signals.name} at {self._where()}")
        # Before the departure, since the requeued job may start immediately and needs the folder.
        self._release()
        # Last, since SLURM kills the rest of a job that is requeued.
        self._departure.leave()
        self._handlers.close()
        interruption = self._signals.interruption
        assert interruption is not None
        raise interruption

    def _where(self) -> str:
        return f"step {self._stepping.steps}"

    # not preempted ----------------------------------------------------------------------------------------------------
    def end(self) -> None:
        """Releases everything. A signal that was caught but never reported to the loop is raised again."""
        # Flags may still be in flight, and gloo must not shut down with a pending operation.
        self._read_flags()
        received = None if self._was_reported or self._signals.came_at is None else self._signals.received
        self.close()
        if received not in (None, NOTICE):
            self._was_reported = True
            os.kill(os.getpid(), received)

    def close(self) -> None:
        """Releases the folder and restores the signal handlers."""
        self._release()
        self._handlers.close()

    def leave_ranks(self) -> None:
        """Ends gloo's threads before the interpreter exits; wrapped models would keep them alive."""
        self._stepping.leave()
        self._stepping.strategy.teardown()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _drop(signals: Signals, lock: RunLock | None) -> None:
    """Releases the handlers and lock of an Accelerator that was garbage-collected before its loop ended."""
    signals.give_up()
    if lock is not None:
        lock.drop()


def _at_exit(end: weakref.ref[LoopEnd]) -> None:
    found = end()
    if found is not None:
        found.close()
        found.leave_ranks()
