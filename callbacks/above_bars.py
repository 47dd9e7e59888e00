"""Keeps printed and logged text above progress bars: a bar on the screen is cleared while something writes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

STREAMS = ("stdout", "stderr")


class AboveBars:
    """Stands in for a terminal's stream, so that what is written there and bars do not break each other.

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


class Replaced:
    """Streams in the place of `sys.stdout` and `sys.stderr`, and of those that handlers of `logging` write to.

    Args:
        places: for "stdout" or "stderr" the stream that belongs there, and what replaces it.
    """

    def __init__(self, places: Mapping[str, tuple[Any, Any]]) -> None:
        self._places = places
        self._handlers: list[tuple[logging.StreamHandler[Any], Any, Any]] = []
        for name, (_, new) in places.items():
            setattr(sys, name, new)
        for handler in _stream_handlers():
            for old, new in places.values():
                if handler.stream is old:
                    handler.setStream(new)
                    self._handlers.append((handler, old, new))
                    break

    def end(self) -> None:
        """Restores the streams, except where something else has replaced them since."""
        for name, (old, new) in self._places.items():
            if getattr(sys, name) is new:
                setattr(sys, name, old)
        for handler, old, new in self._handlers:
            if handler.stream is new:
                handler.setStream(old)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Has `sys.stdout` and `sys.stderr` as they were: a bar that is made here draws on the terminal itself."""
        placed = {name: (old, new) for name, (old, new) in self._places.items() if getattr(sys, name) is new}
        for name, (old, _) in placed.items():
            setattr(sys, name, old)
        try:
            yield
        finally:
            for name, (_, new) in placed.items():
                setattr(sys, name, new)


def begin(bars: Callable[[], Sequence[Any]]) -> Replaced:
    """Has everything that is written to a terminal appear above the bars, until `Replaced.end`."""
    streams = {name: getattr(sys, name) for name in STREAMS}
    return Replaced(
        {
            name: (stream, AboveBars(stream, bars))
            for name, stream in streams.items()
            if stream is not None and not isinstance(stream, AboveBars) and stream.isatty()
        }
    )


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yields the handlers of all loggers that write to a stream of their own."""
    loggers = [logging.root, *(item for item in logging.root.manager.loggerDict.values())]
    handlers = {id(item): item for logger in loggers for item in getattr(logger, "handlers", ())}
    for handler in handlers.values():
        # One without a stream of its own looks `sys.stderr` up.
        if isinstance(handler, logging.StreamHandler) and "stream" in vars(handler):
            yield handler
