"""MLFlowLogger, a logger to MLflow, on a server or in a file."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leyden.callbacks.loggers.background_uploads import BackgroundUploads, LinkedCopy, Task
from leyden.callbacks.loggers.checkpoint_uploads import CheckpointUploads, Upload
from leyden.callbacks.loggers.plain import HParams, flatten_hparams, plain_numbers, run_files
from leyden.callbacks.loggers.service_logger import ServiceLogger
from leyden.strategies.errors import ConfigurationError, needs

if TYPE_CHECKING:
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint

MOST = 100
"""The number of parameters that MLflow accepts in one call."""
LONGEST = 6000
"""Characters of a parameter; MLflow cuts longer ones."""
MOST_PENDING = 1000
"""Calls that may be under way."""
PATIENCE = 10.0
"""Seconds for uploads when a run is interrupted."""


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
            artifacts of the best and the newest one; `<name>.json` beside each has its score.
        checkpoint_path_prefix: the folder of these artifacts in the run's; "" for none.
        artifact_location: where a new experiment keeps artifacts; None for what the server says, or `mlruns` beside
            the file.
        synchronous: True: every call waits until MLflow has everything. False: MLflow logs metrics, parameters and tags
            in a thread of its own. None: that is up to the variable MLFLOW_ENABLE_ASYNC_LOGGING. Unless it is True,
            checkpoints are uploaded beside the training, too, from hard links that outlive their deletion. The end of a
            fit waits, and what has failed is an error at the next save or at the end.

    Raises:
        ConfigurationError: for another `log_model` or `synchronous`.

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
        """What MLflow logs in threads of its own, unless it is synchronous."""

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self._experiment_name

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}(experiment_name={self._experiment_name!r}, run_name={self._run_name!r})"

    @property
    def run_id(self) -> str | None:
        """The run's id; starts the run. None on ranks that do not write."""
        return self._id if self.is_writer and self.experiment else None

    @property
    def experiment_id(self) -> str | None:
        """The experiment's id; starts the run. None on ranks that do not write."""
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
        """Logs settings, nested ones as "outer/inner".

        MLflow keeps a parameter's first value. If a run that goes on has another one, a tag `changed.<name>` has it,
        and a warning says so.
        """
        flat = {name: str(value) for name, value in flatten_hparams(params).items()}
        if not self.is_writer or not flat:
            return
        client = self.experiment
        from mlflow.entities import Param, RunTag

        self.save()
        kept = client.get_run(self._id).data.params
        changed = {name: text for name, text in flat.items() if name in kept and kept[name] != text[:LONGEST]}
        if changed:
            warnings.warn(
                f"MLflow keeps the first value of a parameter: the run's new values of {', '.join(changed)} are in its "
                f"tags, such as changed.{next(iter(changed))}.",
                stacklevel=2,
            )
        rows = [Param(name, text) for name, text in flat.items() if name not in kept]
        tags = [RunTag(f"changed.{name}", text) for name, text in changed.items()]
        for start in range(0, max(len(rows), len(tags)), MOST):
            part = slice(start, start + MOST)
            self._log_batch(client, params=rows[part], tags=tags[part])

    def log_run(self, record: Mapping[str, Any], diff: str = "") -> None:
        """Keeps `starts/<time>/run.json` and `diff.patch` as artifacts, and sets the tags of MLflow for command, commit
        and branch.
        """
        if not self.is_writer:
            return
        client, git = self.experiment, record.get("git") or {}
        from mlflow.entities import RunTag

        facts = {"name": record["command"], "git.commit": git.get("commit"), "git.branch": git.get("branch")}
        tags = [RunTag(f"mlflow.source.{name}", value) for name, value in facts.items() if value is not None]
        self._log_batch(client, tags=tags)
        for name, text in run_files(record, diff).items():
            self._carry_out(Task(name, partial(client.log_text, self._id, text, name), is_needed=False))

    def save(self) -> None:
        """Waits until MLflow has the metrics, parameters and tags that were logged; uploads go on.

        Raises:
            MlflowException: for what `synchronous=False` could not log.
        """
        pending, self._pending = self._pending, []
        for operations in pending:
            operations.wait()

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Uploads what `log_model` says, beside the training unless the logger is synchronous.

        Raises:
            LeydenError: if an earlier upload has failed.
        """
        self._background.report(raises=True)
        for upload in self._uploads.after_save(checkpoint_callback):
            client = self.experiment
            if self._synchronous:
                self._upload(client, upload, upload.path)
            else:
                copy = LinkedCopy(upload.path)
                run = partial(self._upload, client, upload, str(copy.path))
                self._carry_out(Task(f"the checkpoint {upload.path}", run, copy.remove))

    def finalize(self, status: str) -> None:
        """Uploads what `log_model` says, waits for all uploads, and records how the run ended; logging again reopens
        it.

        A run that was interrupted waits ten seconds and no more: it may have to make room.

        Raises:
            LeydenError: if an upload has failed, in a run that succeeded.
        """
        is_success = status == "success"
        self._background.wait(PATIENCE if status == "interrupted" else None)
        try:
            for upload in self._uploads.at_end(status):
                self._upload(self.experiment, upload, upload.path)
            if is_success:
                self.save()
        finally:
            if self._experiment is not None:
                words = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
                self._experiment.set_terminated(self._id, words[status])
        self._background.report(raises=is_success)

    def __getstate__(self) -> dict[str, Any]:
        # A client and its threads stay in their process: a copy continues the run by its id.
        return {**vars(self), "_experiment": None, "_pending": []}

    def _log_batch(self, client: Any, **rows: Sequence[Any]) -> None:
        operations = client.log_batch(self._id, **rows, synchronous=self._synchronous)
        if operations is None:
            return
        self._pending.append(operations)
        if len(self._pending) >= MOST_PENDING:
            self.save()

    def _carry_out(self, task: Task) -> None:
        if self._synchronous:
            task.carry_out()
        else:
            self._background.put(task)

    def _upload(self, client: Any, upload: Upload, folder: str) -> None:
        """Uploads a checkpoint from a folder that holds it."""
        place = "/".join(part for part in (self._checkpoint_path_prefix, upload.name) if part)
        client.log_artifacts(self._id, folder, place)
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
            self._experiment_id = str(number)
        else:
            client.update_run(self._id, "RUNNING")
            self._experiment_id = str(client.get_run(self._id).info.experiment_id)
            for key, value in self._tags.items():
                client.set_tag(self._id, key, value)
        return client
