"""WandbLogger, a logger to Weights & Biases, or to an offline folder for later upload."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from leyden.callbacks.loggers.checkpoint_uploads import CheckpointUploads, Upload
from leyden.callbacks.loggers.media import for_each, listed, rows_of
from leyden.callbacks.loggers.plain import HParams, flatten_hparams, json_value, plain_numbers, run_files
from leyden.callbacks.loggers.service_logger import ServiceLogger
from leyden.checkpoint.format.secrets import OWNERS
from leyden.core.errors import ConfigurationError, needs
from leyden.core.paths import local_path
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from wandb import Artifact, Run

    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

GLOBAL_STEP = "trainer/global_step"


class WandbLogger(ServiceLogger):
    """Logs to a Weights & Biases run. The first write imports wandb and starts the run.

    Offline use needs no account: the run is stored in `<save_dir>/wandb`, for a later `wandb sync`. A resume continues
    the same run id. Values logged after the checkpoint stay on the server, alongside those logged again at the same
    `trainer/global_step`. (Offline, each resume writes a new folder under the same id; `wandb sync --append` merges
    them.) The run stays open after a fit, so that a test can log to it too, until `finish` or the end of the process.

    Args:
        name: the display name of the run; None lets W&B choose one.
        save_dir: the parent of W&B's `wandb` folder; None for the Trainer's `default_root_dir`.
        version: an alias of `id`.
        offline: whether to write to the folder only; the same as `mode="offline"`.
        dir: an alias of `save_dir`.
        id: the id of a run to continue.
        project: the project name; None for the variable WANDB_PROJECT, or "leyden".
        log_model: which checkpoints of ModelCheckpoints to upload, as versions of one artifact of type "model". "all"
            uploads every checkpoint as it is saved. True uploads the checkpoints kept at the end of a successful fit,
            or every checkpoint as it is saved if `save_top_k=-1` keeps all. The best checkpoint has the alias "best",
            the newest one "latest". W&B copies the files, then uploads them in the background.
        experiment: a run of your own, started with `wandb.init`.
        prefix: a prefix for metric names, joined with "-".
        checkpoint_name: the artifact name; None for "model-<run id>".
        add_file_policy: "mutable" to copy checkpoint files before the upload. "immutable" to upload them without a
            copy, for checkpoints that are never deleted.
        mode: "online", "offline", "disabled" or "shared"; None for the variable WANDB_MODE, or online.
        **kwargs: passed to `wandb.init`: `entity`, `group`, `tags`, `config`, `settings`, ….

    Raises:
        ConfigurationError: if two arguments contradict each other, or an argument has an invalid value.

    Example:
        >>> logger = WandbLogger(project="digits", offline=True, log_model="all")
        >>> # Trainer(logger=logger).fit(…), then in another process:
        >>> # path = WandbLogger.download_artifact("me/digits/model-3fk2a9:best")
        >>> # Classifier.load_from_checkpoint(path)
    """

    id_name = "id"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        *,
        project: str | None = None,
        log_model: bool | Literal["all"] = False,
        experiment: Run | None = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        **kwargs: Any,
    ) -> None:
        if checkpoint_name is not None and re.fullmatch(r"[\w.-]{1,128}", checkpoint_name, re.ASCII) is None:
            raise ConfigurationError(
                f"WandbLogger(checkpoint_name={checkpoint_name!r}): use at most 128 letters, digits, '-', '_' and '.'."
            )
        if add_file_policy not in ("mutable", "immutable"):
            raise ConfigurationError(f"WandbLogger(add_file_policy={add_file_policy!r}): use 'mutable' or 'immutable'.")
        if offline and mode not in (None, "offline"):
            raise ConfigurationError(
                f"WandbLogger(offline=True, mode={mode!r}): the arguments contradict each other. Pass only one of them."
            )
        if version is not None and id is not None and version != id:
            raise ConfigurationError(
                f"WandbLogger(version={version!r}, id={id!r}): both name the run. Pass only one of them."
            )
        self._given_id = id if id is not None else version
        super().__init__(save_dir if save_dir is not None else dir, prefix, self._given_id, experiment)
        self._name = name
        self._project = project
        self._mode = "offline" if offline else mode
        self._uploads = CheckpointUploads(log_model, "WandbLogger")
        self._checkpoint_name = checkpoint_name
        self._add_file_policy = add_file_policy
        self._kwargs = kwargs
        self._is_own = experiment is None
        self._is_defined = False

    @property
    def name(self) -> str | None:
        """The project name."""
        return self._project or os.environ.get("WANDB_PROJECT") or "leyden"

    @property
    def version(self) -> str | None:
        """The run id; None before the run has started."""
        return self._id if self._experiment is None else str(self._experiment.id)

    @property
    def log_dir(self) -> str | None:
        """W&B's folder for this run; None before the run has started."""
        return None if self._experiment is None else os.path.dirname(str(self._experiment.dir))

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}(project={self._project!r}, name={self._name!r})"

    @property
    def experiment(self) -> Run:
        """The W&B run; on ranks that do not write, a no-op stand-in."""
        run: Run = super().experiment
        if self.is_writer and not self._is_defined:
            self._is_defined = True
            run.define_metric(GLOBAL_STEP)
            run.define_metric("*", step_metric=GLOBAL_STEP, step_sync=True)
        return run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.is_writer:
            return
        number = self._next_step(step)
        self.experiment.log({**plain_numbers(metrics, self._prefix), GLOBAL_STEP: number})

    def log_hyperparams(self, params: HParams, metrics: Mapping[str, float] | None = None) -> None:
        """Adds hyperparameters to the run's config, nested ones as "outer/inner", and metrics to its summary."""
        if not self.is_writer:
            return
        if flat := flatten_hparams(params):
            self.experiment.config.update(flat, allow_val_change=True)  # type: ignore[no-untyped-call]
        if metrics:
            self.experiment.summary.update(plain_numbers(metrics, self._prefix))

    def log_run(self, record: Mapping[str, Any], diff: str = "") -> None:
        """Adds the record to the run's config as "leyden", and saves `starts/<time>/run.json` and `diff.patch`."""
        if not self.is_writer:
            return
        run = self.experiment
        if run.disabled:
            # A disabled run has no folder.
            return
        run.config.update({"leyden": json_value(record)}, allow_val_change=True)  # type: ignore[no-untyped-call]
        for name, text in run_files(record, diff).items():
            path = Path(run.dir, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(OWNERS)
            path.write_text(text, encoding="utf-8", newline="")
            run.save(str(path), base_path=run.dir, policy="now")

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a table of rows, or a pandas DataFrame. Cells may hold media."""
        if not self.is_writer:
            return
        from wandb import Table

        rows = None if data is None else [list(row) for row in data]
        self._log_media(key, Table(None if columns is None else list(columns), rows, dataframe=dataframe), step)

    def log_text(
        self,
        key: str,
        columns: Sequence[str] | str | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs text, or a table of text, as a table.

        Args:
            key: the name of the text.
            columns: the text, or the column names of a table.
            data: the rows of a table.
            dataframe: a pandas DataFrame, in place of `columns` and `data`.
            step: number of optimizer steps done; None for the last step logged.
        """
        if isinstance(columns, str):
            columns, data = rows_of(columns, data, dataframe)
        self.log_table(key, columns, data, dataframe, step)

    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Logs images: arrays, tensors, PIL images or paths.

        Args:
            key: the name of the images.
            images: the images.
            step: number of optimizer steps done; None for the last step logged.
            **kwargs: lists of one `wandb.Image` argument per image: `caption`, `masks`, ….
        """
        self._log_each("image", key, images, step, kwargs)

    def log_audio(self, key: str, audios: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Logs audio clips: arrays or paths.

        Args:
            key: the name of the clips.
            audios: the clips.
            step: number of optimizer steps done; None for the last step logged.
            **kwargs: lists of one `wandb.Audio` argument per clip: `sample_rate`, `caption`.
        """
        self._log_each("audio", key, audios, step, kwargs)

    def log_video(self, key: str, videos: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Logs videos: arrays or paths.

        Args:
            key: the name of the videos.
            videos: the videos.
            step: number of optimizer steps done; None for the last step logged.
            **kwargs: lists of one `wandb.Video` argument per video: `caption`, `fps`, `format`.
        """
        self._log_each("video", key, videos, step, kwargs)

    def log_figure(self, key: str, figure: Any, step: int | None = None, close: bool = True) -> None:
        """Logs a Matplotlib figure as an image, and closes it unless `close` is False."""
        self.log_image(key, [figure], step)
        if close and self.is_writer:
            from matplotlib import pyplot

            pyplot.close(figure)

    def watch(
        self,
        model: nn.Module,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Logs histograms of gradients or parameters every `log_freq` batches, each read back from the device."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def unwatch(self, model: nn.Module) -> None:
        """Stops watching a model."""
        self.experiment.unwatch(model)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._uploads.check(trainer)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Uploads the checkpoints that `log_model` selects."""
        self._upload(self._uploads.after_save(checkpoint_callback))

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Artifact:
        """Records that the run uses an artifact, and returns the artifact.

        Args:
            artifact: the artifact name, such as "me/digits/model-3fk2a9:best".
            artifact_type: the artifact type, such as "model"; None for any.
        """
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool | None = True,
    ) -> str:
        """Downloads an artifact, and returns its folder. The folder of a checkpoint works as `ckpt_path`.

        Args:
            artifact: the artifact name, such as "me/digits/model-3fk2a9:best".
            save_dir: the folder to download to; None for a folder in W&B's `artifacts`.
            artifact_type: the artifact type, such as "model"; None for any.
            use_artifact: whether the open run, if any, records that it uses the artifact.
        """
        with needs("wandb", None, "WandbLogger"):
            import wandb
        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact, type=artifact_type)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return str(found.download(root=None if save_dir is None else local_path(save_dir, "save_dir")))

    def finalize(self, status: str) -> None:
        """Uploads the checkpoints that `log_model` selects, and ends a failed run. Others stay open until `finish`."""
        self._upload(self._uploads.at_end(status))
        if status == "failed" and self._is_own:
            self.finish(exit_code=1)

    def finish(self, exit_code: int = 0) -> None:
        """Ends the run, and waits until wandb has all of its data. Later logging continues the same run."""
        if self._experiment is not None and self.is_writer:
            self._id = str(self._experiment.id)
            self._experiment.finish(exit_code=exit_code)
            self._experiment, self._is_own, self._is_defined = None, True, False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and self._given_id in (None, state["id"]):
            super().load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # A run holds threads and files. A copy continues the run by its id.
        return {**vars(self), "_experiment": None, "_id": self.version, "_is_defined": False}

    def _upload(self, uploads: Sequence[Upload]) -> None:
        """Passes checkpoints to W&B. Under the "mutable" policy they may be deleted once this returns."""
        for upload in uploads:
            run = self.experiment
            from wandb import Artifact

            artifact = Artifact(self._checkpoint_name or f"model-{run.id}", "model", metadata=upload.metadata)
            # The checkpoint already exists on disk, so W&B's cache does not need another copy.
            artifact.add_dir(upload.path, skip_cache=True, policy=self._add_file_policy)
            run.log_artifact(artifact, aliases=upload.aliases)

    def _log_each(
        self, what: str, key: str, items: Sequence[Any], step: int | None, options: Mapping[str, Sequence[Any]]
    ) -> None:
        items = listed(items, what)
        each = for_each(options, len(items), what)
        if not self.is_writer:
            return
        import wandb

        kind = {"image": wandb.Image, "audio": wandb.Audio, "video": wandb.Video}[what]
        self._log_media(key, [kind(item, **own) for item, own in zip(items, each, strict=True)], step)

    def _log_media(self, key: str, value: Any, step: int | None) -> None:
        self.experiment.log({self._named(key): value, GLOBAL_STEP: self._step_of(step)})

    def _begin(self) -> Run:
        with needs("wandb", None, "WandbLogger"):
            import wandb
        if wandb.run is not None and self._id in (None, wandb.run.id):
            if self._id is None:
                warn(
                    f"WandbLogger continues the open run {wandb.run.id}. To start a new run, call wandb.finish() "
                    "first. To continue this one without a warning, pass experiment=wandb.run."
                )
            self._is_own = False
            return wandb.run
        os.makedirs(self.save_dir, exist_ok=True)
        settings: dict[str, Any] = {
            "name": self._name,
            "project": self.name,
            "dir": self.save_dir,
            "id": self._id,
            "mode": self._mode,
            # Offline there is no server to ask, so wandb would only warn.
            "resume": "allow" if self._id is not None and self._mode != "offline" else None,
        }
        return wandb.init(**settings | self._kwargs)
