"""ModelCheckpoint, the callback that decides when to save checkpoints, how to name them, and which ones to keep."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.checkpoint_commit import (
    BackgroundSave,
    FolderStorage,
    after_commit,
    follows,
    link_to_move,
    notify_loggers,
    report_of,
    storage_of,
)
from leyden.callbacks.checkpointing.checkpoint_name import NameStyle, folders_in, metrics_in
from leyden.callbacks.checkpointing.on_exception_checkpoint import can_save_after, save_after
from leyden.callbacks.checkpointing.save_schedule import SaveSchedule, check_arguments
from leyden.callbacks.checkpointing.saved_ranking import (
    best_of,
    number_of,
    read_ranking,
    score_of,
    tensor_of,
    worst_of,
    write_scores,
)
from leyden.callbacks.early_stopping import missing_metric, validates
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format.bucket import BucketPath, absolute, place_of
from leyden.checkpoint.format.errors import CheckpointError
from leyden.core.errors import ConfigurationError
from leyden.core.given import checks_names
from leyden.core.rank_zero import inform, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

COPIES = "local_copies"
"""The folder of local copies in `default_root_dir`, or in the current folder if that is in a bucket."""
RANKING = (
    *("best_model_path", "best_model_score", "last_model_path", "current_score", "best_k_models"),
    *("_recent", "_to_delete", "_saved_step", "_saved_batch", "_saved_at"),
)
"""Attributes that a failed save must leave unchanged."""


class ModelCheckpoint(Callback):
    """Saves checkpoints during fit and keeps the best or the newest ones.

    A checkpoint is a folder. An old checkpoint is deleted only after the new one is committed. Each checkpoint includes
    the ranking with itself in it, so a resumed run ranks and deletes exactly as an uninterrupted run does. Other runs'
    checkpoints in the same folder are neither ranked nor deleted.

    Args:
        dirpath: the folder to save in, or its URL in a bucket. None: `checkpoints` in the run's folder
            (`Trainer.run_folder`), or below `default_root_dir` if that is a URL.
        filename: template of the name, with `{epoch}`, `{step}` and logged metrics, such as "{epoch}-{val_loss:.2f}".
            None: "{epoch}-{step}". A `/` creates a subfolder ("fold-1/{epoch}"); in a metric's name it becomes `_`.
        monitor: the metric to rank by. None keeps the newest checkpoints.
        verbose: print a line for each save.
        save_last: also keep the newest checkpoint even if it is not among the best, save at the end of the run (Ctrl-C
            included), and point a symlink `last` to it where symlinks are supported. "link" is a synonym for True.
        save_top_k: the number of checkpoints to keep; -1 for all, 0 for none (except the one of `save_last`).
        save_on_exception: also save when fit ends with an exception; the name follows `filename`.
        save_weights_only: omit optimizers, progress and random number states. Such a checkpoint cannot be resumed.
        trainable_only: leave out weights that are frozen and that training has not changed, such as the model under
            adapters. The checkpoint holds their digests, and a resume checks that the script has built the same ones.
            Those of `save_on_exception` hold all weights.
        mode: "min" if lower values of the metric are better, "max" if higher values are. nan ranks worst.
        auto_insert_metric_name: "{epoch}" becomes `epoch=3`; otherwise `3`.
        every_n_train_steps: save after every n-th optimizer step; 0 for never. With a `monitor`, a save due at the same
            step as a validation waits for that validation.
        train_time_interval: minimum time between saves, as a timedelta, "DD:HH:MM:SS" or a dict.
        every_n_epochs: save in every n-th epoch; 0 for never. At most one of these three may be given; with none of
            them, it is 1.
        save_on_train_epoch_end: with `every_n_epochs`, save at the end of training epochs instead of after validations.
            None: at the end of epochs if there is no validation, or if each epoch ends with its only validation.
        enable_version_counter: append `-v1`, `-v2`, … to a taken name. False overwrites the existing checkpoint.
        save_on_each_node: keep a complete set of checkpoints on each machine. fit requires this if the machines do not
            share the folder; if they do, it has no effect.
        asynchronous: write checkpoints in a background thread; see docs/checkpoints.md. The paths below are set when
            the save starts; old checkpoints are deleted once it is committed. None: True with `local_copy`, else
            decided by the Trainer's plugins.
        local_copy: complete each checkpoint of a bucket below the Trainer's local folder first, then upload it. A
            resume takes the newer of both; see docs/checkpoints.md.

    Raises:
        ConfigurationError: for an invalid argument or combination; at a save, if `monitor` was never logged.
        CheckpointError: if a checkpoint cannot be written. Earlier checkpoints stay intact.

    Attributes:
        best_model_path: the best checkpoint kept (the newest without a `monitor`); "" if there is none.
        best_model_score: its score, a 0-d tensor; None if there is none.
        last_model_path: the newest checkpoint; "" if there is none.
        current_score: the most recent score, whether or not a checkpoint was saved with it.
        best_k_models: path → score of the checkpoints kept for their score.

    Example:
        >>> checkpoint = ModelCheckpoint(filename="{epoch}-{val_acc:.3f}", monitor="val_acc", mode="max", save_top_k=3)
        >>> checkpoint.format_checkpoint_name({"epoch": 2, "val_acc": 0.98412})
        'epoch=2-val_acc=0.984'
    """

    order: ClassVar[int] = 200
    state_per_rank = False
    CHECKPOINT_NAME_LAST = "last"
    """Template for the name of the symlink to the newest checkpoint."""
    CHECKPOINT_JOIN_CHAR, CHECKPOINT_EQUALS_CHAR, FILE_EXTENSION, STARTING_VERSION = "-", "=", "", 1

    @checks_names
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | str | Mapping[str, float] | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        save_on_each_node: bool = False,
        asynchronous: bool | None = None,
        trainable_only: bool = False,
        local_copy: bool = False,
    ) -> None:
        check_arguments(monitor, mode, save_top_k, save_last)
        self._given_dirpath = None if dirpath is None else absolute(dirpath, "dirpath")
        self._bucket: BucketPath | None = None
        self.dirpath, self._storage = self._given_dirpath, FolderStorage()
        self.filename = self._default_name if filename is None else filename
        self.monitor, self.mode = monitor, mode
        self.verbose = verbose
        self.save_last, self.save_top_k = save_last, save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only, self.trainable_only = save_weights_only, trainable_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self._style.check(self.filename)
        self.enable_version_counter, self.save_on_each_node = enable_version_counter, save_on_each_node
        self.asynchronous = True if local_copy and asynchronous is None else asynchronous
        self.local_copy = local_copy
        self._copies = COPIES
        """The folder on this machine below which the local copies of all buckets lie."""
        self._background_save: BackgroundSave | None = None
        """The last asynchronous save until its outcome is recorded; else None."""
        self._last_link: Path | None = None
        """The symlink to the newest checkpoint."""
        self._loggers_due = False
        """True if an asynchronous save is committed but the loggers have not been notified."""
        self.saves_on_each_node = False
        """True if the machines of this run do not share the folder."""
        self.copies_on_each_node = False
        """True if the machines of this run do not share the folder of local copies."""
        self._schedule = SaveSchedule(
            every_n_train_steps, every_n_epochs, train_time_interval, save_on_train_epoch_end, monitor is not None
        )
        self.load_state_dict({})

    @property
    def uses_run_folder(self) -> bool:  # type: ignore[override]
        """True if the checkpoints go to the run's folder, and not to one that the user has named."""
        return self._given_dirpath is None and self._bucket is None

    def save_below(self, bucket: BucketPath | None, local_root: str) -> None:
        """Saves below a folder in a bucket, the Trainer's `default_root_dir`, if there is no `dirpath`.

        `local_root` is the folder for the local files of the Trainer's runs.
        """
        self._bucket, self._copies = bucket, os.path.abspath(os.path.join(local_root, COPIES))
        folder = self.folder_below("")
        if self.local_copy and not isinstance(place_of(folder, "dirpath"), BucketPath):
            where = "the run's folder" if self._given_dirpath is None else folder
            raise ConfigurationError(
                f"ModelCheckpoint(local_copy=True): checkpoints go to {where}, which is no bucket. Leave local_copy "
                "out, or pass the URL of a bucket as dirpath or as Trainer(default_root_dir=…)."
            )

    def keep_on_each_node(self, checkpoints: bool, copies: bool) -> None:
        """Records whether every machine has its own folder of checkpoints, and of local copies."""
        self.saves_on_each_node, self.copies_on_each_node = checkpoints, copies

    @property
    def copied(self) -> tuple[BucketPath, Path] | None:
        """The folder of checkpoints and that of their local copies; None without `local_copy`."""
        folder = place_of(self.folder_below(""), "dirpath") if self.local_copy else None
        if not isinstance(folder, BucketPath):
            return None
        return folder, Path(self._copies, *str(folder).split("://"))

    @property
    def state_key(self) -> str:
        # Lightning's key, and what else tells two ModelCheckpoints of one run apart.
        is_named = self.filename != self._default_name
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._schedule.steps,
            every_n_epochs=self._schedule.epochs,
            train_time_interval=self._schedule.seconds,
            **({"filename": self.filename} if is_named else {}),
            **({"save_weights_only": True} if self.save_weights_only else {}),
            **({"trainable_only": True} if self.trainable_only else {}),
        )

    @property
    def _former_state_key(self) -> str:
        parts = {
            "monitor": self.monitor,
            "mode": self.mode,
            "filename": self.filename,
            "every_n_train_steps": self._schedule.steps,
            "every_n_epochs": self._schedule.epochs,
            "train_time_interval": self._schedule.seconds,
            "save_weights_only": self.save_weights_only,
        }
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in parts.items())})"

    @property
    def _default_name(self) -> str:
        return f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Writes `best_k_models` as YAML; by default to `best_k_models.yaml` in the checkpoint folder."""
        write_scores(self.best_k_models, filepath, self.dirpath)

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the ranked checkpoints; "" while fewer than `save_top_k` are kept (for -1: while none is)."""
        is_full = self.save_top_k != 0 and len(self.best_k_models) >= max(1, self.save_top_k)
        return worst_of(self.best_k_models, self.mode) if is_full else ""

    @property
    def kth_value(self) -> Tensor:
        """The score of `kth_best_model_path`, which a new checkpoint must beat unless `save_top_k` is -1."""
        path = self.kth_best_model_path
        return self.best_k_models[path] if path else torch.tensor(math.inf if self.mode == "min" else -math.inf)

    @property
    def every_n_epochs(self) -> int:
        """Epochs between saves; 0 for never."""
        return self._schedule.epochs

    @property
    def depth(self) -> int:
        """Number of subfolder levels in `filename`."""
        return len(folders_in(self.filename)) - 1

    # state ------------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        self._record_background_save()
        return {
            "dirpath": self.dirpath,
            "monitor": self.monitor,
            "mode": self.mode,
            "best_model_path": self._relative(self.best_model_path),
            "best_model_score": number_of(self.best_model_score),
            "current_score": number_of(self.current_score),
            "last_model_path": self._relative(self.last_model_path),
            "best_k_models": {self._relative(path): float(score) for path, score in self.best_k_models.items()},
            "recent": [self._relative(path) for path in self._recent],
            "doomed": {self._relative(path): identity for path, identity in self._to_delete.items()},
            "saved_step": self._saved_step,
            "saved_batch": self._saved_batch,
            "seconds_since_save": None if self._saved_at is None else time.monotonic() - self._saved_at,
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        read_ranking(state, self.dirpath)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = read_ranking(state, self.dirpath)
        if saved.previous_folder is not None:
            warn(
                f"earlier checkpoints of this run are in {saved.previous_folder}, and new ones go to {self.dirpath}. "
                "The earlier ones are neither ranked nor deleted."
            )
        self.best_model_path = saved.best_model_path
        self.best_model_score = score_of(saved.best_model_score)
        self.current_score = score_of(saved.current_score)
        self.last_model_path = saved.last_model_path
        # Checkpoints that the user or another run has deleted since the save leave the ranking.
        self.best_k_models: dict[str, Tensor] = {
            path: tensor_of(score) for path, score in saved.ranked.items() if self._storage.exists(path)
        }
        self._recent: list[str] = [path for path in saved.recent if self._storage.exists(path)]
        self._to_delete: dict[str, str | None] = {
            path: identity for path, identity in saved.to_delete.items() if identity is not None
        }
        unread = [path for path in saved.to_delete if path not in self._to_delete and self._storage.exists(path)]
        if unread:
            warn(
                f"{', '.join(unread)} left the ranking, but could not be read then, and may be another run's by now. "
                "Delete what you do not need."
            )
        self._saved_step, self._saved_batch = saved.saved_step, saved.saved_batch
        self._seen_step = 0
        age = saved.seconds_since_save
        self._saved_at: float | None = None if age is None else time.monotonic() - age

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps the current ranking: its checkpoints still exist, and each score still belongs to its weights."""
        self._seen_step = step
        # Steps after the checkpoint run again with different weights, so they must be saved again.
        self._saved_step = -1 if self._saved_step > step else self._saved_step

    def _relative(self, path: str) -> str:
        home = os.path.join(self.dirpath or "", "")
        return path.removeprefix(home) if self.dirpath is not None else path

    # when to save -----------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._storage = storage_of(trainer)
        if self.local_copy and trainer.checkpoint_io is not None:
            raise ConfigurationError(
                f"ModelCheckpoint(local_copy=True) does not work with {type(trainer.checkpoint_io).__name__}, which "
                "stores checkpoints itself: leave out one of them."
            )
        if self.uses_run_folder and trainer.run_folder is None and stage != "fit":
            return
        folder = self.folder_of(trainer)
        self.dirpath = folder if self.saves_on_each_node else trainer.strategy.ranks.broadcast(folder)
        if stage == "fit" and not trainer.fast_dev_run:
            self._ranks(trainer).keep(self._make_folder)
            if self.copied is not None:
                copies = self.copied[1]
                ranks = CheckpointRanks(trainer.strategy, copies, self.copies_on_each_node)
                ranks.keep(lambda: self._make_copies(copies))

    def saves_within(self, trainer: Trainer) -> bool:
        """Returns True if this callback is expected to save resumable checkpoints before the fit ends."""
        if self.save_weights_only or not (self.save_top_k or self.save_last):
            return False
        return self._schedule.saves_within(trainer)

    def folder_of(self, trainer: Trainer) -> str:
        """Returns the folder in which a run of this Trainer saves checkpoints."""
        return self.folder_below(trainer.run_folder or trainer.default_root_dir)

    def folder_below(self, root: str) -> str:
        """Returns the folder in which a run with this folder saves checkpoints."""
        return self._given_dirpath or absolute(os.path.join(str(self._bucket or root), "checkpoints"), "dirpath")

    def _ranks(self, trainer: Trainer) -> CheckpointRanks:
        return CheckpointRanks(trainer.strategy, self.dirpath or "checkpoints", self.saves_on_each_node)

    def _make_folder(self) -> None:
        """Creates the folder up front, so a failure surfaces before training and not after the first epoch."""
        assert self.dirpath is not None
        if "?" in self.filename and isinstance(place_of(self.dirpath, "dirpath"), BucketPath):
            raise ConfigurationError(
                f"ModelCheckpoint(filename={self.filename!r}): in a URL, a ? begins parameters such as signatures, "
                f"which are refused. Leave it out, since checkpoints go to {self.dirpath}."
            )
        self._storage.make(self.dirpath)
        self._style.check_length(self.filename, self.dirpath)

    def _make_copies(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                folder,
                f"cannot be created for local_copy=True ({error.strerror}). Change Trainer(default_root_dir=…), or the "
                "current folder if that is a URL.",
            ) from error
        self._style.check_length(self.filename, folder)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._saved_at is None:
            self._saved_at = time.monotonic()
        self._seen_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._background_save is not None and self._background_save.save.is_done:
            trainer.finish_saving()
            self._finish_background_save(trainer)
        schedule = self._schedule
        if not schedule.steps and schedule.seconds is None:
            return
        # In manual optimization a batch may end without a step.
        stepped, self._seen_step = trainer.global_step != self._seen_step, trainer.global_step
        may_save = trainer.window.closes and (stepped or not schedule.steps)
        if may_save and schedule.is_due_by_step(trainer, self._saved_at) and not schedule.waits_for_validation(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        # Before the first batch (`validate_at_start`) there is nothing to keep.
        if trainer.sanity_checking or trainer.state.stage != "fit" or not trainer.progress.batches:
            return
        schedule = self._schedule
        by_step = self.monitor is not None and schedule.is_due_by_step(trainer, self._saved_at)
        if by_step or schedule.is_due_after_validation(trainer):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._schedule.is_due_at_epoch_end(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        # All ranks must complete the exchange in flight.
        self._schedule.end()
        self._finish_background_save(trainer)
        if self.save_last:
            # The metrics may be older than the weights, so it is not ranked. No training is left to overlap a write.
            self._save(trainer, may_rank=False, asynchronous=False)

    def secure(self, trainer: Trainer) -> bool:
        """Returns True if `ckpt_path="last"` or "auto" can resume the run from the current batch.

        With `save_last`, which saves at the end of a run anyway, it saves now.
        """
        if self.save_weights_only:
            return False
        if self.save_last:
            self._save(trainer, may_rank=False, asynchronous=False)
        return self.has_saved(trainer)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._finish_background_save(trainer)
        if not self.save_on_exception or self.dirpath is None or self._saved_step == trainer.global_step:
            return
        if not can_save_after(trainer, exception):
            return
        logged, values = trainer.callback_metrics, {}
        # After a device error no metric can be read back, and the name goes without them.
        with suppress(Exception):
            values = trainer.read_metrics({name: logged[name] for name in metrics_in(self.filename) if name in logged})
        values = {**values, "epoch": trainer.progress.epoch, "step": trainer.global_step}
        path = self._free_path(self._style.name(self.filename, values))
        written = save_after(trainer, path, exception, self.save_weights_only)
        if written is not None and self.verbose:
            inform(f"saved {written} after {type(exception).__name__}", trainer.print)

    def has_saved(self, trainer: Trainer) -> bool:
        """Returns True if this callback has saved the current batch."""
        return self._saved_batch == trainer.progress.batches

    def finish_saves(self, trainer: Trainer, event: str, owes: bool) -> None:
        """Links, deletes and saves what a kill prevented after the commit of the checkpoint that this run resumes.

        The event is the hook that saved the checkpoint. If a ModelCheckpoint saved it, others may have been due after
        it, and the run owes their saves.
        """
        values = self._values(trainer) if self.save_last else {}
        if self._ranks(trainer).is_keeper:
            link = link_to_move(self._link(values), self.last_model_path)
            self._to_delete = after_commit(self.last_model_path, link, None, self._to_delete, self._storage)
        is_stale = event == "on_train_batch_end" and self._saved_step == trainer.global_step
        if owes and not is_stale and self._schedule.is_due_in(trainer, event):
            kept = {path for callback in trainer.checkpoint_callbacks for path in callback.kept_checkpoints()}
            # The kill may have come after the commit: that checkpoint is written again, not beside it.
            self._save(trainer, asynchronous=False, is_own=lambda path: path not in kept and follows(path, trainer))

    # saving -----------------------------------------------------------------------------------------------------------
    def _save(
        self,
        trainer: Trainer,
        may_rank: bool = True,
        asynchronous: bool | None = None,
        is_own: Callable[[str], bool] = lambda path: False,
    ) -> None:
        """Saves a checkpoint unless it would not be kept, or this batch already has one.

        `asynchronous` overrides the callback's own. `is_own` returns True for an existing checkpoint that this very
        save wrote before a kill.
        """
        if trainer.fast_dev_run or self.has_saved(trainer):
            return
        values = self._values(trainer)
        is_ranked = may_rank and self._is_among_best(self._score(trainer, values))
        if is_ranked or self.save_last:
            # Only one save runs at a time, and the previous one must exist before a free name is chosen.
            trainer.finish_saving()
            self._finish_background_save(trainer)
        # Only rank 0 is sure to see the folder, so it decides.
        decides = trainer.is_global_zero and (is_ranked or self.save_last)
        path = self._path(values, is_ranked, is_own) if decides else None
        decision = is_ranked, path and self._relative(path), path is not None and self._storage.is_taken(path)
        is_ranked, name, replaces = trainer.strategy.ranks.broadcast(decision)
        if name is None:
            return
        path = os.path.join(self.dirpath or "", name)
        asynchronous = self.asynchronous if asynchronous is None else asynchronous
        with self._restored_on_failure() as ranking_before:
            self._enter(path, trainer, is_ranked)
            options: Any = {"trainable_only": self.trainable_only, "overwrite": replaces, "asynchronous": asynchronous}
            written = str(trainer.save_checkpoint(path, self.save_weights_only, **options))
            if written != path:
                self._rename(path, written)
        is_keeper, save = self._ranks(trainer).is_keeper, trainer.pending_save
        old_link, self._last_link = self._last_link, self._link(values)
        if self.verbose:
            verb = "saved" if save is None else "saving"
            inform(report_of(self, written, trainer.global_step, is_ranked, verb), trainer.print)
        if save is not None:
            to_delete = dict(self._to_delete)
            background = BackgroundSave(
                save, written, ranking_before, to_delete, self._last_link, old_link, is_keeper, self._storage
            )
            self._background_save = background
            save.follow(background.finish)
        else:
            links = self._last_link, old_link
            self._to_delete = after_commit(written, *links, self._to_delete, self._storage) if is_keeper else {}
            notify_loggers(trainer, self)

    def _finish_background_save(self, trainer: Trainer) -> None:
        """Records the outcome of a completed background save, and notifies the loggers if it was committed."""
        self._record_background_save()
        if self._loggers_due:
            self._loggers_due = False
            notify_loggers(trainer, self)

    def _record_background_save(self) -> None:
        """Updates the ranking with the outcome of a background save; a no-op while the save is in flight."""
        background = self._background_save
        if background is None or not background.save.is_done:
            return
        self._background_save = None
        self._loggers_due = background.save.error is None
        if background.save.error is not None:
            self._restore_ranking(background.ranking_before)
            return
        self._to_delete = background.to_delete
        if str(background.save.path) != background.path:
            self._rename(background.path, str(background.save.path))

    def _values(self, trainer: Trainer) -> dict[str, float]:
        """Returns the epoch, the step and the metrics that the name and the ranking use, with a single read-back."""
        logged = trainer.callback_metrics
        wanted = {*metrics_in(self.filename), *metrics_in(self.CHECKPOINT_NAME_LAST), self.monitor}
        found = {name: logged[name] for name in sorted(logged) if name in wanted}
        values = trainer.read_metrics(found) if found else {}
        # Ranks must agree on the name and the ranking, even if they logged different values.
        values = dict(trainer.strategy.ranks.broadcast(values))
        return {**values, "epoch": trainer.progress.epoch, "step": trainer.global_step}

    def _score(self, trainer: Trainer, values: Mapping[str, float]) -> float | None:
        """Returns the monitored value, with nan as the worst possible one; None if there is nothing to rank by."""
        if self.monitor is None:
            return None
        if self.monitor not in values:
            message = missing_metric("ModelCheckpoint", self.monitor, trainer)
            if validates(trainer) and trainer.progress.validations == 0:
                # The first validation may still log it.
                warn(f"{message} This checkpoint is not ranked.")
                self.current_score = None
                return None
            raise ConfigurationError(message)
        score = values[self.monitor]
        if math.isnan(score):
            if trainer.is_global_zero:
                warn(f"ModelCheckpoint monitors {self.monitor!r}, which is nan and ranks worst.")
            score = math.inf if self.mode == "min" else -math.inf
        self.current_score = tensor_of(score)
        return score

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | float | None = None) -> bool:
        """Returns True if a checkpoint with this score would be kept for it."""
        return self._is_among_best(None if current is None else float(current))

    def _is_among_best(self, score: float | None) -> bool:
        if self.save_top_k == 0 or (self.monitor is not None and score is None):
            return False
        if score is None or self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        worst = float(self.kth_value)
        return score < worst if self.mode == "min" else score > worst

    # the ranking ------------------------------------------------------------------------------------------------------
    def _enter(self, path: str, trainer: Trainer, is_ranked: bool) -> None:
        """Ranks a checkpoint that is about to be written, and marks those that it replaces for deletion."""
        kept_before = self.kept_checkpoints()
        if is_ranked and self.monitor is None:
            self._recent = [*(old for old in self._recent if old != path), path]
            if self.save_top_k > 0:
                self._recent = self._recent[-self.save_top_k :]
            self.best_model_path = path
        elif is_ranked:
            assert self.current_score is not None
            self.best_k_models = {**self.best_k_models, path: self.current_score}
            if 0 < self.save_top_k < len(self.best_k_models):
                others = {key: score for key, score in self.best_k_models.items() if key != path}
                del self.best_k_models[worst_of(others, self.mode)]
            self.best_model_path = best_of(self.best_k_models, self.mode)
            self.best_model_score = self.best_k_models[self.best_model_path]
        self.last_model_path = path
        self._saved_step, self._saved_batch = trainer.global_step, trainer.progress.batches
        self._saved_at = time.monotonic()
        for old in kept_before - self.kept_checkpoints():
            self._to_delete[old] = None
            with suppress(CheckpointError):
                self._to_delete[old] = self._storage.identity(old)

    def kept_checkpoints(self) -> set[str]:
        """Returns the paths of all checkpoints that this callback keeps."""
        newest = {self.last_model_path} if self.save_last and self.last_model_path else set()
        return {*self.best_k_models, *self._recent} | newest

    def _rename(self, path: str, written: str) -> None:
        """Replaces `path` with the path written, if another process took the name between our check and the commit."""
        self.best_k_models = {written if key == path else key: score for key, score in self.best_k_models.items()}
        self._recent = [written if key == path else key for key in self._recent]
        self.last_model_path = written
        if self.best_model_path == path:
            self.best_model_path = written

    @contextmanager
    def _restored_on_failure(self) -> Iterator[dict[str, Any]]:
        """Restores the ranking if the block raises. Yields the ranking as it was."""
        before = {name: copy.copy(getattr(self, name)) for name in RANKING}
        try:
            yield before
        except BaseException:
            self._restore_ranking(before)
            raise

    def _restore_ranking(self, before: Mapping[str, Any]) -> None:
        for name, value in before.items():
            setattr(self, name, value)

    # names ------------------------------------------------------------------------------------------------------------
    def format_checkpoint_name(
        self,
        metrics: Mapping[str, float | Tensor],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Returns the name of a checkpoint with these metrics; its full path once `dirpath` is known.

        Args:
            metrics: values for the template, including "epoch" and "step".
            filename: a template to use in place of the callback's own.
            ver: a version to append, as `-v<ver>`.
            prefix: text to prepend, with a dash.
        """
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        name = self._style.name(self.filename if filename is None else filename, values, ver, prefix)
        return name if self.dirpath is None else os.path.join(self.dirpath, name)

    @property
    def _style(self) -> NameStyle:
        equals = self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None
        return NameStyle(equals, self.CHECKPOINT_JOIN_CHAR, self.FILE_EXTENSION)

    def _path(self, values: Mapping[str, float], is_ranked: bool, is_own: Callable[[str], bool]) -> str:
        name = self._style.name(self.filename, values)
        replaceable = self._replaceable(name, is_ranked)
        return self._free_path(name, lambda path: path in replaceable or is_own(path))

    def _replaceable(self, name: str, is_ranked: bool) -> set[str]:
        """Returns the paths that the new checkpoint may overwrite: the save would delete them anyway."""
        assert self.dirpath is not None
        evicted = ""
        if is_ranked and self.save_top_k > 0:
            is_full = self.save_top_k <= len(self._recent)
            evicted = self._recent[0] if is_full else self.kth_best_model_path
        protected = {*self.best_k_models, *self._recent} - {evicted}
        candidates = {evicted, self.last_model_path} if self.save_last else {evicted}
        if not self.enable_version_counter:
            candidates.add(os.path.join(self.dirpath, name))
            # An unranked checkpoint must not overwrite one that is kept for its score.
            protected = set() if is_ranked else protected
        return candidates - protected

    def _free_path(self, name: str, is_replaceable: Callable[[str], bool] = lambda path: False) -> str:
        """Returns the path for `name`, with a version appended if it exists and is not replaceable."""
        assert self.dirpath is not None
        path = os.path.join(self.dirpath, name)
        version = self.STARTING_VERSION
        while self._storage.is_taken(path) and not is_replaceable(path):
            path = os.path.join(self.dirpath, self._style.numbered(name, version))
            version += 1
        return path

    def _link(self, values: Mapping[str, float]) -> Path | None:
        """Returns the path of the symlink to the newest checkpoint; None without `save_last`, and in a bucket."""
        assert self.dirpath is not None
        folder = place_of(self.dirpath, "dirpath")
        if not self.save_last or isinstance(folder, BucketPath):
            return None
        return folder / self._style.name(self.CHECKPOINT_NAME_LAST, values)
