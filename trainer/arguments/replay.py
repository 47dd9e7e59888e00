"""The request that `leyden replay` sends to a rerun script: the checkpoint, the step and the report's folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.callbacks.base import Callback

if TYPE_CHECKING:
    from leyden.trainer.arguments.arguments import Arguments

VARIABLE = "LEYDEN_REPLAY"
REPORT = "report.json"
OFF: dict[str, Any] = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "digest_every_n_steps": None,
    "profiler": None,
    "resume": None,
    "preemption": None,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
}
"""Trainer arguments that a replay overrides, so that the run writes nothing and ends only at the requested step."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A request to run one step of a run again.

    Attributes:
        checkpoint: path of the checkpoint to resume from.
        step: the step to repeat, from 1.
        folder: a temporary folder for the report, also the run's `default_root_dir`.
    """

    checkpoint: str
    step: int
    folder: str

    def variables(self) -> dict[str, str]:
        """Returns the environment variable that transports the request."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def report(self) -> Path:
        """The path of the report."""
        return Path(self.folder) / REPORT

    def arguments(self) -> dict[str, Any]:
        """Returns the Trainer arguments to override."""
        return {**OFF, "default_root_dir": self.folder}

    def callbacks(self, callbacks: list[Callback]) -> list[Callback]:
        """Returns the run's callbacks without those that write files, and with a `ReplayedStep` that reports."""
        from leyden.callbacks.replayed_step import ReplayedStep

        own = [ReplayedStep(self.step, self.report)] if not _has(callbacks, ReplayedStep) else []
        return [callback for callback in callbacks if not _writes(callback)] + own


def read_replay() -> Replay | None:
    """Reads the request from the environment; None in a process that `leyden replay` did not start."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Replay(**json.loads(text))


def replay_of(arguments: Arguments) -> Replay | None:
    """Returns the replay request for a Trainer with these arguments; None without one, and for trials and dev runs."""
    return None if arguments.barebones or arguments.fast_dev_run else read_replay()


def _has(callbacks: list[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _writes(callback: Callback) -> bool:
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.callbacks.checkpointing.on_exception_checkpoint import OnExceptionCheckpoint
    from leyden.callbacks.checkpointing.preemption_checkpoint import PreemptionCheckpoint
    from leyden.callbacks.save_config import SaveConfigCallback
    from leyden.callbacks.weight_digests import WeightDigests

    writers = (ModelCheckpoint, OnExceptionCheckpoint, PreemptionCheckpoint, SaveConfigCallback, WeightDigests)
    return isinstance(callback, writers)
