"""Helpers for callbacks that use the loggers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.trainer.trainer import Trainer


def check_has_logger(callback: Callback, trainer: Trainer) -> None:
    """Raises ConfigurationError if a callback that logs has no logger to write to."""
    if not trainer.loggers and not trainer.fast_dev_run:
        raise ConfigurationError(
            f"{type(callback).__name__} needs a logger. Use Trainer(logger=True), or remove the callback."
        )


def is_logged(trainer: Trainer, number: int) -> bool:
    """Returns True for every `log_every_n_steps`-th step or batch; never if `log_every_n_steps` is 0."""
    every = trainer.log_every_n_steps
    return every > 0 and number % every == 0


def log_to_all(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    """Logs values to every logger, on rank 0, the writer."""
    for logger in trainer.loggers if values and trainer.is_global_zero else ():
        logger.log_metrics(values, step=step)


def folder_of(trainer: Trainer) -> Path:
    """Returns the run's folder; in evaluations that of the first logger that has one, or else `default_root_dir`."""
    if trainer.run_folder is not None:
        return Path(trainer.run_folder)
    if trainer.log_dir is None:
        for logger in trainer.loggers:
            # Start the runs: W&B chooses its folder when its run starts.
            _ = logger.experiment
    return Path(trainer.log_dir or trainer.default_root_dir)
