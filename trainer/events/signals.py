"""Signal handling of a run: the handler only sets a flag, which the loops check between batches."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from types import FrameType, TracebackType
from typing import Any

from leyden.core.environment import is_submitit_task
from leyden.core.rank_zero import warn
from leyden.launch.leaving import raise_quietly

NOTICE = 0
"""Stands in for a signal number when the notice came from elsewhere. No signal has this number."""
LEAVE = -1
"""Stands in for a signal number when the run itself asked to end, together with its process."""


class Signals:
    """Catches the signals that end or preempt a run, for its duration. A second SIGINT raises KeyboardInterrupt.

    Python allows signal handlers only in the main thread. In other threads nothing is caught, with a warning if signals
    were to preempt the run, and a run ends with its thread. If another thread leaves the context, the next signal
    restores the original handlers. With several ranks, a signal to one rank is pending until all ranks have agreed on
    it (trainer/loops/agreement.py).

    Args:
        preempting: signals that preempt the run; see `Preemption`.
        exit_code: the exit status of a preempted run.
        ending: signals that shut the run down cleanly, without preempting it. In a task of submitit SIGTERM does not
            count: SLURM also sends it ahead of the signal that preempts, so submitit ignores it.
    """

    def __init__(
        self,
        preempting: Collection[int] = (),
        exit_code: int = 0,
        ending: Collection[int] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self.received: int | None = None
        """The first signal of the run, once all ranks have agreed on it; None before that."""
        self.pending: int | None = None
        """The first signal that this rank received, with several ranks; None without one."""
        self.came_at: float | None = None
        """The `time.monotonic` time at which this rank received its first signal; None without one."""
        if is_submitit_task():
            ending = [number for number in ending if number != signal.SIGTERM]
        self.kinds = tuple(dict.fromkeys((*ending, *preempting, NOTICE)))
        """The signals to catch, the same on all ranks. If several arrive together, the first in this order counts."""
        self._none = (False,) * len(self.kinds)
        self._preempting, self._exit_code = frozenset((*preempting, NOTICE)), exit_code
        self._has_ranks = False
        self.interruption: BaseException | None = None
        """The exception for the received signal, raised after the run has shut down cleanly."""
        self._previous: dict[int, Any] = {}
        """The handlers that this object replaced, by signal."""
        self._pid = 0
        self._is_given_up = False
        self._owed: int | None = None
        """The signal to raise for its original handler once the run has ended; None without one."""

    def caught_on(self, ranks: int) -> Signals:
        """Returns this object, as the context of a run on the given number of ranks."""
        self._has_ranks = ranks > 1
        return self

    def __enter__(self) -> Signals:
        self.received = self.interruption = self.pending = self.came_at = self._owed = None
        # Read here and not in `__init__`: a rank may have been forked in between.
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in self.kinds:
                if number != NOTICE:
                    self._previous[number] = signal.getsignal(number)
                    signal.signal(number, self._handle)
        elif len(self._preempting) > 1:
            warn(
                "no signal preempts this run, since Python handles signals only in the main thread: run it there, or "
                "set Preemption(should_preempt=…), and signals=() for no warning."
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._previous.clear()
        elif self._previous:
            self.give_up()
        late, self.pending = self.pending, None
        if late is not None and late != NOTICE and self.received is None and kind is None:
            # The signal came too late for the ranks to agree on it. Send it again, to the original handler.
            os.kill(os.getpid(), late)
        elif self._owed is not None and callable(signal.getsignal(self._owed)):
            signal.raise_signal(self._owed)

    def owe(self, number: int) -> None:
        """Raises a signal for its original handler when the run has ended, which may be the end of the process."""
        self._owed = number

    def settle(self, otherwise: int) -> int:
        """Calls the original handler of the signal that is owed, from a thread of a process that is about to end.

        Args:
            otherwise: the exit code if nothing is owed.

        Returns:
            The code with which the process has to exit.
        """
        handler = None if self._owed is None else self._previous.get(self._owed)
        if not callable(handler):
            return otherwise
        try:
            handler(self._owed, None)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else otherwise
        except Exception:
            traceback.print_exc()
            return 1
        return otherwise

    def give_up(self) -> None:
        """Stops catching signals: the next one goes to the original handler.

        Safe to call from any thread, and while another object's handler is stacked on top of this one.
        """
        self._is_given_up = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_given_up:
            previous = self._previous.get(number)
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
            os.kill(os.getpid(), number)
            return
        if os.getpid() != self._pid:
            # A forked loader worker inherits this handler. It ignores Ctrl-C, which a terminal sends to it too: the run
            # needs its batches to shut down cleanly. Any other signal ends the worker as usual.
            if number == signal.SIGINT:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and signal.SIGINT in (self.received, self.pending):
            raise_quietly(KeyboardInterrupt())
        self._note(number)

    def notice(self) -> None:
        """Preempts the run as a signal would. Safe to call from any thread."""
        self._note(NOTICE)

    def leave(self) -> None:
        """Ends the run after this window, and the process with exit code 0. All ranks call it in the same window."""
        if self.received is None:
            self.received = LEAVE

    def _note(self, number: int) -> None:
        self.came_at = time.monotonic() if self.came_at is None else self.came_at
        if self._has_ranks:
            self.pending = number if self.pending is None else self.pending
        elif self.received is None:
            self.received = number

    def pending_here(self) -> tuple[bool, ...]:
        """Returns one flag for each of `kinds`: True for the pending signal of this rank."""
        pending = self.pending
        return self._none if pending is None else tuple(kind == pending for kind in self.kinds)

    def agree(self, came: Sequence[bool]) -> None:
        """Marks the first signal that any rank received as received.

        Args:
            came: the flags of `pending_here`, combined over all ranks.
        """
        if self.received is None and any(came):
            self.received = self.kinds[list(came).index(True)]

    @property
    def preempted(self) -> bool:
        """True if the run is preempted: it ends to free its machine, and expects to be restarted."""
        return self.received in self._preempting

    @property
    def preempting(self) -> int | None:
        """The signal that preempts the run, even if other ranks do not know of it yet; None without one."""
        first = self.pending if self.received is None else self.received
        return first if first in self._preempting else None

    @property
    def name(self) -> str:
        """The name of the received signal, for messages."""
        if self.received in list(signal.Signals):
            return signal.Signals(self.received).name
        return "should_preempt" if self.received == NOTICE else f"signal {self.received}"

    def exception(self) -> BaseException | None:
        """Returns the exception to raise after a signal has shut down the run cleanly; None without a signal."""
        if self.received == signal.SIGINT:
            self.interruption = KeyboardInterrupt()
        elif self.received is not None:
            status = self._exit_code if self.preempted else 128 + self.received
            self.interruption = SystemExit(0 if self.received == LEAVE else status)
        return self.interruption
