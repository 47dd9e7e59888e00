"""Keeps printed and logged text above progress bars: a bar on the screen is cleared while something writes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

STREAMS = ("stdout", "stderr")


class Lines:
    """Stands in for a terminal's stream while there are bars on it, and passes on what is written by the line.

    The rest of a line waits for its end, or for a `flush`, as on a terminal itself.

    Args:
        stream: the terminal's stream, which handles everything else.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._rest = ""
        self._is_over = False

    def write(self, text: str) -> int:
        """Writes text above the bars as soon as its line has ended."""
        if self._is_over:
            written: int = self._stream.write(text)
            return written
        lines, end, self._rest = (self._rest + text).rpartition("\n")
        if end:
            self._write_lines(lines + end)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Writes each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Shows the line that has not ended yet: a prompt, or dots."""
        if self._rest and not self._is_over:
            self._write_rest()
        self._stream.flush()

    def end(self) -> None:
        """Writes what is left. Code that has kept this stream writes to the terminal's own from here on."""
        if not self._is_over:
            self._end()
        self._is_over = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    # where it appears
    def _write_lines(self, text: str) -> None:
        """Writes lines that have ended."""
        raise NotImplementedError

    def _write_rest(self) -> None:
        """Shows the line that has not."""
        raise NotImplementedError

    def _end(self) -> None:
        """Writes that line once no more comes."""
        raise NotImplementedError


class AboveBars(Lines):
    """Clears tqdm's bars while text is written, and draws them again below it.

    Args:
        stream: the terminal's stream.
        bars: returns the bars that are on the screen now.
    """

    def __init__(self, stream: Any, bars: Callable[[], Sequence[Any]]) -> None:
        super().__init__(stream)
        self._bars = bars
        self._column: int | None = None
        """Where the line above the bars goes on; None if it has ended."""

    def _write_lines(self, text: str) -> None:
        self._write(text, None)

    def _write_rest(self) -> None:
        text, self._rest = self._rest, ""
        # Another bar, which goes back to where it was by itself.
        moves_up = "\x1b[A" in text
        if moves_up or not self._bars():
            self._write(text, None)
        else:
            self._write(text + "\n", self._column_after(text))

    def _write(self, text: str, column: int | None) -> None:
        bars = self._bars()
        for bar in bars:
            bar.clear()
        if self._column is not None:
            self._stream.write("\x1b[A" + (f"\x1b[{self._column}C" if self._column else ""))
        self._column = column
        self._stream.write(text)
        self._stream.flush()
        for bar in bars:
            bar.refresh()

    def _column_after(self, text: str) -> int | None:
        from tqdm.utils import disp_len  # type: ignore[import-untyped, unused-ignore]

        before = 0 if "\r" in text or self._column is None else self._column
        width = before + disp_len(text.rpartition("\r")[2].expandtabs())
        try:
            column = width % os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ZeroDivisionError):
            return None
        # A full line goes on in the next one.
        return None if width and not column else column

    def _end(self) -> None:
        self._stream.write(self._rest)
        self._stream.flush()


class ReplacedStreams:
    """Replaces `sys.stdout` and `sys.stderr`, and the streams that handlers of `logging` write to.

    Args:
        places: for "stdout" or "stderr" the stream that belongs there, and what replaces it.
    """

    def __init__(self, places: Mapping[str, tuple[Any, Lines]]) -> None:
        self._places = places
        self._handlers: list[logging.StreamHandler[Any]] = []
        for name, (_, new) in places.items():
            setattr(sys, name, new)
        for handler in _stream_handlers():
            for old, new in places.values():
                if handler.stream is old:
                    handler.setStream(new)
                    self._handlers.append(handler)
                    break

    def end(self) -> None:
        """Restores the streams, except where something else has replaced them since."""
        for name, (old, new) in self._places.items():
            new.end()
            if getattr(sys, name) is new:
                setattr(sys, name, old)
        # With those that were made meanwhile, by `logging.basicConfig` within a step.
        for handler in [*self._handlers, *_stream_handlers()]:
            for old, new in self._places.values():
                if handler.stream is new:
                    handler.setStream(old)
                    break

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Restores `sys.stdout` and `sys.stderr` within the block: a bar made there draws on the terminal itself."""
        placed = {name: (old, new) for name, (old, new) in self._places.items() if getattr(sys, name) is new}
        for name, (old, _) in placed.items():
            setattr(sys, name, old)
        try:
            yield
        finally:
            for name, (_, new) in placed.items():
                setattr(sys, name, new)


def begin(bars: Callable[[], Sequence[Any]]) -> ReplacedStreams:
    """Makes everything that is written to a terminal appear above the bars, until `ReplacedStreams.end`."""
    streams = {name: getattr(sys, name) for name in STREAMS}
    return ReplacedStreams(
        {
            name: (stream, AboveBars(stream, bars))
            for name, stream in streams.items()
            if stream is not None and not isinstance(stream, Lines) and stream.isatty()
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
