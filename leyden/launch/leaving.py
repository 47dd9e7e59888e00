"""How a rank leaves: with an exit code that its agent passes on, and without a traceback after Ctrl-C.

A rank that exits cleanly notes its code in a file, and its agent exits with the same code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set by the agent: path of the rank's error file, in a folder of its own."""
INTERRUPTED = 128 + signal.SIGINT
"""The code of a run that Ctrl-C ended."""
NAME = "left-with"
"""Name of the file next to it that holds the exit code."""
HERE = "here"
"""Follows the code if what ended the run came to the rank itself."""


def note_exit(code: int, came_here: bool = False) -> None:
    """Notes the code that this rank is about to exit with. A no-op without an agent.

    `came_here` is True if what ends the run came to this rank, and not to a rank elsewhere.
    """
    note = _note()
    if note is not None:
        with contextlib.suppress(OSError):
            note.write_text(f"{code} {HERE}" if came_here else str(code))


def has_noted_exit() -> bool:
    """Returns True if this rank has noted its exit code."""
    note = _note()
    return note is not None and note.is_file()


def _note() -> Path | None:
    path = os.environ.get(ERROR_FILE)
    return Path(path).with_name(NAME) if path else None


class ExitNotes:
    """Reads the exit codes that an agent's ranks have noted.

    Args:
        folder: the agent's log folder, with a subfolder for each rank of each attempt. Notes that already exist are
            ignored; they belong to earlier launches.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._earlier = set(self._notes())

    def code(self) -> int | None:
        """Returns the exit code that a rank has noted, or None."""
        return next((int(text.split()[0]) for text in self._texts()), None)

    def came_here(self) -> bool:
        """Returns True if what ended the run came to a rank of this agent."""
        return any(text.endswith(HERE) for text in self._texts())

    def forget(self) -> None:
        """Deletes the notes of earlier ranks, before others start."""
        for note in set(self._notes()) - self._earlier:
            note.unlink(missing_ok=True)

    def _texts(self) -> Iterator[str]:
        for note in self._notes():
            if note not in self._earlier:
                with contextlib.suppress(OSError):
                    text = note.read_text()
                    if text[:1].isdigit():
                        yield text

    def _notes(self) -> list[Path]:
        return sorted(self._folder.glob(f"*/attempt_*/*/{NAME}"))


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
