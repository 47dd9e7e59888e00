"""MLFlowLogger, a logger to MLflow, on a server or in a file."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leyden.callbacks.plain import flatten_hparams, plain_numbers
from leyden.callbacks.service_logger import ServiceLogger
from leyden.strategies.errors import needs

MOST = 100
"""The number of parameters that MLflow accepts in one call."""


class MLFlowLogger(ServiceLogger):
    """Logs to a run of MLflow, which a resume continues. mlflow is imported, and the run started, at the first write.

    `experiment` is the MlflowClient, `version` the run's id.

    Args:
        experiment_name: the experiment, which is created if it does not exist.
        run_name: the run's name; None lets MLflow choose one.
        tracking_uri: a server's URI; None for the variable MLFLOW_TRACKING_URI, or the file `<save_dir>/mlflow.db`.
        save_dir: None for the Trainer's `default_root_dir`.
        tags: tags of the run.
        run_id: the id of a run to continue.
        prefix: put in front of the names of metrics.

    Example:
        >>> logger = MLFlowLogger(experiment_name="digits")
        >>> # Trainer(logger=logger)
    """

    id_name = "run_id"

    def __init__(
        self,
        experiment_name: str = "leyden",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        tags: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(save_dir, prefix, run_id)
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._tags = dict(tags or {})

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self._experiment_name

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}(experiment_name={self._experiment_name!r}, run_name={self._run_name!r})"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.is_writer:
            return
        number = self._next_step(step)
        client, now = self.experiment, int(time.time() * 1000)
        from mlflow.entities import Metric

        rows = [Metric(name, value, now, number) for name, value in plain_numbers(metrics, self._prefix).items()]
        client.log_batch(self._id, metrics=rows)

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace | None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Logs settings, nested ones as "outer/inner"."""
        flat = list(flatten_hparams(params).items())
        if not self.is_writer or not flat:
            return
        client = self.experiment
        from mlflow.entities import Param

        for start in range(0, len(flat), MOST):
            rows = [Param(name, str(value)) for name, value in flat[start : start + MOST]]
            client.log_batch(self._id, params=rows)

    def finalize(self, status: str) -> None:
        """Records how the run ended; logging again reopens it."""
        if self._experiment is not None:
            words = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
            self._experiment.set_terminated(self._id, words[status])

    def _begin(self) -> Any:
        with needs("mlflow", "mlflow", "MLFlowLogger"):
            from mlflow import MlflowClient
        os.makedirs(self.save_dir, exist_ok=True)
        # MLflow no longer accepts a folder of files.
        own = f"sqlite:///{Path(self.save_dir, 'mlflow.db').resolve()}"
        client = MlflowClient(self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own)
        if self._id is None:
            found = client.get_experiment_by_name(self._experiment_name)
            number = client.create_experiment(self._experiment_name) if found is None else found.experiment_id
            self._id = client.create_run(number, tags=self._tags, run_name=self._run_name).info.run_id
        else:
            client.update_run(self._id, "RUNNING")
        return client
