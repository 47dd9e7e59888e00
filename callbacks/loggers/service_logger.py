"""Base class for loggers to a tracking service. A resume continues the service's run by its id."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, ClassVar

from leyden.callbacks.loggers.logger import SavingLogger
from leyden.callbacks.loggers.silent import Silent
from leyden.core.saved_state import SavedState


class ServiceLogger(SavingLogger):
    """Base class for loggers to a tracking service. The service's run starts at the first write.

    Local files go to `save_dir`. The run with an `id` is continued. An existing writer, the `experiment`, is used
    instead of starting a run.
    """

    id_name: ClassVar[str]
    """The key of the run id in a checkpoint."""

    def __init__(
        self, save_dir: str | os.PathLike[str] | None, prefix: str, id: str | None, experiment: Any = None
    ) -> None:
        super().__init__(save_dir, prefix)
        self._id = id
        self._experiment = experiment

    @abstractmethod
    def _begin(self) -> Any:
        """Starts or continues the run, and returns its writer."""

    @property
    def version(self) -> str | None:
        """The run id; None before the run has started."""
        return self._id

    @property
    def experiment(self) -> Any:
        """The underlying writer; on ranks that do not write, a no-op stand-in."""
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
