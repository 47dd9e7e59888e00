"""ModelCheckpoint, a callback that decides when checkpoints are saved, how they are named, and which ones are kept."""

from __future__ import annotations

import copy
import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.checkpoint_arguments import check_arguments, triggers
from leyden.callbacks.checkpointing.checkpoint_books import number_of, read_books, score_of, write_scores
from leyden.callbacks.checkpointing.checkpoint_commit import (
    Folders,
    Following,
    after_commit,
    delete_each,
    kept_in,
    notify_loggers,
    report_of,
)
from leyden.callbacks.checkpointing.checkpoint_name import NameStyle, folders_in, metrics_in
from leyden.callbacks.checkpointing.on_exception_checkpoint import can_save_after, save_after
from leyden.callbacks.early_stopping import missing_metric, validates, validates_at_epoch_end
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.arguments.given import checks_names
from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.format.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

# Attributes that a failed save must not change.
RANKING = (
    *("best_model_path", "best_model_score", "last_model_path", "current_score", "best_k_models"),
    *("_recent", "_doomed", "_saved_step", "_saved_batch", "_saved_at"),
)


class ModelCheckpoint(Callback):
    """Saves checkpoints during fit, and keeps the best or the newest ones.

    A checkpoint is a folder. An old one is deleted only after the new one is committed. Each checkpoint holds the
    ranking, itself included, so a resumed run ranks and deletes like an uninterrupted one. Checkpoints of other runs in
    the same folder are neither ranked nor deleted.

    Args:
        dirpath: the folder to save in. None for `checkpoints` in the Trainer's `default_root_dir`, whatever the logger.
        filename: template of the name, with `{epoch}`, `{step}` and logged metrics, such as "{epoch}-{val_loss:.2f}".
            None for "{epoch}-{step}". A `/` makes a folder, as in "fold-1/{epoch}"; in the name of a metric it becomes
            `_`.
        monitor: the metric to rank by. None keeps the newest checkpoints.
        verbose: print what is saved.
        save_last: also keep the newest checkpoint, even if it is not among the best, save at the end of the run (Ctrl-C
            included), and point the link `last` to it if the file system has links. "link" means the same.
        save_top_k: the number of checkpoints to keep; -1 for all, 0 for none (except `save_last`'s).
        save_on_exception: also save when fit ends with an exception, under the same template.
        save_weights_only: leave out optimizers, progress and random numbers; such a checkpoint cannot be resumed.
        mode: "min" if a smaller metric is better, "max" if a larger one is. nan ranks as the worst.
        auto_insert_metric_name: "{epoch}" becomes `epoch=3`; otherwise `3`.
        every_n_train_steps: save after every n-th optimizer step; 0 for never. With a `monitor` and a validation due
            after the same step, save after that validation.
        train_time_interval: save when this much time has passed since the last save: a timedelta, "DD:HH:MM:SS" or a
            dict.
        every_n_epochs: save in every n-th epoch; 0 for never. 1 if none of these three is given; at most one may be.
        save_on_train_epoch_end: save at the end of training epochs instead of validations, for `every_n_epochs`. None:
            at the end of epochs if each ends with its only validation, or there is no validation.
        enable_version_counter: append `-v1` and so on to a name that is taken; False replaces what is there.
        save_on_each_node: each machine keeps whole checkpoints of its own. fit requires this on machines that share no
            folder; if they share one, it changes nothing.
        asynchronous: a thread writes checkpoints beside the training; see docs/checkpoints.md. The paths below are
            known before it is done, and old checkpoints are deleted after it. None for what the Trainer's plugins say.

    Raises:
        ConfigurationError: for an invalid argument or combination; at a save if `monitor` was never logged.
        CheckpointError: if a checkpoint cannot be written. The previous ones stay whole.

    Attributes:
        best_model_path: the best checkpoint kept (without `monitor`: the newest); "" if there is none.
        best_model_score: its score, a 0-d tensor, or None.
        last_model_path: the newest checkpoint; "" if there is none.
        current_score: the last score seen, saved or not.
        best_k_models: path → score of the checkpoints that are kept for their score.

    Example:
        >>> checkpoint = ModelCheckpoint(filename="{epoch}-{val_acc:.3f}", monitor="val_acc", mode="max", save_top_k=3)
        >>> checkpoint.format_checkpoint_name({"epoch": 2, "val_acc": 0.98412})
        'epoch=2-val_acc=0.984'
    """

    order: ClassVar[int] = 200
    state_per_rank = False
    CHECKPOINT_NAME_LAST = "last"
    """Template of the link's name."""
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
    ) -> None:
        check_arguments(monitor, mode, save_top_k, save_last)
        self._given_dirpath = None if dirpath is None else os.path.abspath(os.path.expanduser(os.fspath(dirpath)))
        self.dirpath, self._place = self._given_dirpath, Folders()
        self.filename = f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}" if filename is None else filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self._style.check(self.filename)
        self.enable_version_counter = enable_version_counter
        self.save_on_each_node = save_on_each_node
        self.asynchronous = asynchronous
        self._following: Following | None = None
        """Its own save that a thread writes; None once that is known to be done."""
        self._is_unreported = False
        """Such a save is committed, and the loggers have not been notified."""
        self.saves_on_each_node = False
        """True if the machines of this run share no folder."""
        self._on_train_epoch_end = save_on_train_epoch_end
        self._every_n_train_steps, self._every_n_epochs, self._interval = triggers(
            every_n_train_steps, every_n_epochs, train_time_interval
        )
        self._asked: Callable[[], list[bool]] | None = None
        """Returns whether a save is due by time, as the first rank decided at the end of the last window."""
        self.load_state_dict({})

    @property
    def state_key(self) -> str:
        parts = {
            "monitor": self.monitor,
            "mode": self.mode,
            "filename": self.filename,
            "every_n_train_steps": self._every_n_train_steps,
            "every_n_epochs": self._every_n_epochs,
            "train_time_interval": self._interval,
            "save_weights_only": self.save_weights_only,
        }
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in parts.items())})"

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Writes `best_k_models` to a file; by default to `best_k_models.yaml` in the folder of the checkpoints."""
        write_scores(self.best_k_models, filepath, self.dirpath)

    @property
    def kth_best_model_path(self) -> str:
        """The worst checkpoint kept for its score, once `save_top_k` are kept (-1: at any time); "" before."""
        full = self.save_top_k != 0 and len(self.best_k_models) >= max(1, self.save_top_k)
        return self._worst_of(self.best_k_models) if full else ""

    @property
    def kth_value(self) -> Tensor:
        """The score of `kth_best_model_path`, which a new checkpoint must beat unless all are kept."""
        path = self.kth_best_model_path
        return self.best_k_models[path] if path else torch.tensor(math.inf if self.mode == "min" else -math.inf)

    @property
    def every_n_epochs(self) -> int:
        """Epochs between saves; 0 for none."""
        return self._every_n_epochs

    @property
    def depth(self) -> int:
        """Levels of folders that `filename` makes below `dirpath`."""
        return len(folders_in(self.filename)) - 1

    # state ------------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return {
            "dirpath": self.dirpath,
            "best_model_path": self._relative(self.best_model_path),
            "best_model_score": number_of(self.best_model_score),
            "current_score": number_of(self.current_score),
            "last_model_path": self._relative(self.last_model_path),
            "best_k_models": {self._relative(path): float(score) for path, score in self.best_k_models.items()},
            "recent": [self._relative(path) for path in self._recent],
            "doomed": {self._relative(path): who for path, who in self._doomed.items()},
            "saved_step": self._saved_step,
            "saved_batch": self._saved_batch,
            "seconds_since_save": None if self._saved_at is None else time.monotonic() - self._saved_at,
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        read_books(state, self.dirpath)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        books = read_books(state, self.dirpath)
        if books.former is not None:
            warnings.warn(
                f"checkpoints were saved in {books.former}, and are now saved in {self.dirpath}: the earlier ones are "
                "neither ranked nor deleted.",
                stacklevel=2,
            )
        self.best_model_path = books.best_model_path
        self.best_model_score = score_of(books.best_model_score)
        self.current_score = score_of(books.current_score)
        self.last_model_path = books.last_model_path
        # Checkpoints that were deleted since, by hand or by another run, are no longer ranked.
        self.best_k_models: dict[str, Tensor] = {
            path: torch.tensor(score, dtype=torch.float64)
            for path, score in books.ranked.items()
            if self._place.exists(path)
        }
        self._recent: list[str] = [path for path in books.recent if self._place.exists(path)]
        self._doomed: dict[str, str | None] = dict(books.doomed)
        self._saved_step, self._saved_batch = books.saved_step, books.saved_batch
        self._seen_step = 0
        ago = books.seconds_since_save
        self._saved_at: float | None = None if ago is None else time.monotonic() - ago

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps the ranking: all of its checkpoints are there, and their scores were those of their weights."""
        self._seen_step = step
        # The step comes again, with other weights.
        self._saved_step = -1 if self._saved_step > step else self._saved_step

    def _relative(self, path: str) -> str:
        inside = self.dirpath is not None and path.startswith(os.path.join(self.dirpath, ""))
        return os.path.relpath(path, self.dirpath) if inside else path

    # when -------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        chosen, self._place = self.folder_of(trainer), kept_in(trainer)
        self.dirpath = chosen if self.saves_on_each_node else trainer.strategy.ranks.broadcast(chosen)
        if stage == "fit" and not trainer.fast_dev_run:
            self._ranks(trainer).keep(self._make_folder)

    def saves_within(self, trainer: Trainer) -> bool:
        """Returns True if it saves checkpoints that can be resumed before the fit ends, as far as is known."""
        if self.save_weights_only or not (self.save_top_k or self.save_last):
            return False
        if self._every_n_train_steps:
            return trainer.max_steps == -1 or self._every_n_train_steps < trainer.max_steps
        if self._every_n_epochs and self._saves_at_epoch_end(trainer):
            return trainer.max_epochs in (None, -1) or self._every_n_epochs < (trainer.max_epochs or 0)
        return self._every_n_epochs > 0 or self._interval is not None

    def folder_of(self, trainer: Trainer) -> str:
        """Returns the folder it saves in during a run of this Trainer."""
        return self.folder_below(trainer.default_root_dir)

    def folder_below(self, root: str) -> str:
        """Returns the folder it saves in during a run whose `default_root_dir` this is."""
        return self._given_dirpath or os.path.abspath(os.path.join(root, "checkpoints"))

    def _ranks(self, trainer: Trainer) -> CheckpointRanks:
        return CheckpointRanks(trainer.strategy, self.dirpath or "checkpoints", self.saves_on_each_node)

    def _make_folder(self) -> None:
        """Makes the folder at the start, so that a failure is reported now and not after the first epoch."""
        assert self.dirpath is not None
        try:
            os.makedirs(self.dirpath, exist_ok=True)
        except OSError as error:
            raise CheckpointError(self.dirpath, f"cannot be made: {error.strerror}. Choose another dirpath.") from error

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._saved_at is None:
            self._saved_at = time.monotonic()
        self._seen_step = trainer.global_step
        if self._ranks(trainer).is_keeper:
            self._doomed = delete_each(self._doomed, self._place)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._following is not None and self._following.save.is_done:
            trainer.finish_saving()
            self._follow_up(trainer)
        if not self._every_n_train_steps and self._interval is None:
            return
        # In manual optimisation a batch may pass without a step.
        stepped, self._seen_step = trainer.global_step != self._seen_step, trainer.global_step
        due = trainer.window.closes and (stepped or not self._every_n_train_steps) and self._is_due_by_step(trainer)
        waits_for_validation = self.monitor is not None and trainer.progress.validation_due
        if due and not waits_for_validation:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.sanity_checking or trainer.state.stage != "fit":
            return
        by_step = self.monitor is not None and self._is_due_by_step(trainer)
        if by_step or (not self._saves_at_epoch_end(trainer) and self._is_due_by_epoch(trainer)):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._saves_at_epoch_end(trainer) and self._is_due_by_epoch(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._asked is not None:
            self._asked()
            self._asked = None
        self._follow_up(trainer)
        if self.save_last:
            # Metrics may be older than the weights here, so it is not ranked. Nothing is left to be written beside.
            self._save(trainer, may_rank=False, asynchronous=False)

    def secure(self, trainer: Trainer) -> bool:
        """Returns True if the run can be resumed from this very batch by "last" or "auto".

        With `save_last`, which saves the end of a run anyway, it saves now.
        """
        if self.save_weights_only or self.dirpath != str(trainer.checkpoint_folder):
            return False
        if self.save_last:
            self._save(trainer, may_rank=False, asynchronous=False)
        return self._saved_batch == trainer.progress.batches

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._follow_up(trainer)
        if not self.save_on_exception or self.dirpath is None or self._saved_step == trainer.global_step:
            return
        if not can_save_after(trainer, exception):
            return
        logged, values = trainer.callback_metrics, {}
        # After a device error nothing can be read back: then the name has no metrics.
        with suppress(Exception):
            values = trainer.read_metrics({name: logged[name] for name in metrics_in(self.filename) if name in logged})
        values = {**values, "epoch": trainer.progress.epoch, "step": trainer.global_step}
        path = self._free_path(self._style.name(self.filename, values))
        written = save_after(trainer, path, exception, self.save_weights_only)
        if written is not None and self.verbose:
            trainer.print(f"saved {written} after {type(exception).__name__}")

    def _is_due_by_step(self, trainer: Trainer) -> bool:
        if self._every_n_train_steps:
            return trainer.global_step % self._every_n_train_steps == 0
        if self._interval is None or self._saved_at is None:
            return False
        due = time.monotonic() - self._saved_at >= self._interval
        if trainer.world_size == 1:
            return due
        # Clocks differ by rank, so the first rank decides. Nobody waits: its decision is read one window later.
        is_agreed = self._asked is not None and self._asked()[0]
        self._asked = trainer.strategy.ranks.exchange_flags([due and trainer.is_global_zero and not is_agreed])
        return is_agreed

    def _is_due_by_epoch(self, trainer: Trainer) -> bool:
        return self._every_n_epochs > 0 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _saves_at_epoch_end(self, trainer: Trainer) -> bool:
        return validates_at_epoch_end(trainer) if self._on_train_epoch_end is None else self._on_train_epoch_end

    # what -------------------------------------------------------------------------------------------------------------
    def _save(self, trainer: Trainer, may_rank: bool = True, asynchronous: bool | None = None) -> None:
        """Saves if the checkpoint would be kept, at most once per batch.

        Args:
            trainer: of the run.
            may_rank: it may be among the best.
            asynchronous: None for what this callback was given.
        """
        if trainer.fast_dev_run or self._saved_batch == trainer.progress.batches:
            return
        values = self._values(trainer)
        ranks = may_rank and self._is_among_best(self._score(trainer, values))
        if ranks or self.save_last:
            # One at a time, and the name of the one before is taken once it is there.
            trainer.finish_saving()
            self._follow_up(trainer)
        path = self._path(values, ranks) if ranks or self.save_last else None
        # Only the first rank is sure to see the folder, so it decides.
        found = ranks, path and self._relative(path), path is not None and os.path.lexists(path)
        ranks, name, replaces = trainer.strategy.ranks.broadcast(found)
        if name is None:
            return
        path = os.path.join(self.dirpath or "", name)
        asynchronous = self.asynchronous if asynchronous is None else asynchronous
        with self._rolling_back() as before:
            self._enter(path, trainer, ranks)
            written = str(
                trainer.save_checkpoint(path, self.save_weights_only, overwrite=replaces, asynchronous=asynchronous)
            )
            if written != path:
                self._rename(path, written)
        is_keeper, save, link = self._ranks(trainer).is_keeper, trainer.pending_save, self._link(values)
        if self.verbose:
            verb = "saved" if save is None else "saving"
            trainer.print(report_of(self, written, trainer.global_step, ranks, verb))
        if save is not None:
            self._following = Following(save, written, before, dict(self._doomed), link, is_keeper, self._place)
            save.follow(self._following.follow)
        else:
            self._doomed = after_commit(written, link, self._doomed, self._place) if is_keeper else {}
            notify_loggers(trainer, self)

    def _follow_up(self, trainer: Trainer) -> None:
        """Follows up the checkpoint that a thread has committed, and informs the loggers."""
        self._settle()
        if self._is_unreported:
            self._is_unreported = False
            notify_loggers(trainer, self)

    def _settle(self) -> None:
        """Takes over what has come of a save that a thread wrote, once it is done."""
        following = self._following
        if following is None or not following.save.is_done:
            return
        self._following = None
        self._is_unreported = following.save.error is None
        if following.save.error is not None:
            for name, value in following.before.items():
                setattr(self, name, value)
            return
        self._doomed = following.doomed
        if str(following.save.path) != following.path:
            self._rename(following.path, str(following.save.path))

    def _values(self, trainer: Trainer) -> dict[str, float]:
        """Returns epoch, step, and the metrics that the name or the ranking needs, in one read-back."""
        logged = trainer.callback_metrics
        wanted = {*metrics_in(self.filename), *metrics_in(self.CHECKPOINT_NAME_LAST), self.monitor}
        found = {name: logged[name] for name in sorted(logged) if name in wanted}
        values = trainer.read_metrics(found) if found else {}
        # Ranks must agree on names and ranking, even if each logged its own value.
        values = dict(trainer.strategy.ranks.broadcast(values))
        return {**values, "epoch": trainer.progress.epoch, "step": trainer.global_step}

    def _score(self, trainer: Trainer, values: Mapping[str, float]) -> float | None:
        """Returns the monitored value, nan as the worst possible; None if there is nothing to rank by."""
        if self.monitor is None:
            return None
        if self.monitor not in values:
            message = missing_metric("ModelCheckpoint", self.monitor, trainer)
            if validates(trainer) and trainer.progress.validations == 0:
                # The first validation may still log it.
                warnings.warn(f"{message} This checkpoint is not ranked.", stacklevel=4)
                self.current_score = None
                return None
            raise ConfigurationError(message)
        score = values[self.monitor]
        if math.isnan(score):
            if trainer.is_global_zero:
                warnings.warn(
                    f"ModelCheckpoint monitors {self.monitor!r}, which is nan: it ranks as the worst.", stacklevel=4
                )
            score = math.inf if self.mode == "min" else -math.inf
        self.current_score = torch.tensor(score, dtype=torch.float64)
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
    def _enter(self, path: str, trainer: Trainer, ranks: bool) -> None:
        """Ranks a checkpoint that is about to be written, and marks those it replaces for deletion."""
        before = self.kept_checkpoints()
        if ranks and self.monitor is None:
            self._recent = [*(old for old in self._recent if old != path), path]
            if self.save_top_k > 0:
                self._recent = self._recent[-self.save_top_k :]
            self.best_model_path = path
        elif ranks:
            assert self.current_score is not None
            self.best_k_models = {**self.best_k_models, path: self.current_score}
            if 0 < self.save_top_k < len(self.best_k_models):
                del self.best_k_models[self._worst_of({k: v for k, v in self.best_k_models.items() if k != path})]
            self.best_model_path = self._best_of(self.best_k_models)
            self.best_model_score = self.best_k_models[self.best_model_path]
        self.last_model_path = path
        self._saved_step, self._saved_batch = trainer.global_step, trainer.progress.batches
        self._saved_at = time.monotonic()
        kept = self.kept_checkpoints()
        for old in before:
            if old not in kept:
                self._doomed[old] = self._place.identity(old)

    def kept_checkpoints(self) -> set[str]:
        """Returns the paths of all checkpoints that it keeps."""
        newest = {self.last_model_path} if self.save_last and self.last_model_path else set()
        return {*self.best_k_models, *self._recent} | newest

    def _best_of(self, scores: Mapping[str, Tensor]) -> str:
        return (min if self.mode == "min" else max)(scores, key=lambda path: float(scores[path]))

    def _worst_of(self, scores: Mapping[str, Tensor]) -> str:
        # Among equals the newer counts as worse, so that the first one keeps its place.
        newest_first = list(scores)[::-1]
        return (max if self.mode == "min" else min)(newest_first, key=lambda path: float(scores[path]))

    def _rename(self, path: str, written: str) -> None:
        """Records the actual path, if another process took the name between our check and the commit."""
        self.best_k_models = {written if key == path else key: score for key, score in self.best_k_models.items()}
        self._recent = [written if key == path else key for key in self._recent]
        self.last_model_path = written
        if self.best_model_path == path:
            self.best_model_path = written

    @contextmanager
    def _rolling_back(self) -> Iterator[dict[str, Any]]:
        """Restores the ranking if the save in this block fails; gives what it was."""
        before = {name: copy.copy(getattr(self, name)) for name in RANKING}
        try:
            yield before
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            raise

    # names ------------------------------------------------------------------------------------------------------------
    def format_checkpoint_name(
        self,
        metrics: Mapping[str, float | Tensor],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Returns the name of a checkpoint with these metrics, with its folder once that is known.

        Args:
            metrics: values for the template, with "epoch" and "step".
            filename: another template.
            ver: appended as `-v<ver>`.
            prefix: put before it, with a dash.
        """
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        name = self._style.name(self.filename if filename is None else filename, values, ver, prefix)
        return name if self.dirpath is None else os.path.join(self.dirpath, name)

    @property
    def _style(self) -> NameStyle:
        equals = self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None
        return NameStyle(equals, self.CHECKPOINT_JOIN_CHAR, self.FILE_EXTENSION)

    def _path(self, values: Mapping[str, float], ranks: bool) -> str:
        name = self._style.name(self.filename, values)
        return self._free_path(name, self._may_take(name, ranks))

    def _may_take(self, name: str, ranks: bool) -> set[str]:
        """Returns the paths that the new checkpoint may replace, since they are deleted once it is written."""
        assert self.dirpath is not None
        kept = {*self.best_k_models, *self._recent}
        is_full = 0 < self.save_top_k <= len(self._recent)
        loser = (self._recent[0] if is_full else self.kth_best_model_path) if ranks and self.save_top_k > 0 else ""
        stays = kept - {loser}
        goes = {loser, self.last_model_path} if self.save_last else {loser}
        if not self.enable_version_counter:
            goes.add(os.path.join(self.dirpath, name))
            # A checkpoint that is not ranked must not replace one that is kept for its score.
            stays = set() if ranks else stays
        return goes - stays

    def _free_path(self, name: str, may_take: Collection[str] = ()) -> str:
        assert self.dirpath is not None
        path = os.path.join(self.dirpath, name)
        version = self.STARTING_VERSION
        while os.path.lexists(path) and path not in may_take:
            path = os.path.join(self.dirpath, self._style.numbered(name, version))
            version += 1
        return path

    def _link(self, values: Mapping[str, float]) -> Path | None:
        """The link that points to the newest checkpoint; None where there is none."""
        assert self.dirpath is not None
        return Path(self.dirpath, self._style.name(self.CHECKPOINT_NAME_LAST, values)) if self.save_last else None
