"""What callbacks ask of the loggers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.strategies.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.trainer.trainer import Trainer


def check_has_logger(callback: Callback, trainer: Trainer) -> None:
    """Raises ConfigurationError if a callback that logs by itself has no logger."""
    if not trainer.loggers and not trainer.fast_dev_run:
        raise ConfigurationError(
            f"{type(callback).__name__} needs a logger: use Trainer(logger=True), or leave the callback out."
        )


def is_logged(trainer: Trainer, number: int) -> bool:
    """True for each `log_every_n_steps`-th step or batch, and for none if that is 0."""
    every = trainer.log_every_n_steps
    return every > 0 and number % every == 0


def log_to_all(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    """Gives values to all loggers at once, on the first rank, which writes."""
    for logger in trainer.loggers if values and trainer.is_global_zero else ():
        logger.log_metrics(values, step=step)


def folder_of(trainer: Trainer) -> Path:
    """Returns the folder of the first logger that has one, without any `default_root_dir`."""
    if trainer.log_dir is None:
        for logger in trainer.loggers:
            # W&B names its folder when its run begins.
            _ = logger.experiment
    return Path(trainer.log_dir or trainer.default_root_dir)
