"""Checks the arguments of ModelCheckpoint."""

from __future__ import annotations

from typing import Any

from leyden.callbacks.early_stopping import MODES
from leyden.callbacks.timer import parse_duration
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.arguments.checks import check_choice


def check_arguments(monitor: Any, mode: Any, save_top_k: Any, save_last: Any) -> None:
    """Raises ConfigurationError for arguments of a ModelCheckpoint that cannot be."""
    if monitor is not None and (not isinstance(monitor, str) or not monitor):
        raise ConfigurationError(f"ModelCheckpoint(monitor={monitor!r}): give the name of a logged metric, or None.")
    check_choice("ModelCheckpoint", MODES, mode=mode)
    if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k!r}): give a whole number from 0, or -1 for all."
        )
    if save_last not in (None, True, False, "link"):
        raise ConfigurationError(f"ModelCheckpoint(save_last={save_last!r}): use True, False or 'link'.")


def triggers(steps: Any, epochs: Any, interval: Any) -> tuple[int, int, float | None]:
    """Checks and returns the steps, epochs and seconds between saves; at most one may be given."""
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigurationError(f"ModelCheckpoint({name}={value!r}): give a whole number from 1, or 0 for never.")
    seconds = None if interval is None else parse_duration(interval, "train_time_interval").total_seconds()
    if bool(steps) + bool(epochs) + (seconds is not None) > 1:
        raise ConfigurationError(
            f"ModelCheckpoint(every_n_train_steps={steps!r}, every_n_epochs={epochs!r}, "
            f"train_time_interval={interval!r}): give one of the three, and a ModelCheckpoint for each."
        )
    if steps is None and epochs is None and seconds is None:
        epochs = 1
    return steps or 0, epochs or 0, seconds
