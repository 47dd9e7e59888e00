"""PreemptionCheckpoint, the callback that saves a run which is preempted."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks.base import Callback
from leyden.strategies.errors import StateError
from leyden.strategies.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

NAME = "preempted"


class PreemptionCheckpoint(Callback):
    """Saves a run that is preempted, before any other hook hears of its end; `Trainer(preemption=…)` adds it.

    A ModelCheckpoint that saves the end of a run anyway (`save_last=True`), or has just saved this step, is enough.
    Otherwise the checkpoint is `preempted` in the run's folder of checkpoints. A run that is preempted again replaces
    its own one; that of another run stays, and `-v1` and so on is appended.

    Example:
        >>> PreemptionCheckpoint().state_dict()
        {'name': ''}
    """

    # Before all others: what they do at the end may take longer than the run has.
    order: ClassVar[int] = -1000
    state_per_rank = False

    def __init__(self) -> None:
        self._name = ""
        """Name of the checkpoint in the folder; "" before the first one."""

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        name = SavedState(state).text("name", "")
        if not re.fullmatch(rf"({NAME}(-v\d+)?)?", name):
            raise StateError("name", f"is {name!r}, which is no name of a preempted run's checkpoint")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state_dict(state)
        self._name = state.get("name", "")

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps the name of the checkpoint that is on the disk."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.preempted or any(checkpoint.secure(trainer) for checkpoint in trainer.checkpoint_callbacks):
            return
        folder = str(trainer.checkpoint_folder)
        before = self._name
        # Only the first rank is sure to see the folder, so it decides.
        self._name = trainer.strategy.ranks.broadcast(before or _free(folder))
        try:
            trainer.save_checkpoint(os.path.join(folder, self._name), asynchronous=False)
        except BaseException:
            self._name = before
            raise


def _free(folder: str) -> str:
    """A name that no checkpoint in the folder has."""
    name, version = NAME, 0
    while os.path.lexists(os.path.join(folder, name)):
        version += 1
        name = f"{NAME}-v{version}"
    return name
