"""EpochTable: the table that a notebook shows beside the progress bar, with a row for each epoch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from leyden.callbacks.bars.progress_bar import format_number
from leyden.core.text import aligned, html_table

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

UPDATE_SECONDS = 0.5
"""Least time between two updates of the table. The last row of a fit comes at its end."""


class EpochTable:
    """A table of a fit's epochs: their metrics and times. One display of the notebook holds it, updated in place."""

    def __init__(self) -> None:
        self._rows: list[dict[str, str]] = []
        self._names: dict[str, None] = {}
        """The metrics shown so far, in their order."""
        self._validated: set[str] = set()
        """The metrics that validations log."""
        self._before_pass: set[str] = set()
        self._passes = 0
        """Validation passes up to the last row."""
        self._start = time.perf_counter()
        self._due = 0.0
        self._handle: Any = None
        self._is_shown = True

    def begin_epoch(self) -> None:
        """Starts the time of an epoch."""
        self._start = time.perf_counter()

    def begin_validation(self, trainer: Trainer) -> None:
        self._before_pass = set(trainer.callback_metrics)

    def end_validation(self, trainer: Trainer) -> None:
        """Notes the metrics of a validation; one before the first step has a row of its own."""
        self._validated |= trainer.callback_metrics.keys() - self._before_pass
        if not trainer.progress.batches:
            self._add("start", trainer)

    def end_epoch(self, trainer: Trainer) -> None:
        self._add(str(trainer.current_epoch), trainer)
        self._passes = trainer.progress.validations

    def end(self) -> None:
        """Shows rows that are not shown yet."""
        if not self._is_shown:
            self._show()

    def _add(self, name: str, trainer: Trainer) -> None:
        values = trainer.callback_metrics
        # A value that is logged by step and by epoch has three names.
        by_epoch = {metric.removesuffix("_epoch") for metric in values if metric.endswith("_epoch")}
        hidden = by_epoch | {f"{metric}_step" for metric in by_epoch}
        if trainer.progress.batches and trainer.progress.validations == self._passes:
            # Those of an earlier epoch's validation.
            hidden |= self._validated
        numbers = trainer.read_metrics({metric: value for metric, value in values.items() if metric not in hidden})
        now = time.perf_counter()
        minutes, seconds = divmod(round(now - self._start), 60)
        self._names |= dict.fromkeys(numbers)
        texts = {metric: format_number(number) for metric, number in numbers.items()}
        self._rows.append({**texts, "epoch": name, "time": f"{minutes}:{seconds:02d}"})
        self._start, self._is_shown = now, False
        if now >= self._due:
            self._show()
            self._due = now + UPDATE_SECONDS

    def _show(self) -> None:
        from IPython.display import display

        columns = ["epoch", *self._names, "time"]
        cells = [columns, *([row.get(column, "") for column in columns] for row in self._rows)]
        text = "\n".join(aligned(cells, right=range(1, len(columns))))
        data = {"text/plain": text, "text/html": html_table(cells)}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._is_shown = True
