"""A tqdm bar for notebooks, drawn as text so that a saved notebook shows its final state."""

from __future__ import annotations

from functools import cache
from io import StringIO
from typing import Any


@cache
def notebook_bar() -> type[Any]:
    """Returns the bar class, importing tqdm on the first call.

    tqdm's own notebook bar needs ipywidgets. Without them, it writes cursor-up sequences that a notebook shows as
    repeated lines. With them, each removed bar leaves an empty widget, and a saved notebook shows every bar at 0 %.
    """
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class NotebookBar(tqdm):  # type: ignore[misc, unused-ignore]
        """A bar that redraws one notebook display in place.

        Args:
            *args: positional arguments for tqdm.
            free: empty displays of earlier bars; the bar takes the last one.
            is_reused: whether the bar returns its display to `free` once it is closed and empty.
            **options: keyword arguments for tqdm.
        """

        def __init__(self, *args: Any, free: list[Any], is_reused: bool, **options: Any) -> None:
            self._free, self._is_reused = free, is_reused
            self._handle: Any = None
            super().__init__(*args, file=StringIO(), **{"ascii": False, **options})

        def display(self, msg: str | None = None, pos: int | None = None, **kwargs: Any) -> None:
            text = str(self) if msg is None else msg
            if self._handle is None:
                if not text:
                    return
                self._handle = self._free.pop() if self._free else _new_display()
            self._handle.update({"text/plain": text}, raw=True)
            if not text and self._is_reused:
                self._free.append(self._handle)
                self._handle = None

        def clear(self, *args: Any, **kwargs: Any) -> None:
            """A no-op: printed text appears below the bar."""

    return NotebookBar


def _new_display() -> Any:
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

    return display({"text/plain": ""}, raw=True, display_id=True)
