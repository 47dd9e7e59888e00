"""Rows of logged values on their way to the loggers: read back from the device many at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.outputs import StepOutputs
from leyden.trainer.logging.logs import Logs
from leyden.trainer.logging.values import Value, read_back

if TYPE_CHECKING:
    from leyden.callbacks.loggers.logger import Logger
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.logging.values import Nans

Row: TypeAlias = "tuple[int, Mapping[str, Value]]"
BLOCK = 100
"""Steps of an evaluation whose values wait on the device for one read-back."""


def send_rows(loggers: Sequence[Logger], rows: Sequence[Row], epoch: int, nans: Nans) -> None:
    """Sends rows, each a step with its values, to the loggers, with one read-back for all of them.

    A value that the user logged as "step" is the step itself, as in Lightning, and one logged as "epoch" replaces the
    run's own.

    Raises:
        ConfigurationError: if the value logged as "step" is no number that a step could have.
    """
    read = read_back({(place, name): value for place, (_, values) in enumerate(rows) for name, value in values.items()})
    for place, (step, values) in enumerate(rows):
        numbers = {name: read[place, name] for name in values}
        if "step" in numbers:
            step = _whole(numbers.pop("step"))
        if "epoch" not in numbers:
            numbers["epoch"] = float(epoch)
        nans.note(numbers, step)
        for logger in loggers:
            logger.log_metrics(numbers, step=step)


def _whole(x: float) -> int:
    if not math.isfinite(x):
        raise ConfigurationError(f"self.log('step', {x}): loggers take it as the step, so log a finite number.")
    return int(x)


class StepRows:
    """What an evaluation logs by step: a row for every batch, kept on the device and sent a block at a time.

    Args:
        loggers: those that are sent the rows; none on a rank that only has values for another.
        logs: has the values.
        progress: knows the epoch.
        stage: "validation" or "test".
        outputs: says on which ranks steps reach their end.
    """

    def __init__(
        self, loggers: Sequence[Logger], logs: Logs, progress: Progress, stage: str, outputs: StepOutputs
    ) -> None:
        self._loggers, self._logs, self._progress, self._stage = loggers, logs, progress, stage
        self._outputs = outputs
        self._rows: list[Row] = []

    def add(self, step: int) -> None:
        """Takes the values of the current batch."""
        if self._stage not in self._logs.stepping:
            return
        values = self._logs.step_values(self._stage)
        if values:
            self._rows.append((step, values))
            if len(self._rows) == BLOCK and not self._outputs.are_in_parts:
                self.send()

    def end(self) -> None:
        """Sends the rest. Every rank of a pipeline calls it: one has all the values, and another one the loggers."""
        if self._outputs.are_in_parts:
            read: list[Row] = [(step, read_back(values)) for step, values in self._rows]
            shared = self._outputs.share(read)
            self._rows = shared if self._loggers else []
        self.send()

    def send(self) -> None:
        """Sends the rows kept so far."""
        rows, self._rows = self._rows, []
        if rows:
            send_rows(self._loggers, rows, self._progress.epoch, self._logs.nans)
