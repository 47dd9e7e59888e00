"""Helpers for tests of loggers: set loggers up without a Trainer, and read what they have written."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from models import Line
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from leyden.callbacks.loggers.logger import Logger


class BestAtTwo(Line):
    """Logs a metric `distance` that is best after the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("distance", abs(self.trainer.global_step - 1.0))
        return super().training_step(batch, batch_idx)


def set_up(root: Path, *loggers: Logger, stage: str = "fit", zero: bool = True) -> Any:
    """Calls `setup` of loggers with a stand-in for a Trainer, and returns the stand-in.

    Args:
        root: the Trainer's `default_root_dir`.
        *loggers: the Trainer's loggers.
        stage: of the run.
        zero: True on rank 0.
    """
    trainer: Any = SimpleNamespace(
        default_root_dir=str(root),
        loggers=list(loggers),
        is_global_zero=zero,
        world_size=1,
        run_folder=None,
        strategy=SimpleNamespace(replicates=True),
    )
    for logger in loggers:
        logger.setup(trainer, None, stage)  # type: ignore[arg-type]
    return trainer


def events_in(folder: str | os.PathLike[str] | None) -> Any:
    """Returns TensorBoard's reader of the event files in a folder."""
    untyped: Any = EventAccumulator
    return untyped(str(folder), size_guidance={"scalars": 0}).Reload()


def scalars_in(folder: str | os.PathLike[str] | None) -> dict[str, list[tuple[int, float]]]:
    """Returns all scalars of the event files in a folder: (step, value) pairs by name."""
    events = events_in(folder)
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
