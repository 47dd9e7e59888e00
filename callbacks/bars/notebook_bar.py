"""A tqdm bar that is a text in a notebook's output, so that a saved notebook shows how it ended."""

from __future__ import annotations

from functools import cache
from io import StringIO
from typing import Any


@cache
def notebook_bar() -> type[Any]:
    """The class of the bar, which tqdm is imported for.

    tqdm's own needs ipywidgets. Without them it writes lines that go up one line, which a notebook repeats; with them,
    each bar that is removed leaves an empty widget, and a saved notebook shows each at 0 %.
    """
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class NotebookBar(tqdm):  # type: ignore[misc, unused-ignore]
        """One display, which is drawn again in its place.

        Args:
            *args: of tqdm.
            free: displays that earlier bars have emptied; the bar takes the last one.
            is_reused: it returns its display when it is closed and left empty.
            **options: of tqdm.
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
            """Nothing: what is printed appears below."""

    return NotebookBar


def _new_display() -> Any:
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

    return display({"text/plain": ""}, raw=True, display_id=True)
