"""Keeps printed and logged text above progress bars."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class AboveBars:
    """Stands in for a terminal stream while bars are on the screen, and shows its text line by line above them.

    An unfinished line is buffered until its end or a `flush`, as on a terminal. Other attributes and methods are those
    of the stream. `show` takes the stream and the text, and writes it above the bars.
    """

    def __init__(self, stream: Any, show: Callable[[Any, str], None]) -> None:
        self._stream, self._show = stream, show
        self._unfinished = ""
        """The text of the last line, while it has no newline."""
        self._column: int | None = None
        """The column at which the unfinished line above the bars continues; None if that line is complete."""
        self._has_ended = False

    def write(self, text: str) -> int:
        """Writes each line above the bars once it is complete."""
        if self._has_ended:
            written: int = self._stream.write(text)
            return written
        lines, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
        if newline:
            self._write_above(lines + newline, None)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Shows an unfinished line, such as a prompt or a row of dots."""
        if self._unfinished and not self._has_ended:
            text, self._unfinished = self._unfinished, ""
            # Text that moves the cursor up comes from another bar, which restores the cursor on its own.
            if "\x1b[A" in text:
                self._write_above(text, None)
            else:
                self._write_above(text + "\n", self._column_after(text))
        self._stream.flush()

    def end(self) -> None:
        """Writes the unfinished line. Code that kept a reference then writes straight to the terminal stream."""
        if not self._has_ended:
            self._stream.write(self._unfinished)
            self._stream.flush()
        self._has_ended = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write_above(self, text: str, column: int | None) -> None:
        if self._column is not None:
            text = "\x1b[A" + (f"\x1b[{self._column}C" if self._column else "") + text
        self._column = column
        self._show(self._stream, text)

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


class ReplacedStreams:
    """Makes all terminal output appear above the bars, until `end`.

    It replaces `sys.stdout` and `sys.stderr`, if they are terminals, and the streams of `logging` handlers, by
    AboveBars that write with `show`.
    """

    def __init__(self, show: Callable[[Any, str], None]) -> None:
        self._replaced: dict[str, tuple[Any, AboveBars]] = {}
        """The original stream and its replacement, by "stdout" or "stderr"."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            # A bar of another run, or a display of Rich, may already replace the stream.
            is_replaced = isinstance(stream, AboveBars) or hasattr(stream, "rich_proxied_file")
            if stream is not None and not is_replaced and stream.isatty():
                self._replaced[name] = (stream, AboveBars(stream, show))
        for name, (_, new) in self._replaced.items():
            setattr(sys, name, new)
        for handler in _stream_handlers():
            for old, new in self._replaced.values():
                if handler.stream is old:
                    handler.setStream(new)
                    break

    def end(self) -> None:
        """Restores the streams, except those that other code has replaced since."""
        for name, (old, new) in self._replaced.items():
            new.end()
            if getattr(sys, name) is new:
                setattr(sys, name, old)
        # Includes handlers created in the meantime, such as by `logging.basicConfig` within a step.
        for handler in _stream_handlers():
            for old, new in self._replaced.values():
                if handler.stream is new:
                    handler.setStream(old)
                    break

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restores `sys.stdout` and `sys.stderr` within the block, so that a new bar draws on the terminal itself."""
        active = {name: (old, new) for name, (old, new) in self._replaced.items() if getattr(sys, name) is new}
        for name, (old, _) in active.items():
            setattr(sys, name, old)
        try:
            yield
        finally:
            for name, (_, new) in active.items():
                setattr(sys, name, new)


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yields the `logging` handlers that hold a reference to a stream."""
    loggers = [logging.root, *(item for item in logging.root.manager.loggerDict.values())]
    handlers = {id(item): item for logger in loggers for item in getattr(logger, "handlers", ())}
    for handler in handlers.values():
        # A handler without its own stream looks up `sys.stderr` at each record.
        if isinstance(handler, logging.StreamHandler) and "stream" in vars(handler):
            yield handler
