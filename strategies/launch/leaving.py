"""Exit statuses with which ranks end in order: a rank notes its own, and the agent that started it exits with it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set by the agent: where a rank writes its error, in a folder of its own."""
NAME = "left-with"
"""The file beside it that holds the exit status."""


def note_exit(code: int) -> None:
    """Notes the exit status with which this rank is about to leave; without an agent it does nothing."""
    note = _note()
    if note is not None:
        with contextlib.suppress(OSError):
            note.write_text(str(code))


def has_noted_exit() -> bool:
    """True if this rank has noted its exit status."""
    note = _note()
    return note is not None and note.is_file()


def _note() -> Path | None:
    path = os.environ.get(ERROR_FILE)
    return Path(path).with_name(NAME) if path else None


class ExitNotes:
    """The notes of the ranks that an agent is about to start.

    Args:
        folder: the agent's folder of logs, in which each rank of each attempt has one. Those of earlier launches are
            passed over.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._earlier = set(self._notes())

    def code(self) -> int | None:
        """The exit status that a rank has noted; None if none has."""
        for note in self._notes():
            if note not in self._earlier:
                with contextlib.suppress(OSError, ValueError):
                    return int(note.read_text())
        return None

    def _notes(self) -> list[Path]:
        return sorted(self._folder.glob(f"*/attempt_*/*/{NAME}"))
