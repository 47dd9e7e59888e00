"""CometLogger, a logger to Comet, or to an offline archive for later upload."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from leyden.callbacks.loggers.plain import HParams, flatten_hparams, plain_numbers, run_files
from leyden.callbacks.loggers.service_logger import ServiceLogger
from leyden.core.errors import needs


class CometLogger(ServiceLogger):
    """Logs to a Comet experiment. The first write imports comet_ml and starts the experiment.

    Offline use needs no account: the experiment is an archive in `save_dir`, for a later `comet upload`.

    Args:
        project: the project name; None for the project in Comet's configuration.
        workspace: the workspace name; None for the account's default workspace.
        save_dir: the folder for offline archives; None for the Trainer's `default_root_dir`.
        online: False to write to the folder only; None to go online if there is an API key.
        experiment_key: the key of an experiment to continue.
        prefix: a prefix for metric names, joined with "-".
        **kwargs: passed to `comet_ml.ExperimentConfig`: `name`, `tags`, ….

    Example:
        >>> logger = CometLogger(project="digits", online=False)
        >>> # Trainer(logger=logger)
    """

    id_name = "key"

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
        super().__init__(save_dir, prefix, experiment_key)
        self._project = project
        self._workspace = workspace
        self._online = online
        self._kwargs = kwargs

    @property
    def name(self) -> str | None:
        """The project name."""
        return self._project

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}(project={self._project!r})"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.is_writer:
            number = self._next_step(step)
            self.experiment.log_metrics(plain_numbers(metrics, self._prefix), step=number)

    def log_hyperparams(self, params: HParams, metrics: Mapping[str, float] | None = None) -> None:
        """Logs hyperparameters. Nested ones become "outer/inner"."""
        if self.is_writer and (flat := flatten_hparams(params)):
            self.experiment.log_parameters(flat)

    def log_run(self, record: Mapping[str, Any], diff: str = "") -> None:
        """Logs `starts/<time>/run.json` and `diff.patch` as assets, in addition to Comet's own record of git."""
        if self.is_writer:
            for name, text in run_files(record, diff).items():
                self.experiment.log_asset_data(text, name)

    def save(self) -> None:
        if self._experiment is not None:
            self._experiment.flush()

    def finish(self) -> None:
        """Ends the experiment, and waits until Comet or the archive has all of its data."""
        if self._experiment is not None:
            self._experiment.end()
            self._experiment = None

    def _begin(self) -> Any:
        with needs("comet_ml", "comet_ml", "CometLogger"):
            import comet_ml
        os.makedirs(self.save_dir, exist_ok=True)
        online = self._online
        if online is None:
            online = bool(comet_ml.config.get_api_key(None, comet_ml.get_config()))
        config = comet_ml.ExperimentConfig(offline_directory=self.save_dir, **self._kwargs)
        experiment = comet_ml.start(
            project_name=self._project,
            workspace=self._workspace,
            experiment_key=self._id,
            online=online,
            experiment_config=config,
        )
        self._id = str(experiment.get_key())
        return experiment
