"""Printed text stands above a bar: while one is on the screen, it steps aside for what anybody prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any


class AboveBars:
    """Takes the place of a terminal's `sys.stdout`, so that `print` and a bar leave each other whole. All else goes to the stream itself.

    Args:
        stream: the terminal's.
        bars: returns the bars that are on the screen now.
    """

    def __init__(self, stream: Any, bars: Callable[[], Sequence[Any]]) -> None:
        self._stream = stream
        self._bars = bars
        self._within_line = False

    def write(self, text: str) -> int:
        """Writes a text above the bars; they come back once its line has ended."""
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
        """Writes each of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def begin(bars: Callable[[], Sequence[Any]]) -> AboveBars | None:
    """Puts it in place where `print` goes to a terminal; None where it does not, and nothing can be torn."""
    stdout = sys.stdout
    if stdout is None or isinstance(stdout, AboveBars) or not stdout.isatty():
        return None
    placed = AboveBars(stdout, bars)
    sys.stdout = placed  # type: ignore[assignment]
    return placed


def end(placed: AboveBars | None) -> None:
    """Puts the stream back, unless somebody else has put another one in its place since."""
    if placed is not None and sys.stdout is placed:  # type: ignore[comparison-overlap]
        sys.stdout = placed._stream
