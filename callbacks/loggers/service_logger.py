"""The base class of loggers to a tracking service, whose run a resume continues by its id."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, ClassVar

from leyden.callbacks.loggers.logger import SavingLogger
from leyden.callbacks.loggers.silent import Silent
from leyden.strategies.saved_state import SavedState


class ServiceLogger(SavingLogger):
    """Base class of loggers to a run of a service, which is started at the first write.

    Args:
        save_dir: None for the Trainer's `default_root_dir`, or the working directory without a Trainer.
        prefix: put in front of the names of metrics, followed by "-".
        id: the id of a run to continue; None for a new one.
        experiment: the object that writes, if it exists already.
    """

    id_name: ClassVar[str]
    """The entry of the run's id in a checkpoint."""

    def __init__(
        self, save_dir: str | os.PathLike[str] | None, prefix: str, id: str | None, experiment: Any = None
    ) -> None:
        super().__init__(save_dir, prefix)
        self._id = id
        self._experiment = experiment

    @abstractmethod
    def _begin(self) -> Any:
        """Starts or continues the run; returns the object that writes."""

    @property
    def version(self) -> str | None:
        """The run's id; None before it has started."""
        return self._id

    @property
    def experiment(self) -> Any:
        """The object that writes; on ranks that do not write, a stand-in that does nothing."""
        if not self.is_writer:
            return Silent()
        if self._experiment is None:
            self._experiment = self._begin()
        return self._experiment

    def state_dict(self) -> dict[str, Any]:
        return {} if self.version is None else {self.id_name: self.version, "last_step": self._last_step}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            saved = SavedState(state)
            saved.text(self.id_name)
            saved.integer("last_step", least=-1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and self._experiment is None:
            self._id, self._last_step = str(state[self.id_name]), int(state["last_step"])
