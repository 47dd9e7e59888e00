"""Signals of a run: the handler only sets a flag, which the loops check between batches."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Sequence
from types import FrameType, TracebackType
from typing import Any

NOTICE = 0
"""Stands where the number of a signal stands, for a notice that came in another way. No signal has it."""
LEAVE = -1
"""The same for a run that ends itself and its process."""


class Signals:
    """Catches the signals that end or preempt a run, while it lasts. The second SIGINT raises KeyboardInterrupt.

    Python allows handlers in the main thread only: in another one nothing is caught, and a run ends as its thread does.
    Where there are several ranks, a signal to one of them is pending until all have agreed on it
    (trainer/loops/agreement.py).

    Args:
        preempting: signals that preempt the run; see `Preemption`.
        exit_code: the exit status of a run that is preempted.
        ending: signals that end the run in order, and do not preempt it.
    """

    def __init__(
        self,
        preempting: Collection[int] = (),
        exit_code: int = 0,
        ending: Collection[int] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self.received: int | None = None
        """The first signal that came, or None."""
        self.pending: int | None = None
        """The first one that came to this rank of several."""
        self.came_at: float | None = None
        """When the first one came to this rank, on the clock of `time.monotonic`."""
        self.kinds = tuple(dict.fromkeys((*ending, *preempting, NOTICE)))
        """What may come, the same on all ranks; of several that come at once the first counts."""
        self._none = (False,) * len(self.kinds)
        self._preempting, self._exit_code = frozenset((*preempting, NOTICE)), exit_code
        self._has_ranks = False
        self.interruption: BaseException | None = None
        """What is raised for it when the run has ended in order."""
        self._previous: dict[int, Any] = {}
        self._pid = 0
        self._is_given_up = False

    def caught_on(self, ranks: int) -> Signals:
        """This object, as the context of a run on so many ranks."""
        self._has_ranks = ranks > 1
        return self

    def __enter__(self) -> Signals:
        self.received = self.interruption = self.pending = self.came_at = None
        # Of the run, not of this object's maker: a rank may have been forked since.
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in self.kinds:
                if number != NOTICE:
                    self._previous[number] = signal.getsignal(number)
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
        late, self.pending = self.pending, None
        if late is not None and late != NOTICE and self.received is None and kind is None:
            # Too late for the ranks to agree on it: it does now what it would have done without us.
            os.kill(os.getpid(), late)

    def give_up(self) -> None:
        """Nobody asks for signals any more: the next one does what it would have done without this object.

        Any thread may call it, and its handler may be another one's previous one.
        """
        self._is_given_up = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_given_up:
            before = self._previous.get(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), number)
            return
        if os.getpid() != self._pid:
            # A forked worker of a loader inherits the handler. A terminal sends Ctrl-C to it as well, and the run that
            # is to end in order still needs its batches; any other signal ends it, as it would without us.
            if number == signal.SIGINT:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and signal.SIGINT in (self.received, self.pending):
            raise KeyboardInterrupt
        self._note(number)

    def notice(self) -> None:
        """Preempts the run as a signal would, from any thread."""
        self._note(NOTICE)

    def leave(self) -> None:
        """Ends the run after this window, and the process with exit code 0; all ranks call it in the same window."""
        if self.received is None:
            self.received = LEAVE

    def _note(self, number: int) -> None:
        self.came_at = time.monotonic() if self.came_at is None else self.came_at
        if self._has_ranks:
            self.pending = number if self.pending is None else self.pending
        elif self.received is None:
            self.received = number

    def pending_here(self) -> tuple[bool, ...]:
        """Which of `kinds` came to this rank and is still to be agreed on."""
        pending = self.pending
        return self._none if pending is None else tuple(kind == pending for kind in self.kinds)

    def agree(self, came: Sequence[bool]) -> None:
        """Receives the signals that came to any rank, by the `pending_here` of all of them."""
        if self.received is None and any(came):
            self.received = self.kinds[list(came).index(True)]

    @property
    def preempted(self) -> bool:
        """True if the run ends to make room, and asks to be started again."""
        return self.received in self._preempting

    @property
    def preempting(self) -> int | None:
        """The signal that preempts the run, even if the other ranks do not know of it yet; None without one."""
        first = self.pending if self.received is None else self.received
        return first if first in self._preempting else None

    @property
    def name(self) -> str:
        """The signal that was received, in words."""
        if self.received in list(signal.Signals):
            return signal.Signals(self.received).name
        return "should_preempt" if self.received == NOTICE else f"signal {self.received}"

    def exception(self) -> BaseException | None:
        """What a run that was asked to stop raises when it has ended in order."""
        if self.received == signal.SIGINT:
            self.interruption = KeyboardInterrupt()
        elif self.received is not None:
            status = self._exit_code if self.preempted else 128 + self.received
            self.interruption = SystemExit(0 if self.received == LEAVE else status)
        return self.interruption
