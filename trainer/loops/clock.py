"""How long a fit has trained, over all its resumes: what `max_time` and validations by time go by."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer


class Clock:
    """The training time of a fit. A checkpoint holds it as `progress.seconds`, which a resume continues from.

    Args:
        trainer: has the progress and the limits.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._progress = trainer.progress
        self.start()

    def start(self) -> None:
        """Counts from now on: what came before was set-up."""
        self._noted = time.perf_counter()

    def note(self) -> None:
        """Brings `progress.seconds` up to now."""
        now = time.perf_counter()
        self._progress.add_time(now - self._noted)
        self._noted = now

    def elapsed(self) -> float:
        """Seconds of training."""
        return self._progress.seconds + time.perf_counter() - self._noted

    def time_is_up(self) -> bool:
        """True if training has taken `max_time`."""
        limit = self._trainer.max_seconds
        return limit is not None and self.elapsed() >= limit

    def validation_is_due(self) -> bool:
        """True if a validation by time (`val_check_interval="00:01:00:00"`) is due."""
        interval = self._trainer.val_check_seconds
        return interval is not None and self.elapsed() - self._progress.seconds_at_validation >= interval
