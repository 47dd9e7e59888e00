"""CometLogger, a logger to Comet, or to a file that can be uploaded later."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from leyden.callbacks.logger import Logger
from leyden.callbacks.plain import flatten_hparams, plain_numbers
from leyden.callbacks.silent import Silent
from leyden.strategies.errors import MissingExtraError
from leyden.strategies.saved_state import SavedState


class CometLogger(Logger):
    """Logs to an experiment of Comet. comet_ml is imported, and the experiment started, at the first write.

    Offline it needs no account: the experiment is an archive in `save_dir`, which `comet upload` uploads later.

    Args:
        project: None for the project in Comet's configuration.
        workspace: None for the account's default workspace.
        save_dir: folder for offline archives; None for the Trainer's `default_root_dir`.
        online: False writes to the folder only; None is online if there is an API key.
        experiment_key: the key of an experiment to continue.
        prefix: put in front of the names of metrics.
        **kwargs: passed to `comet_ml.ExperimentConfig`: `name`, `tags`, ….

    Example:
        >>> logger = CometLogger(project="digits", online=False)
        >>> # Trainer(logger=logger)
    """

    def __init__(
        self,
        project: str | None = None,
        workspace: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        online: bool | None = None,
        experiment_key: str | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        self._project = project
        self._workspace = workspace
        self._save_dir = None if save_dir is None else os.path.expanduser(os.fspath(save_dir))
        self._online = online
        self._key = experiment_key
        self._prefix = prefix
        self._kwargs = kwargs
        self._experiment: Any = None

    @property
    def name(self) -> str | None:
        """The project."""
        return self._project

    @property
    def version(self) -> str | None:
        """The experiment's key; None before it has started."""
        return self._key

    @property
    def save_dir(self) -> str:
        return self._save_dir if self._save_dir is not None else (self._default_root_dir or os.getcwd())

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}(project={self._project!r})"

    @property
    def experiment(self) -> Any:
        """The experiment; on ranks that do not write, a stand-in that does nothing."""
        if not self.is_writer:
            return Silent()
        if self._experiment is None:
            self._experiment = self._begin()
            self._key = str(self._experiment.get_key())
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.is_writer:
            number = self._next_step(step)
            self.experiment.log_metrics(plain_numbers(metrics, self._prefix), step=number)

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace | None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Logs settings, nested ones as "outer/inner"."""
        if self.is_writer and (flat := flatten_hparams(params)):
            self.experiment.log_parameters(flat)

    def save(self) -> None:
        if self._experiment is not None:
            self._experiment.flush()

    def finish(self) -> None:
        """Ends the experiment, and waits until Comet or the archive has all of it."""
        if self._experiment is not None:
            self._experiment.end()
            self._experiment = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._key is None else {"key": self._key, "last_step": self._last_step}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            saved = SavedState(state)
            saved.text("key")
            saved.integer("last_step", least=-1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and self._experiment is None:
            self._key, self._last_step = state["key"], int(state["last_step"])

    def _begin(self) -> Any:
        try:
            import comet_ml
        except ImportError as error:
            raise MissingExtraError("comet_ml", "comet_ml", "CometLogger") from error
        os.makedirs(self.save_dir, exist_ok=True)
        online = (
            bool(comet_ml.config.get_api_key(None, comet_ml.get_config())) if self._online is None else self._online
        )
        config = comet_ml.ExperimentConfig(offline_directory=self.save_dir, **self._kwargs)
        return comet_ml.start(
            project_name=self._project,
            workspace=self._workspace,
            experiment_key=self._key,
            online=online,
            experiment_config=config,
        )
