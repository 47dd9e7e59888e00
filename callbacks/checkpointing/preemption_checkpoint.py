"""PreemptionCheckpoint, the callback that saves a preempted run."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.checkpoint_commit import FolderStorage, storage_of
from leyden.core.errors import StateError
from leyden.core.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

NAME = "preempted"


class PreemptionCheckpoint(Callback):
    """Saves a preempted run before any other `on_train_end` hook runs. Added by `Trainer(preemption=…)`.

    It saves nothing if a ModelCheckpoint saves at the end of the run (`save_last=True`) or has just saved this batch.
    Otherwise it saves `preempted` among the run's checkpoints. A run that is preempted again replaces its own
    `preempted` checkpoint. If the name belongs to another run, `-v1`, `-v2`, … is appended.

    Example:
        >>> PreemptionCheckpoint().state_dict()
        {'name': ''}
    """

    # First of all callbacks: the others' work at the end may outlast the grace period.
    order: ClassVar[int] = -1000
    state_per_rank = False
    uses_run_folder = True

    def __init__(self) -> None:
        self._name = ""
        """Name of this run's checkpoint in the folder; "" before the first save."""

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        name = SavedState(state).text("name", "")
        if not re.fullmatch(rf"({NAME}(-v\d+)?)?", name):
            raise StateError("name", f"is {name!r}, which PreemptionCheckpoint never uses")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._name = state.get("name", "")

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps the name: its checkpoint is still on disk."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.preempted or any(checkpoint.secure(trainer) for checkpoint in trainer.checkpoint_callbacks):
            return
        folder = str(trainer.checkpoint_folder)
        previous = self._name
        # Only rank 0 is sure to see the folder, so it decides.
        self._name = trainer.strategy.ranks.broadcast(previous or _free_name(folder, storage_of(trainer)))
        try:
            trainer.save_checkpoint(os.path.join(folder, self._name), asynchronous=False)
        except BaseException:
            self._name = previous
            raise


def _free_name(folder: str, storage: FolderStorage) -> str:
    """Returns the first name that is free in the folder: `preempted`, `preempted-v1`, …"""
    name, version = NAME, 0
    while storage.is_taken(os.path.join(folder, name)):
        version += 1
        name = f"{NAME}-v{version}"
    return name
