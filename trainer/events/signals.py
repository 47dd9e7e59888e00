"""Signals of a run: the handler only sets a flag, which the loops check between batches."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """Catches SIGINT and SIGTERM while a run lasts. The second SIGINT raises KeyboardInterrupt at once.

    Python allows handlers in the main thread only: in another one nothing is caught, and a run ends as its thread does.
    Where there are several ranks, a signal to one of them is pending until all have agreed on it
    (trainer/loops/agreement.py).
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The first signal that came, or None."""
        self.pending: int | None = None
        """The first one that came to this rank of several."""
        self._has_ranks = False
        self.interruption: BaseException | None = None
        """What is raised for it when the run has ended in order."""
        self._previous: dict[int, Any] = {}
        self._pid = 0

    def caught_on(self, ranks: int) -> Signals:
        """This object, as the context of a run on so many ranks."""
        self._has_ranks = ranks > 1
        return self

    def __enter__(self) -> Signals:
        self.received = self.interruption = self.pending = None
        # Of the run, not of this object's maker: a rank may have been forked since.
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
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
        if late is not None and self.received is None and kind is None:
            # Too late for the ranks to agree on it: it does now what it would have done without us.
            os.kill(os.getpid(), late)

    def _handle(self, number: int, frame: FrameType | None) -> None:
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
        if self._has_ranks:
            self.pending = number if self.pending is None else self.pending
        elif self.received is None:
            self.received = number

    def pending_here(self) -> tuple[bool, bool]:
        """Whether SIGINT, and whether SIGTERM, came to this rank and is still to be agreed on."""
        return self.pending == signal.SIGINT, self.pending == signal.SIGTERM

    def agree(self, interrupted: bool, terminated: bool) -> None:
        """Receives what came to any rank, by the `pending_here` of all: it has come to every one of them."""
        if self.received is None and (interrupted or terminated):
            self.received = signal.SIGINT if interrupted else signal.SIGTERM

    def exception(self) -> BaseException | None:
        """What a run that was asked to stop raises when it has ended in order."""
        if self.received is not None:
            self.interruption = (
                KeyboardInterrupt() if self.received == signal.SIGINT else SystemExit(128 + self.received)
            )
        return self.interruption
