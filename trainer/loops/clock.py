"""The training time of a fit across all its resumes, for `max_time` and for validation intervals in time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyden.trainer.events.progress import Progress


class Clock:
    """The training time of a fit. Checkpoints store it as `progress.seconds`, and a resume continues from there.

    Args:
        progress: stores the training time.
        limit: seconds of training after which the fit ends; None for no limit.
        interval: seconds between two validations; None if validations are not scheduled by time.
    """

    def __init__(self, progress: Progress, limit: float | None, interval: float | None) -> None:
        self._progress, self._limit, self._interval = progress, limit, interval
        self.start()

    def start(self) -> None:
        """Starts the clock; earlier time counts as setup."""
        self._last_update = time.perf_counter()

    def update(self) -> None:
        """Updates `progress.seconds`."""
        now = time.perf_counter()
        self._progress.add_time(now - self._last_update)
        self._last_update = now

    def elapsed(self) -> float:
        """Returns the seconds of training so far."""
        return self._progress.seconds + time.perf_counter() - self._last_update

    def time_is_up(self) -> bool:
        """True if training has reached `max_time`."""
        return self._limit is not None and self.elapsed() >= self._limit

    @property
    def schedules_validation(self) -> bool:
        """True if validations are scheduled by time."""
        return self._interval is not None

    def validation_is_due(self) -> bool:
        """True if a validation by time (`val_check_interval="00:01:00:00"`) is due."""
        if self._interval is None:
            return False
        return self.elapsed() - self._progress.seconds_at_validation >= self._interval
