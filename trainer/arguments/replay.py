"""What `leyden replay` asks of the script that it runs again: from which checkpoint, which step, where to report."""

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
"""The Trainer's arguments without which a run writes nothing, and ends where it is told to."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One step of a run, to be run again.

    Attributes:
        checkpoint: from which the run continues.
        step: the step, from 1.
        folder: a temporary one, in which it reports and in which the run is at home.
    """

    checkpoint: str
    step: int
    folder: str

    def variables(self) -> dict[str, str]:
        """The environment variable that carries it."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def report(self) -> Path:
        """The file of the report."""
        return Path(self.folder) / REPORT

    def arguments(self) -> dict[str, Any]:
        """The Trainer's arguments that are replaced."""
        return {**OFF, "default_root_dir": self.folder}

    def callbacks(self, callbacks: list[Callback]) -> list[Callback]:
        """The run's callbacks without those that write checkpoints and digests, and with the one that reports."""
        from leyden.callbacks.replayed_step import ReplayedStep

        own = [ReplayedStep(self.step, self.report)] if not _has(callbacks, ReplayedStep) else []
        return [callback for callback in callbacks if not _writes(callback)] + own


def read_replay() -> Replay | None:
    """Reads what `Replay.variables` wrote; None in a process that `leyden replay` did not start."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Replay(**json.loads(text))


def replay_of(arguments: Arguments) -> Replay | None:
    """What a Trainer of these arguments replays; None where nobody asks for it, and for trials and trial runs."""
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
