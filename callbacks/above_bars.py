"""Keeps printed text above progress bars: a bar on the screen is cleared while something prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any


class AboveBars:
    """Replaces a terminal's `sys.stdout`, so that `print` and bars do not break each other.

    Args:
        stream: the terminal's stream, which handles everything else.
        bars: returns the bars that are on the screen now.
    """

    def __init__(self, stream: Any, bars: Callable[[], Sequence[Any]]) -> None:
        self._stream = stream
        self._bars = bars
        self._within_line = False

    def write(self, text: str) -> int:
        """Writes text above the bars, which are redrawn once its line has ended."""
        if not text:
            return 0
        bars = self._bars()
        if not self._within_line:
            for bar in bars:
                bar.clear()
        written: int = self._stream.write(text)
        self._within_line = not text.endswith("\n")
        if not self._within_line:
            self._stream.flush()
            for bar in bars:
                bar.refresh()
        return written

    def writelines(self, lines: Sequence[str]) -> None:
        """Writes each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def begin(bars: Callable[[], Sequence[Any]]) -> AboveBars | None:
    """Replaces `sys.stdout` by an `AboveBars` if it is a terminal; returns None if it is not."""
    stdout = sys.stdout
    if stdout is None or isinstance(stdout, AboveBars) or not stdout.isatty():
        return None
    placed = AboveBars(stdout, bars)
    sys.stdout = placed  # type: ignore[assignment]
    return placed


def end(placed: AboveBars | None) -> None:
    """Restores the stream, unless something else has replaced `sys.stdout` since."""
    if placed is not None and sys.stdout is placed:  # type: ignore[comparison-overlap]
        sys.stdout = placed._stream
