"""MLFlowLogger, a logger to MLflow, on a server or in a file."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leyden.callbacks.loggers.checkpoint_uploads import CheckpointUploads, Upload
from leyden.callbacks.loggers.plain import flatten_hparams, plain_numbers, run_files
from leyden.callbacks.loggers.service_logger import ServiceLogger
from leyden.strategies.errors import needs

if TYPE_CHECKING:
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint

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
        log_model: upload checkpoints of ModelCheckpoints as artifacts, each a folder of its name. "all": each one once
            it is saved. True: at the end of a fit that succeeds those that are kept then, and each one once it is
            saved where `save_top_k=-1` keeps all. The run's tags `checkpoint.best` and `checkpoint.latest` name the
            artifacts of the best and the newest one; `<name>.json` beside each has its score. MLflow's own upload is
            waited for.
        checkpoint_path_prefix: the folder of these artifacts in the run's; "" for none.
        artifact_location: where a new experiment keeps artifacts; None for what the server says, or `mlruns` beside
            the file.

    Raises:
        ConfigurationError: for another `log_model`.

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
        log_model: bool | Literal["all"] = False,
        checkpoint_path_prefix: str = "",
        artifact_location: str | None = None,
    ) -> None:
        super().__init__(save_dir, prefix, run_id)
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._tags = dict(tags or {})
        self._uploads = CheckpointUploads(log_model, "MLFlowLogger")
        self._checkpoint_path_prefix = checkpoint_path_prefix.strip("/")
        self._artifact_location = artifact_location

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

    def log_run(self, record: Mapping[str, Any], diff: str = "") -> None:
        """Keeps `starts/<time>/run.json` and `diff.patch` as artifacts, and sets the tags of MLflow for command, commit
        and branch.
        """
        if not self.is_writer:
            return
        client, git = self.experiment, record.get("git") or {}
        tags = {"name": record["command"], "git.commit": git.get("commit"), "git.branch": git.get("branch")}
        for name, value in tags.items():
            if value is not None:
                client.set_tag(self._id, f"mlflow.source.{name}", value)
        for name, text in run_files(record, diff).items():
            client.log_text(self._id, text, name)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Uploads what `log_model` says."""
        self._upload(self._uploads.after_save(checkpoint_callback))

    def finalize(self, status: str) -> None:
        """Uploads what `log_model` says, and records how the run ended; logging again reopens it."""
        self._upload(self._uploads.at_end(status))
        if self._experiment is not None:
            words = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
            self._experiment.set_terminated(self._id, words[status])

    def _upload(self, uploads: Sequence[Upload]) -> None:
        for upload in uploads:
            client = self.experiment
            place = "/".join(part for part in (self._checkpoint_path_prefix, upload.name) if part)
            client.log_artifacts(self._id, upload.path, place)
            client.log_dict(self._id, upload.metadata, f"{place}.json")
            for alias in upload.aliases:
                client.set_tag(self._id, f"checkpoint.{alias}", place)

    def _begin(self) -> Any:
        with needs("mlflow", "mlflow", "MLFlowLogger"):
            from mlflow import MlflowClient
        os.makedirs(self.save_dir, exist_ok=True)
        # MLflow no longer accepts a folder of files.
        own = f"sqlite:///{Path(self.save_dir, 'mlflow.db').resolve()}"
        given, location = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), self._artifact_location
        client = MlflowClient(given or own)
        if not given and location is None:
            # Without it, MLflow writes to the working directory.
            location = Path(self.save_dir, "mlruns").resolve().as_uri()
        if self._id is None:
            name, found = self._experiment_name, client.get_experiment_by_name(self._experiment_name)
            number = client.create_experiment(name, location) if found is None else found.experiment_id
            self._id = client.create_run(number, tags=self._tags, run_name=self._run_name).info.run_id
        else:
            client.update_run(self._id, "RUNNING")
        return client
