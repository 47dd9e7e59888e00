"""Validation of ModelCheckpoint's arguments."""

from __future__ import annotations

from typing import Any

from leyden.callbacks.early_stopping import MODES
from leyden.callbacks.timer import parse_duration
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.arguments.checks import check_choice


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
