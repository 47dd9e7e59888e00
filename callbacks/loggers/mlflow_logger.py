"""MLFlowLogger, a logger to an MLflow server or database file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leyden.callbacks.loggers.background_uploads import BackgroundUploads, LinkedCopy, Task
from leyden.callbacks.loggers.checkpoint_uploads import CheckpointUploads, Upload
from leyden.callbacks.loggers.plain import HParams, flatten_hparams, plain_numbers, run_files
from leyden.callbacks.loggers.service_logger import ServiceLogger
from leyden.core.errors import ConfigurationError, needs
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

MAX_PARAMS_PER_CALL = 100
"""Number of parameters that MLflow accepts in one call."""
MAX_PARAM_LENGTH = 6000
"""Characters of a parameter value that MLflow keeps; it truncates longer values."""
MAX_PENDING = 1000
"""Number of asynchronous calls that may be in flight."""
INTERRUPTED_TIMEOUT = 10.0
"""Seconds that an interrupted run waits for uploads."""


class MLFlowLogger(ServiceLogger):
    """Logs to an MLflow run. The first write imports mlflow and starts the run; a resume continues the same run.

    `experiment` is the MlflowClient, `version` the run id.

    Args:
        experiment_name: the experiment name. The experiment is created if it does not exist.
        run_name: the run name; None lets MLflow choose one.
        tracking_uri: the server's URI; None for the variable MLFLOW_TRACKING_URI, or the file `<save_dir>/mlflow.db`.
        save_dir: the folder for local files; None for the Trainer's `default_root_dir`.
        tags: tags for the run.
        run_id: the id of a run to continue.
        prefix: a prefix for metric names, joined with "-".
        log_model: which checkpoints of ModelCheckpoints to upload as artifacts, each to a folder of its name. "all"
            uploads every checkpoint as it is saved. True uploads the checkpoints kept at the end of a successful fit,
            or every checkpoint as it is saved if `save_top_k=-1` keeps all. The run's tags `checkpoint.best` and
            `checkpoint.latest` name the artifacts of the best and the newest checkpoint; `<name>.json` next to each
            artifact has its score.
        checkpoint_path_prefix: the folder for these artifacts within the run's artifacts; "" for none.
        artifact_location: the artifact location of a new experiment; None for the server's default, or for `mlruns`
            next to the database file.
        synchronous: True to have every call wait until MLflow has all data. False to have MLflow log metrics,
            parameters and tags in a background thread. None to follow the variable MLFLOW_ENABLE_ASYNC_LOGGING. Unless
            this is True, checkpoints are uploaded in the background too, from hard links that outlive the checkpoints.
            The end of a fit waits for uploads. A failed upload raises at the next save or at the end of the fit.

    Raises:
        ConfigurationError: if `log_model` or `synchronous` has an unknown value.

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
        synchronous: bool | None = None,
    ) -> None:
        if synchronous not in (None, True, False):
            raise ConfigurationError(f"MLFlowLogger(synchronous={synchronous!r}): use True, False or None.")
        super().__init__(save_dir, prefix, run_id)
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._tags = dict(tags or {})
        self._uploads = CheckpointUploads(log_model, "MLFlowLogger")
        self._checkpoint_path_prefix = checkpoint_path_prefix.strip("/")
        self._artifact_location = artifact_location
        self._synchronous = synchronous
        self._experiment_id: str | None = None
        self._background = BackgroundUploads("MLFlowLogger")
        self._pending: list[Any] = []
        """Asynchronous MLflow calls in flight."""

    @property
    def name(self) -> str:
        """The experiment name."""
        return self._experiment_name

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}(experiment_name={self._experiment_name!r}, run_name={self._run_name!r})"

    @property
    def run_id(self) -> str | None:
        """The run id; None on ranks that do not write. Reading it starts the run."""
        return self._id if self.is_writer and self.experiment else None

    @property
    def experiment_id(self) -> str | None:
        """The experiment id; None on ranks that do not write. Reading it starts the run."""
        return self._experiment_id if self.is_writer and self.experiment else None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.is_writer:
            return
        number = self._next_step(step)
        client, now = self.experiment, int(time.time() * 1000)
        from mlflow.entities import Metric

        rows = [Metric(name, value, now, number) for name, value in plain_numbers(metrics, self._prefix).items()]
        self._log_batch(client, metrics=rows)

    def log_hyperparams(self, params: HParams, metrics: Mapping[str, float] | None = None) -> None:
        """Logs hyperparameters. Nested ones become "outer/inner".

        MLflow keeps the first value of a parameter. If a resumed run has a different value, it is logged as the tag
        `changed.<name>`, with a warning.
        """
        flat = {name: str(value) for name, value in flatten_hparams(params).items()}
        if not self.is_writer or not flat:
            return
        client = self.experiment
        from mlflow.entities import Param, RunTag

        self.save()
        kept = client.get_run(self._id).data.params
        changed = {name: text for name, text in flat.items() if name in kept and kept[name] != text[:MAX_PARAM_LENGTH]}
        if changed:
            warn(
                f"MLflow keeps the first value of a parameter. The new values of {', '.join(changed)} are logged as "
                f"tags of the run, such as changed.{next(iter(changed))}."
            )
        added = [Param(name, text) for name, text in flat.items() if name not in kept]
        tags = [RunTag(f"changed.{name}", text) for name, text in changed.items()]
        for start in range(0, max(len(added), len(tags)), MAX_PARAMS_PER_CALL):
            chunk = slice(start, start + MAX_PARAMS_PER_CALL)
            self._log_batch(client, params=added[chunk], tags=tags[chunk])

    def log_run(self, record: Mapping[str, Any], diff: str = "") -> None:
        """Logs the record as artifacts, and command, commit and branch as MLflow's source tags.

        The artifacts are `starts/<time>/run.json` and `diff.patch`.
        """
        if not self.is_writer:
            return
        client, git = self.experiment, record.get("git") or {}
        from mlflow.entities import RunTag

        facts = {"name": record["command"], "git.commit": git.get("commit"), "git.branch": git.get("branch")}
        tags = [RunTag(f"mlflow.source.{name}", value) for name, value in facts.items() if value is not None]
        self._log_batch(client, tags=tags)
        for name, text in run_files(record, diff).items():
            self._submit(Task(name, partial(client.log_text, self._id, text, name), is_needed=False))

    def save(self) -> None:
        """Waits until MLflow has all logged metrics, parameters and tags. Uploads continue in the background.

        Raises:
            MlflowException: if an asynchronous call failed.
        """
        pending, self._pending = self._pending, []
        for operations in pending:
            operations.wait()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._uploads.check(trainer)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Uploads the checkpoints that `log_model` selects, in the background unless the logger is synchronous.

        Raises:
            LeydenError: if an earlier upload failed.
        """
        self._background.report(raises=True)
        for upload in self._uploads.after_save(checkpoint_callback):
            client = self.experiment
            if self._synchronous:
                self._upload(client, upload, upload.path)
            else:
                copy = LinkedCopy(upload.path)
                run = partial(self._upload, client, upload, str(copy.path))
                self._submit(Task(f"the checkpoint {upload.path}", run, copy.remove))

    def finalize(self, status: str) -> None:
        """Uploads the checkpoints that `log_model` selects, waits for all uploads, and records the run's status.

        An interrupted run waits at most ten seconds, since its machine may be about to go away. Later logging reopens
        the run.

        Raises:
            LeydenError: if an upload failed in a run that succeeded.
        """
        is_success = status == "success"
        self._background.wait(INTERRUPTED_TIMEOUT if status == "interrupted" else None)
        try:
            for upload in self._uploads.at_end(status):
                self._upload(self.experiment, upload, upload.path)
            if is_success:
                self.save()
        finally:
            if self._experiment is not None:
                statuses = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
                self._experiment.set_terminated(self._id, statuses[status])
        self._background.report(raises=is_success)

    def __getstate__(self) -> dict[str, Any]:
        # A client and its threads cannot leave their process. A copy continues the run by its id.
        return {**vars(self), "_experiment": None, "_pending": []}

    def _log_batch(self, client: Any, **rows: Sequence[Any]) -> None:
        operations = client.log_batch(self._id, **rows, synchronous=self._synchronous)
        if operations is None:
            return
        self._pending.append(operations)
        if len(self._pending) >= MAX_PENDING:
            self.save()

    def _submit(self, task: Task) -> None:
        """Performs a task, in the background unless the logger is synchronous."""
        if self._synchronous:
            task.carry_out()
        else:
            self._background.put(task)

    def _upload(self, client: Any, upload: Upload, folder: str) -> None:
        """Uploads a checkpoint from a folder: the checkpoint's own, or a copy."""
        artifact_path = "/".join(part for part in (self._checkpoint_path_prefix, upload.name) if part)
        client.log_artifacts(self._id, folder, artifact_path)
        client.log_dict(self._id, upload.metadata, f"{artifact_path}.json")
        for alias in upload.aliases:
            client.set_tag(self._id, f"checkpoint.{alias}", artifact_path)

    def _begin(self) -> Any:
        with needs("mlflow", "mlflow", "MLFlowLogger"):
            from mlflow import MlflowClient
        os.makedirs(self.save_dir, exist_ok=True)
        uri, location = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), self._artifact_location
        if not uri and location is None:
            # MLflow would write artifacts to the working directory.
            location = Path(self.save_dir, "mlruns").resolve().as_uri()
        # MLflow no longer accepts a folder of files as its store, so the local fallback is a database.
        client = MlflowClient(uri or f"sqlite:///{Path(self.save_dir, 'mlflow.db').resolve()}")
        if self._id is None:
            name, found = self._experiment_name, client.get_experiment_by_name(self._experiment_name)
            experiment_id = client.create_experiment(name, location) if found is None else found.experiment_id
            self._id = client.create_run(experiment_id, tags=self._tags, run_name=self._run_name).info.run_id
            self._experiment_id = str(experiment_id)
        else:
            client.update_run(self._id, "RUNNING")
            self._experiment_id = str(client.get_run(self._id).info.experiment_id)
            for key, value in self._tags.items():
                client.set_tag(self._id, key, value)
        return client
