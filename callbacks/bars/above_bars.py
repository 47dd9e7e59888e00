"""Keeps printed and logged text above progress bars, by clearing the bars while text is written."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

STREAMS = ("stdout", "stderr")


class LineBufferedStream:
    """Stands in for a terminal stream while bars are on the screen, and forwards text line by line.

    An unfinished line is buffered until its end or a `flush`, as on a terminal.

    Args:
        stream: the terminal stream. All other attributes and methods are forwarded to it.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._unfinished = ""
        """The text of the last line, while it has no newline."""
        self._has_ended = False

    def write(self, text: str) -> int:
        """Writes each line above the bars once it is complete."""
        if self._has_ended:
            written: int = self._stream.write(text)
            return written
        lines, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
        if newline:
            self._write_lines(lines + newline)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Writes several strings."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Shows an unfinished line, such as a prompt or a row of dots."""
        if self._unfinished and not self._has_ended:
            self._write_unfinished()
        self._stream.flush()

    def end(self) -> None:
        """Writes the unfinished line. Code that kept a reference then writes straight to the terminal stream."""
        if not self._has_ended:
            self._end()
        self._has_ended = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    # how a subclass shows text
    def _write_lines(self, text: str) -> None:
        """Writes complete lines."""
        raise NotImplementedError

    def _write_unfinished(self) -> None:
        """Shows the unfinished line."""
        raise NotImplementedError

    def _end(self) -> None:
        """Writes the unfinished line for the last time."""
        raise NotImplementedError


class AboveBars(LineBufferedStream):
    """Clears tqdm bars while text is written, and redraws them below it.

    Args:
        stream: the terminal stream.
        bars: a function that returns the bars on the screen.
    """

    def __init__(self, stream: Any, bars: Callable[[], Sequence[Any]]) -> None:
        super().__init__(stream)
        self._bars = bars
        self._column: int | None = None
        """The column at which the unfinished line above the bars continues; None if that line is complete."""

    def _write_lines(self, text: str) -> None:
        self._write(text, None)

    def _write_unfinished(self) -> None:
        text, self._unfinished = self._unfinished, ""
        # Text that moves the cursor up comes from another bar, which restores the cursor on its own.
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
        # After a full line, text continues on the next line.
        return None if width and not column else column

    def _end(self) -> None:
        self._stream.write(self._unfinished)
        self._stream.flush()


class ReplacedStreams:
    """Replaces `sys.stdout` and `sys.stderr`, and the streams of `logging` handlers.

    Args:
        replacements: the original stream and its replacement, by "stdout" or "stderr".
    """

    def __init__(self, replacements: Mapping[str, tuple[Any, LineBufferedStream]]) -> None:
        self._replacements = replacements
        self._handlers: list[logging.StreamHandler[Any]] = []
        for name, (_, new) in replacements.items():
            setattr(sys, name, new)
        for handler in _stream_handlers():
            for old, new in replacements.values():
                if handler.stream is old:
                    handler.setStream(new)
                    self._handlers.append(handler)
                    break

    def end(self) -> None:
        """Restores the streams, except those that other code has replaced since."""
        for name, (old, new) in self._replacements.items():
            new.end()
            if getattr(sys, name) is new:
                setattr(sys, name, old)
        # Includes handlers created in the meantime, such as by `logging.basicConfig` within a step.
        for handler in [*self._handlers, *_stream_handlers()]:
            for old, new in self._replacements.values():
                if handler.stream is new:
                    handler.setStream(old)
                    break

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restores `sys.stdout` and `sys.stderr` within the block, so that a new bar draws on the terminal itself."""
        active = {name: (old, new) for name, (old, new) in self._replacements.items() if getattr(sys, name) is new}
        for name, (old, _) in active.items():
            setattr(sys, name, old)
        try:
            yield
        finally:
            for name, (_, new) in active.items():
                setattr(sys, name, new)


def begin(bars: Callable[[], Sequence[Any]]) -> ReplacedStreams:
    """Makes all terminal output appear above the bars, until `ReplacedStreams.end`.

    Args:
        bars: a function that returns the bars on the screen.
    """
    streams = {name: getattr(sys, name) for name in STREAMS}
    return ReplacedStreams(
        {
            name: (stream, AboveBars(stream, bars))
            for name, stream in streams.items()
            if stream is not None and not isinstance(stream, LineBufferedStream) and stream.isatty()
        }
    )


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yields the `logging` handlers that hold a reference to a stream."""
    loggers = [logging.root, *(item for item in logging.root.manager.loggerDict.values())]
    handlers = {id(item): item for logger in loggers for item in getattr(logger, "handlers", ())}
    for handler in handlers.values():
        # A handler without its own stream looks up `sys.stderr` at each record.
        if isinstance(handler, logging.StreamHandler) and "stream" in vars(handler):
            yield handler
