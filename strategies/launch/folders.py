"""Temporary folders of launchers, which are cleared even if their launcher was killed: by the next one on this host."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leyden.strategies.launch.processes import place, runs, started


@contextmanager
def temporary(kind: str) -> Iterator[Path]:
    """A folder of this process that lasts as long as the block. Those that killed processes have left are deleted.

    Args:
        kind: part of its name.
    """
    clear()
    owner = f"{place()}-{os.getpid()}-{started(os.getpid())}"
    with tempfile.TemporaryDirectory(prefix=f"leyden-{kind}-{owner}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def clear() -> None:
    """Deletes the temporary folders of processes of this host that are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"leyden-*-{place()}-*"):
        process, start = path.name.split("-")[-3:-1]
        if process.isdigit() and not runs(int(process), start):
            shutil.rmtree(path, ignore_errors=True)
