"""Files that are written but not yet on the disk, which are flushed all at once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

_THREADS = 8
# Descriptors that may stay open.
_MOST = 128


class Unflushed:
    """Keeps written files open until they are flushed together.

    The disk works on one file while the next is written, and fsyncs at the same time share the file system's journal:
    a dozen small files take as long as one. The descriptors that wrote them are kept, since an error of the disk is
    certain to be reported only to those.
    """

    def __init__(self) -> None:
        self._files: list[tuple[str, BinaryIO]] = []

    def add(self, name: str, file: BinaryIO) -> None:
        """Takes over a file whose bytes have all been passed to the system, under the name that an error gives it."""
        self._files.append((name, file))
        if len(self._files) >= _MOST:
            self.flush()

    def flush(self) -> None:
        """Flushes all files to the disk and closes them.

        Raises:
            OSError: of the first file that fails; `filename` is its name.
        """
        files, self._files = self._files, []
        if not files:
            return
        try:
            with ThreadPoolExecutor(min(_THREADS, len(files))) as pool:
                # Each is flushed and closed whatever becomes of the others; pool.map would cancel those that wait.
                flushed = [pool.submit(_flush, named) for named in files]
        except RuntimeError:
            # The script is over while a last save goes on: Python starts no further thread.
            for named in files:
                if not named[1].closed:
                    _flush(named)
            return
        for one in flushed:
            one.result()

    def close(self) -> None:
        """Closes all files; what was not flushed is given up."""
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
