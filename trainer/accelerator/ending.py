"""How the user's own loop ends, by itself or preempted, and what it holds until then: signals, and its folder."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.events.departure import Departure
from leyden.trainer.events.signals import NOTICE, Signals

if TYPE_CHECKING:
    from leyden.trainer.accelerator.stepping import Stepping
    from leyden.trainer.checkpoint.lock import FolderLock
    from leyden.trainer.events.preemption import Preemption


class LoopEnd:
    """Catches what preempts a loop, from here on until it ends. Ctrl-C is not caught, and keeps its own meaning.

    Where there are several ranks, each call of `is_preempted` reads what all of them sent in the call before, which has
    arrived by then, and sends what came to this one. So nobody waits, and all ranks hear of it in the same call, one
    later than the signal.

    Args:
        preemption: as the user gave it; None for a loop that catches nothing.
        stepping: knows how far the loop is. Its ranks have joined.
        lock: of the folder that the loop holds alone; None without one.
    """

    def __init__(self, preemption: Preemption | None, stepping: Stepping, lock: FolderLock | None) -> None:
        self._preemption, self._stepping, self._lock = preemption, stepping, lock
        self._ranks = stepping.strategy.ranks
        numbers, code = ((), 0) if preemption is None else (preemption.numbers, preemption.exit_code)
        self._signals = Signals(numbers, code, ending=())
        self._departure = Departure(preemption, self._signals, self._ranks, self._where, self._release)
        self._answer: Callable[[], list[bool]] | None = None
        self._is_known = False
        """The loop was told that it is preempted."""
        self._watch = ExitStack()
        if preemption is not None:
            self._watch.enter_context(self._signals.caught_on(self._ranks.world_size))
            self._watch.enter_context(self._departure)
        atexit.register(_at_exit, weakref.ref(self))
        weakref.finalize(self, _drop, self._signals, lock).atexit = False

    # preempted --------------------------------------------------------------------------------------------------------
    def is_preempted(self) -> bool:
        """True on all ranks if one of them is preempted; a window that is open is closed first."""
        if self._preemption is None:
            return False
        if self._ranks.world_size > 1 and self._signals.received is None and not self._stepping.joins:
            self._exchange()
        self._is_known = self._is_known or (self._signals.preempted and not self._stepping.is_within_window)
        return self._is_known

    def _exchange(self) -> None:
        self._read()
        if self._signals.received is None:
            self._answer = self._ranks.exchange_flags(self._signals.pending_here())
            if self._stepping.ends_pass:
                # The next call may be an evaluation away.
                self._read()

    def _read(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            self._signals.agree(answer())

    def begin_leaving(self, finish_saving: Callable[[], None]) -> None:
        """Saves what is still to be saved.

        Args:
            finish_saving: waits for an asynchronous save.

        Raises:
            ConfigurationError: unless the loop was told that it is preempted.
        """
        if not self._is_known:
            raise ConfigurationError(
                "leave() ends a loop that is preempted, and check_preemption() has not returned True: call it first. "
                "For a reason of your own, such as a limit of time, give Accelerator(preemption=Preemption("
                "should_preempt=function))."
            )
        self._stepping.finish_waiting()
        finish_saving()
        # From here on the grace period ends a loop that is saved.
        self._signals.exception()

    def leave(self) -> NoReturn:
        """Ends the process of a preempted loop, after `begin_leaving`.

        Raises:
            SystemExit: with the exit code of the preemption.
        """
        if self._ranks.is_global_zero:
            print(f"\npreempted by {self._signals.name} at {self._where()}", flush=True)
        # The next start may come at once.
        self._release()
        # Last: SLURM ends what is left of a job that is requeued.
        self._departure.leave()
        self._watch.close()
        interruption = self._signals.interruption
        assert interruption is not None
        raise interruption

    def _where(self) -> str:
        return f"step {self._stepping.steps}"

    # in order ---------------------------------------------------------------------------------------------------------
    def end(self) -> None:
        """Gives all up. A signal that the loop never heard of does now what it would have done by itself."""
        # What was sent and never read: gloo must not end with it under way.
        self._read()
        received = None if self._is_known or self._signals.came_at is None else self._signals.received
        self.close()
        if received not in (None, NOTICE):
            self._is_known = True
            os.kill(os.getpid(), received)

    def close(self) -> None:
        """Gives the folder up and puts the handlers back."""
        self._release()
        self._watch.close()

    def leave_ranks(self) -> None:
        """Ends gloo's threads before the interpreter does; wrapped models hold on to them."""
        self._stepping.leave()
        self._stepping.strategy.teardown()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _drop(signals: Signals, lock: FolderLock | None) -> None:
    """Gives up what a loop holds that was never ended, and that no script can end any more."""
    signals.give_up()
    if lock is not None:
        lock.drop()


def _at_exit(end: weakref.ref[LoopEnd]) -> None:
    found = end()
    if found is not None:
        found.close()
        found.leave_ranks()
