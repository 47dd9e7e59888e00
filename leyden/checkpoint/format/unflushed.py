"""Files that are written but not yet on disk, which are flushed together."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

_THREADS = 8
# Descriptors to keep open at most.
_MAX_OPEN = 128


class Unflushed:
    """Keeps written files open until they are flushed together.

    The disk works on one file while the next is being written. Concurrent fsyncs share the file system's journal, so a
    dozen small files take as long as one. The files stay open because only the descriptor that wrote a file is certain
    to report the disk's errors.
    """

    def __init__(self) -> None:
        self._files: list[tuple[str, BinaryIO]] = []

    def add(self, name: str, file: BinaryIO) -> None:
        """Takes over an open file whose bytes have all been passed to the system. Errors have its name."""
        self._files.append((name, file))
        if len(self._files) >= _MAX_OPEN:
            self.flush()

    def flush(self) -> None:
        """Flushes all files to disk and closes them.

        Raises:
            OSError: the error of the first file that fails, with the file's name as `filename`.
        """
        files, self._files = self._files, []
        if not files:
            return
        try:
            with ThreadPoolExecutor(min(_THREADS, len(files))) as pool:
                # Every file is flushed and closed, even if another one fails; pool.map would cancel the rest.
                results = [pool.submit(_flush, named) for named in files]
        except RuntimeError:
            # The script has ended while a last save is running, and Python no longer starts threads.
            for named in files:
                if not named[1].closed:
                    _flush(named)
            return
        for result in results:
            result.result()

    def close(self) -> None:
        """Closes all files without flushing them."""
        files, self._files = self._files, []
        for _, file in files:
            file.close()


def _flush(named: tuple[str, BinaryIO]) -> None:
    name, file = named
    try:
        with file:
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from error
