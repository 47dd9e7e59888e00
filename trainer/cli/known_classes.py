"""Imports Leyden's own classes, so that a configuration may call them by their names alone."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from pathlib import Path

ROOMS = ("leyden.callbacks", "leyden.strategies", "leyden.trainer", "leyden.trainer.profilers")
SLOW = ("FSDPStrategy", "MeshStrategy", "ModelParallelStrategy")
"""These import parts of torch that take half a second each."""


def import_own(words: Iterable[str]) -> None:
    """Imports every callback, strategy and profiler. jsonargparse finds a class by its name only once it exists.

    Args:
        words: the command line. Slow classes are imported only if it, or a file that it names, mentions them.
    """
    mentioned = "".join(text for word in words for text in (word, _content(word.rpartition("=")[2])))
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            if name not in SLOW or name in mentioned:
                getattr(module, name)


def _content(path: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        file = Path(path)
        if file.suffix in (".yaml", ".yml", ".json") and file.is_file():
            return file.read_text(encoding="utf-8")
    return ""
