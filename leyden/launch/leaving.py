"""Exit codes of ranks that exit cleanly: a rank notes its code in a file, and its agent exits with the same code."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set by the agent: path of the rank's error file, in a folder of its own."""
INTERRUPTED = 128 + signal.SIGINT
"""The code of a run that Ctrl-C ended."""
NAME = "left-with"
"""Name of the file next to it that holds the exit code."""


def note_exit(code: int) -> None:
    """Notes the code that this rank is about to exit with. A no-op without an agent."""
    note = _note()
    if note is not None:
        with contextlib.suppress(OSError):
            note.write_text(str(code))


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
        for note in self._notes():
            if note not in self._earlier:
                with contextlib.suppress(OSError, ValueError):
                    return int(note.read_text())
        return None

    def _notes(self) -> list[Path]:
        return sorted(self._folder.glob(f"*/attempt_*/*/{NAME}"))
