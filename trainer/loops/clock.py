"""How long a fit has trained, over all its resumes: what `max_time` and validations by time go by."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyden.trainer.events.progress import Progress


class Clock:
    """The training time of a fit. A checkpoint holds it as `progress.seconds`, which a resume continues from.

    Args:
        progress: holds the time.
        limit: seconds of training after which the fit ends; None for no end.
        interval: seconds from one validation to the next; None where time decides none.
    """

    def __init__(self, progress: Progress, limit: float | None, interval: float | None) -> None:
        self._progress, self._limit, self._interval = progress, limit, interval
        self.start()

    def start(self) -> None:
        """Starts to count: what came before was set-up."""
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
        return self._limit is not None and self.elapsed() >= self._limit

    @property
    def decides_on_validation(self) -> bool:
        """True if validations are due by time."""
        return self._interval is not None

    def validation_is_due(self) -> bool:
        """True if a validation by time (`val_check_interval="00:01:00:00"`) is due."""
        if self._interval is None:
            return False
        return self.elapsed() - self._progress.seconds_at_validation >= self._interval
