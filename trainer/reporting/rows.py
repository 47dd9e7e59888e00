"""Sends rows of logged values to the loggers, after reading them back from the device in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from leyden.core.errors import ConfigurationError
from leyden.strategies.outputs import StepOutputs
from leyden.trainer.logging.logs import Logs
from leyden.trainer.logging.values import Value, read_back

if TYPE_CHECKING:
    from leyden.callbacks.loggers.logger import Logger
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.logging.values import Nans

Row: TypeAlias = "tuple[int, Mapping[str, Value]]"
BLOCK = 100
"""Steps of an evaluation whose values are kept on the device for one read-back."""


def send_rows(loggers: Sequence[Logger], rows: Sequence[Row], epoch: int, nans: Nans) -> None:
    """Sends rows, each a step with its values, to the loggers, with a single read-back for all of them.

    A value that the user logged as "step" overrides the step, as in Lightning. A value logged as "epoch" overrides the
    epoch.

    Raises:
        ConfigurationError: if the value logged as "step" is not finite.
    """
    read = read_back({(row, name): value for row, (_, values) in enumerate(rows) for name, value in values.items()})
    for row, (step, values) in enumerate(rows):
        numbers = {name: read[row, name] for name in values}
        if "step" in numbers:
            step = _step_of(numbers.pop("step"))
        if "epoch" not in numbers:
            numbers["epoch"] = float(epoch)
        nans.note(numbers, step)
        for logger in loggers:
            logger.log_metrics(numbers, step=step)


def _step_of(value: float) -> int:
    if not math.isfinite(value):
        raise ConfigurationError(f"self.log('step', {value}): loggers use this value as the step. Log a finite number.")
    return int(value)


class StepRows:
    """The values that an evaluation logs per step: one row per batch, kept on the device and sent in blocks.

    A rank that only provides values for another rank has no loggers.
    """

    def __init__(
        self, loggers: Sequence[Logger], logs: Logs, progress: Progress, stage: str, outputs: StepOutputs
    ) -> None:
        self._loggers, self._logs, self._progress, self._stage = loggers, logs, progress, stage
        self._outputs = outputs
        self._rows: list[Row] = []

    def add(self, step: int) -> None:
        """Adds a row with the values of the current batch."""
        if self._stage not in self._logs.stepping:
            return
        values = self._logs.step_values(self._stage)
        if values:
            self._rows.append((step, values))
            if len(self._rows) == BLOCK and not self._outputs.are_in_parts:
                self.send()

    def end(self) -> None:
        """Sends the remaining rows. A collective in a pipeline: one rank has the values, another one the loggers."""
        if self._outputs.are_in_parts:
            read: list[Row] = [(step, read_back(values)) for step, values in self._rows]
            shared = self._outputs.share(read)
            self._rows = shared if self._loggers else []
        self.send()

    def send(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            send_rows(self._loggers, rows, self._progress.epoch, self._logs.nans)
