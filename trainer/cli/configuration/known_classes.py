"""Imports Leyden's own classes, so that a configuration may call them by their names alone."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

ROOMS = ("leyden.callbacks", "leyden.strategies", "leyden.trainer", "leyden.trainer.profilers")
SLOW = ("FSDPStrategy", "MeshStrategy", "ModelParallelStrategy")
"""These import parts of torch that take half a second each."""
LARGE = 1_000_000
"""Bytes; such a file is data, and no configuration."""
FILES = re.compile(r"[^\s\"'=,\[\]{}]+\.(?:ya?ml|json)\b")


def import_own(words: Iterable[str], variables: str = "LEYDEN") -> None:
    """Imports every callback, strategy and profiler. jsonargparse finds a class by its name only once it exists.

    Args:
        words: the command line. Slow classes are imported only if it, a file that it names, or a variable mentions
            them.
        variables: how the names of environment variables begin.
    """
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            if name not in SLOW:
                getattr(module, name)
    for text in (*words, *(value for name, value in os.environ.items() if name.startswith(variables))):
        import_slow(text)


def import_slow(text: str, folder: Path | None = None, depth: int = 4) -> None:
    """Imports the slow classes that a text mentions, or a file that it names.

    Args:
        text: a word of the command line, or a file's content.
        folder: of that file. By default the current one.
        depth: of files that name files.
    """
    strategies = importlib.import_module("leyden.strategies")
    for name in SLOW:
        if name in text:
            getattr(strategies, name)
    for path in FILES.findall(text) if depth else ():
        file = (folder or Path()) / Path(path).expanduser()
        with contextlib.suppress(OSError, ValueError):
            if file.stat().st_size < LARGE:
                import_slow(file.read_text(encoding="utf-8"), file.parent, depth - 1)
