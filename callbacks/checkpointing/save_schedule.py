"""SaveSchedule, which decides when a ModelCheckpoint saves; and the validation of ModelCheckpoint's arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leyden.callbacks.early_stopping import MODES, validates_at_epoch_end
from leyden.callbacks.timer import parse_duration
from leyden.core.checks import check_choice
from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer


def check_arguments(monitor: Any, mode: Any, save_top_k: Any, save_last: Any) -> None:
    """Raises ConfigurationError for an invalid argument of ModelCheckpoint."""
    if monitor is not None and (not isinstance(monitor, str) or not monitor):
        raise ConfigurationError(f"ModelCheckpoint(monitor={monitor!r}): use the name of a logged metric, or None.")
    check_choice("ModelCheckpoint", MODES, mode=mode)
    if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k!r}): use a whole number from 0, or -1 for all."
        )
    if save_last not in (None, True, False, "link"):
        raise ConfigurationError(f"ModelCheckpoint(save_last={save_last!r}): use True, False or 'link'.")


class SaveSchedule:
    """When a ModelCheckpoint saves: every few steps, every few epochs, or after some time.

    The arguments are those of ModelCheckpoint, and whether it has a `monitor`.

    Attributes:
        steps: steps between saves; 0 for never.
        epochs: epochs between saves; 0 for never.
        seconds: seconds between saves; None for no saves by time.
    """

    def __init__(
        self,
        every_n_train_steps: Any,
        every_n_epochs: Any,
        train_time_interval: Any,
        save_on_train_epoch_end: bool | None,
        ranks_by_metric: bool,
    ) -> None:
        self.steps, self.epochs, self.seconds = triggers(every_n_train_steps, every_n_epochs, train_time_interval)
        self._on_train_epoch_end, self._ranks_by_metric = save_on_train_epoch_end, ranks_by_metric
        self._time_flag: Callable[[], list[bool]] | None = None
        """Returns rank 0's decision, at the end of the previous window, whether a save is due by time."""

    def saves_within(self, trainer: Trainer) -> bool:
        """Returns True if a save is expected before the fit ends."""
        if self.steps:
            return trainer.max_steps == -1 or self.steps < trainer.max_steps
        if self.epochs and self._saves_at_epoch_end(trainer):
            return trainer.max_epochs in (None, -1) or self.epochs < (trainer.max_epochs or 0)
        return self.epochs > 0 or self.seconds is not None

    def _saves_at_epoch_end(self, trainer: Trainer) -> bool:
        """Returns True if saves by epoch are due at the end of training epochs, not after validations."""
        return validates_at_epoch_end(trainer) if self._on_train_epoch_end is None else self._on_train_epoch_end

    def is_due_at_epoch_end(self, trainer: Trainer) -> bool:
        """Returns True if a save by epoch is due at the end of this training epoch."""
        return self._is_due_by_epoch(trainer) and self._saves_at_epoch_end(trainer)

    def is_due_after_validation(self, trainer: Trainer) -> bool:
        """Returns True if a save by epoch is due after a validation in this epoch."""
        return self._is_due_by_epoch(trainer) and not self._saves_at_epoch_end(trainer)

    def _is_due_by_epoch(self, trainer: Trainer) -> bool:
        return self.epochs > 0 and (trainer.progress.epoch + 1) % self.epochs == 0

    def is_due_by_step(self, trainer: Trainer, saved_at: float | None) -> bool:
        """Returns True if a save by steps or by time since `saved_at`, of `time.monotonic`, is due after this step."""
        if self.steps:
            return trainer.global_step % self.steps == 0
        if self.seconds is None or saved_at is None:
            return False
        due = time.monotonic() - saved_at >= self.seconds
        if trainer.world_size == 1:
            return due
        # The ranks' clocks differ, so rank 0 decides. To avoid waiting for it, all ranks act one window later.
        is_agreed = self._time_flag is not None and self._time_flag()[0]
        self._time_flag = trainer.strategy.ranks.exchange_flags([due and trainer.is_global_zero and not is_agreed])
        return is_agreed

    def waits_for_validation(self, trainer: Trainer) -> bool:
        """Returns True if a save that is due waits for a validation, which logs the metric."""
        return self._ranks_by_metric and trainer.progress.validation_due

    def is_due_in(self, trainer: Trainer, event: str) -> bool:
        """Returns True if a save is due in the hook after which a run was killed.

        Saves by time are not: the next step makes them.
        """
        if event == "on_train_epoch_end":
            return self.is_due_at_epoch_end(trainer)
        by_step = self.steps > 0 and self.is_due_by_step(trainer, None)
        if event == "on_validation_end":
            return self.is_due_after_validation(trainer) or (by_step and self._ranks_by_metric)
        return by_step and not self.waits_for_validation(trainer)

    def end(self) -> None:
        """Completes the exchange between ranks that is in flight."""
        if self._time_flag is not None:
            self._time_flag()
            self._time_flag = None


def triggers(steps: Any, epochs: Any, interval: Any) -> tuple[int, int, float | None]:
    """Validates and returns the steps, epochs and seconds between saves. At most one may be given."""
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigurationError(f"ModelCheckpoint({name}={value!r}): use a whole number from 1, or 0 for never.")
    seconds = None if interval is None else parse_duration(interval, "train_time_interval").total_seconds()
    if bool(steps) + bool(epochs) + (seconds is not None) > 1:
        raise ConfigurationError(
            f"ModelCheckpoint(every_n_train_steps={steps!r}, every_n_epochs={epochs!r}, "
            f"train_time_interval={interval!r}): give only one of the three, or use a ModelCheckpoint for each."
        )
    if steps is None and epochs is None and seconds is None:
        epochs = 1
    return steps or 0, epochs or 0, seconds
