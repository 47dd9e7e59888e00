"""`trainer.history`: the table of a fit's epoch values, and the rows that it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from leyden.core.errors import MissingExtraError
from leyden.core.saved_state import SavedState
from leyden.core.text import aligned, html_table
from leyden.trainer.logging.values import Value, read_back

FILE = "history"
"""The file of the rows in a checkpoint."""
PLACE = ("epoch", "step")
"""The first columns: the epoch, and the number of optimizer steps done."""
MOST_UNREAD = 100
"""Rows whose values may stay on the device, where each takes 512 bytes, before they are read back in one transfer."""


class History(list[dict[str, Any]]):
    """A table of epoch values: a list with a dict for each row, which prints aligned and is a table in a notebook.

    A row has "epoch", "step", and the values by the names that loggers get.

    Example:
        >>> history = History([{"epoch": 0, "step": 32, "train_loss": 0.7}])
        >>> history.append({"epoch": 1, "step": 64, "train_loss": 0.5, "val_loss": 0.625})
        >>> history[-1]["val_loss"]
        0.625
        >>> history
        epoch  step  train_loss  val_loss
            0    32         0.7
            1    64         0.5     0.625
        >>> min(history, key=lambda row: row["train_loss"])["epoch"]
        1
    """

    def frame(self) -> Any:
        """Returns the table as a pandas DataFrame, with NaN where a row lacks a value.

        Raises:
            MissingExtraError: if pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise MissingExtraError("pandas", None, "trainer.history.frame()") from error
        return DataFrame(list(self), columns=self._columns())

    def __repr__(self) -> str:
        return "\n".join(aligned(self._cells(), right=range(len(self._columns())))) if self else "[]"

    def _repr_html_(self) -> str:
        return html_table(self._cells())

    def _columns(self) -> list[str]:
        return list(dict.fromkeys([*PLACE, *(name for row in self for name in row)]))

    def _cells(self) -> list[list[str]]:
        columns = self._columns()
        return [columns, *([_text(row.get(column, "")) for column in columns] for row in self)]


class EpochRows:
    """The rows of `trainer.history`. Values stay on their devices until somebody reads them.

    Every rank keeps the rows: epoch values are reduced over the ranks, so a decision that is based on them is the same
    everywhere. A checkpoint holds those of rank 0.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._unread = 0
        """Rows added since the last read-back."""
        self._to_continue: list[dict[str, Any]] | None = None
        """At the end of an epoch that a limit interrupted: the rows from before it, which a resume continues."""

    def add(self, epoch: int, step: int, values: Mapping[str, Value]) -> None:
        """Adds the values of an epoch or a validation, to the last row if that has the same epoch and step.

        "epoch" and "step" are those of the run, whatever was logged under these names.
        """
        place = {"epoch": epoch, "step": step}
        own = {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in values.items()
            if name not in PLACE and not (isinstance(value, Tensor) and value.is_meta)
        }
        if not own:
            return
        before = self._rows.pop() if self._rows and place.items() <= self._rows[-1].items() else {}
        # An epoch's values precede those of its last validation, which came first.
        self._rows.append({**place, **own, **before, **own})
        self._unread += 1
        if self._unread == MOST_UNREAD:
            self._read(self._rows)

    def table(self) -> History:
        """Returns the rows, with a single read-back of the values that are still on the device."""
        self._read(self._rows)
        return History(dict(row) for row in self._rows)

    def pause(self) -> None:
        """Begins the end of an epoch that a limit interrupts. The rows added from here on last until training goes on.

        An uninterrupted run would not have them.
        """
        if self._to_continue is None:
            self._to_continue = [dict(row) for row in self._rows]

    def resume(self) -> None:
        """Drops the rows added since `pause`, if it was called: training goes on."""
        if self._to_continue is not None:
            self._rows, self._to_continue = self._to_continue, None

    def go_back(self, step: int) -> None:
        """Drops the rows after the step that the run is rolled back to."""
        self._rows = [row for row in self._rows if row["step"] <= step]

    def _read(self, rows: list[dict[str, Any]]) -> None:
        """Replaces the values that are still on the device by numbers."""
        places = [(row, name) for row in rows for name, value in row.items() if isinstance(value, Tensor)]
        numbers = read_back({place: row[name] for place, (row, name) in enumerate(places)})
        for (row, name), number in zip(places, numbers.values(), strict=True):
            row[name] = number
        self._unread = 0

    # resume -----------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Returns the rows; an empty dict if there are none."""
        parts = {"rows": self._rows, "to_continue": self._to_continue}
        found = {name: rows for name, rows in parts.items() if rows is not None}
        for rows in found.values():
            self._read(rows)
        return found if self._rows else {}

    def check_state_dict(self, state: Any) -> None:
        saved = SavedState(state)
        for part in ("rows", "to_continue"):
            for number, row in enumerate(saved.items(part, ())):
                values = SavedState(row, f"{part}[{number}]")
                for name in dict.fromkeys([*PLACE, *values.entries]):
                    if name in PLACE:
                        values.integer(name, least=0)
                    else:
                        values.number(name)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows, self._to_continue = state.get("rows", []), state.get("to_continue")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
