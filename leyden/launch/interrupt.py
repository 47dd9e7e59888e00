"""KeyboardInterrupts that end a run on the user's wish: the run has printed how it ended, so no traceback follows."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn

from leyden.launch.leaving import INTERRUPTED, note_exit


def raise_quietly(error: BaseException) -> NoReturn:
    """Raises an error. If it is a KeyboardInterrupt that no code catches, the process ends without a traceback.

    Its exit status stays that of an interrupted Python process. A note tells the agent, which may see another rank end
    first: one that this rank has left.
    """
    if isinstance(error, KeyboardInterrupt):
        note_exit(INTERRUPTED)
    _Quiet.install()
    raise error


def is_quiet(error: BaseException | None) -> bool:
    """Returns True for a KeyboardInterrupt that `raise_quietly` has raised.

    Example:
        >>> is_quiet(KeyboardInterrupt()), is_quiet(None)
        (False, False)
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # Known from its traceback: a record of the error would keep the run that it ended in memory.
    return trace is not None and trace.tb_frame.f_code is raise_quietly.__code__


def were_interrupted(failures: Iterable[Any]) -> bool:
    """Returns True if Ctrl-C has ended a rank. The others then end by it too, or because that rank has gone."""
    return any(failure.exitcode == -signal.SIGINT for failure in failures)


class _Quiet:
    """An excepthook that passes on all errors but the quiet ones."""

    def __init__(self) -> None:
        self._hook = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not is_quiet(error):
            self._hook(kind, error, trace)

    @classmethod
    def install(cls) -> None:
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls()
