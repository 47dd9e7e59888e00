"""EarlyStopping, a callback that stops training when the monitored metric no longer improves."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.saved_ranking import tensor_of
from leyden.core.checks import check_choice
from leyden.core.errors import ConfigurationError, StateError, nearest
from leyden.core.given import checks_names
from leyden.core.rank_zero import inform, warn
from leyden.core.saved_state import SavedState, brief

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

MODES = ("min", "max")


class EarlyStoppingReason(Enum):
    """Why EarlyStopping stopped a run."""

    NOT_STOPPED = "not_stopped"
    NON_FINITE_METRIC = "non_finite_metric"
    STOPPING_THRESHOLD = "stopping_threshold"
    DIVERGENCE_THRESHOLD = "divergence_threshold"
    PATIENCE_EXHAUSTED = "patience_exhausted"


class EarlyStopping(Callback):
    """Stops training when a metric has not improved for a number of checks.

    A stopped run stays stopped when it is resumed with the same arguments; with different ones it continues.

    Args:
        monitor: the name of a logged metric.
        min_delta: the smallest change that counts as an improvement, in the metric's unit; not negative.
        patience: the number of consecutive checks without improvement after which training stops. Checks follow
            validations or training epochs (see `check_on_train_epoch_end`), so this need not be a number of epochs.
        verbose: also print each improvement. The reason for stopping is always printed.
        mode: "min" if lower values of the metric are better, "max" if higher values are.
        strict: raise if the metric is missing at a check; otherwise warn and continue.
        check_finite: stop if the metric is nan or infinite. Otherwise nan counts as no improvement.
        stopping_threshold: stop as soon as the metric is better than this value.
        divergence_threshold: stop as soon as the metric is worse than this value.
        check_on_train_epoch_end: check at the end of training epochs instead of after validations. None: at the end of
            epochs if there is no validation, or if each epoch ends with its only validation.
        log_rank_zero_only: print on rank 0 only. All ranks agree on stopping, so nothing else changes.

    Raises:
        ConfigurationError: for an invalid argument; if `strict`, also at a check if `monitor` was never logged.

    Attributes:
        stopped_epoch: the epoch in which training was stopped; 0 if it was not.
        stopping_reason: an `EarlyStoppingReason`.
        stopping_reason_message: the reason in words; None if training was not stopped.
        best_score: the best value so far, a 0-d tensor; infinite before the first check.
        wait_count: the number of checks since the best value.

    Example:
        >>> stopping = EarlyStopping("val_loss", patience=5, min_delta=0.01)
        >>> # Trainer(callbacks=[stopping])
        >>> stopping.stopping_reason.value
        'not_stopped'
    """

    order: ClassVar[int] = 100

    @checks_names
    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        if not isinstance(monitor, str) or not monitor:
            raise ConfigurationError(
                f"EarlyStopping(monitor={monitor!r}): give the name of a logged metric, such as 'val_loss'."
            )
        check_choice("EarlyStopping", MODES, mode=mode)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 0:
            raise ConfigurationError(f"EarlyStopping(patience={patience!r}): give a whole number of checks from 0.")
        if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float)) or not min_delta >= 0:
            raise ConfigurationError(
                f"EarlyStopping(min_delta={min_delta!r}): give a number from 0; mode sets its direction."
            )
        self.monitor = monitor
        self.min_delta = float(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self.stopped_epoch = 0
        self.wait_count = 0
        self.best_score = torch.tensor(-math.inf if mode == "max" else math.inf, dtype=torch.float64)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def _former_state_key(self) -> str:
        return f"{type(self).__qualname__}(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "arguments": self._arguments(),
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score.clone(),
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        saved.integer("wait_count", least=0)
        saved.integer("stopped_epoch", least=0)
        saved.value("arguments")
        saved.text("stopping_reason", among=[reason.value for reason in EarlyStoppingReason])
        if not saved.is_none("stopping_reason_message"):
            saved.text("stopping_reason_message")
        score = saved.value("best_score")
        if not isinstance(score, Tensor) or score.numel() != 1:
            raise StateError("best_score", f"is {brief(score)}, and must be a tensor with one number")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait_count = state["wait_count"]
        self.best_score = state["best_score"]
        is_unchanged = state["arguments"] == self._arguments()
        self.stopped_epoch = state["stopped_epoch"] if is_unchanged else 0
        self.stopping_reason = EarlyStoppingReason(state["stopping_reason"] if is_unchanged else "not_stopped")
        self.stopping_reason_message = state.get("stopping_reason_message") if is_unchanged else None

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Discards the checks after the checkpoint. A stopped run stays stopped."""
        if self.stopping_reason is EarlyStoppingReason.NOT_STOPPED:
            super().go_back(state, step)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            # The checkpoint was saved after the decision to stop.
            trainer.should_stop = True
            warn(
                f"EarlyStopping stopped this run in epoch {self.stopped_epoch} ({self.stopping_reason_message}), so it "
                "stops again. Change its patience or threshold to continue training.",
            )

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        # A validation before the first batch (`validate_at_start`) does not decide when training ends.
        if trainer.progress.batches and not self._checks_at_epoch_end(trainer):
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._checks_at_epoch_end(trainer):
            self._check(trainer)

    def _checks_at_epoch_end(self, trainer: Trainer) -> bool:
        choice = self._check_on_train_epoch_end
        return validates_at_epoch_end(trainer) if choice is None else choice

    def _check(self, trainer: Trainer) -> None:
        if trainer.sanity_checking or trainer.fast_dev_run or trainer.state.stage != "fit":
            return
        value = trainer.callback_metrics.get(self.monitor)
        number = None if value is None else trainer.read_metrics({self.monitor: value})[self.monitor]
        # All ranks must agree on stopping, so rank 0's value counts even if the ranks logged different ones.
        current = trainer.strategy.ranks.broadcast(number)
        if current is None:
            message = missing_metric("EarlyStopping", self.monitor, trainer)
            if self.strict:
                raise ConfigurationError(f"{message} Or set strict=False to continue without it.")
            warn(message)
            return
        if math.isnan(current) and not self.check_finite and trainer.is_global_zero:
            warn(f"EarlyStopping monitors {self.monitor!r}, which is nan. This counts as no improvement.")
        reason, message = self._compare(current)
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason, self.stopping_reason_message = reason, message
            if not self.verbose and trainer.arguments.verbose:
                inform(f"EarlyStopping stops the run in epoch {trainer.current_epoch}: {message}", trainer.print)
        if message and self.verbose:
            if self.log_rank_zero_only or trainer.world_size == 1:
                inform(message, trainer.print)
            else:
                inform(f"[rank {trainer.global_rank}] {message}", every_rank=True)

    def _compare(self, current: float) -> tuple[EarlyStoppingReason, str]:
        """Compares a value with the best one so far, which it updates. Returns the reason to stop and a message."""
        name, best, reason = self.monitor, float(self.best_score), EarlyStoppingReason
        if self.check_finite and not math.isfinite(current):
            return reason.NON_FINITE_METRIC, f"{name} is {current}. The best value was {best:.3f}."
        if self.stopping_threshold is not None and self._is_better(current, self.stopping_threshold):
            return (
                reason.STOPPING_THRESHOLD,
                f"{name} = {current:.3f} reached the stopping threshold {self.stopping_threshold}.",
            )
        if self.divergence_threshold is not None and self._is_better(self.divergence_threshold, current):
            return (
                reason.DIVERGENCE_THRESHOLD,
                f"{name} = {current:.3f} passed the divergence threshold {self.divergence_threshold}.",
            )
        if self._is_better(current, best, self.min_delta):
            gain = f" by {abs(current - best):.3f}" if math.isfinite(best) else ""
            self.best_score, self.wait_count = tensor_of(current), 0
            return reason.NOT_STOPPED, f"{name} improved{gain}: {current:.3f}."
        self.wait_count += 1
        if self.wait_count >= self.patience:
            return (
                reason.PATIENCE_EXHAUSTED,
                f"{name} did not improve in the last {self.wait_count} checks. The best value was {best:.3f}.",
            )
        return reason.NOT_STOPPED, ""

    def _is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        return value > than + by if self.mode == "max" else value < than - by

    def _arguments(self) -> dict[str, Any]:
        return {
            "min_delta": self.min_delta,
            "patience": self.patience,
            "check_finite": self.check_finite,
            "stopping_threshold": self.stopping_threshold,
            "divergence_threshold": self.divergence_threshold,
        }


def validates(trainer: Trainer) -> bool:
    return any(count != 0 for count in trainer.num_val_batches)


def validates_at_epoch_end(trainer: Trainer) -> bool:
    """Returns True if there is no validation, or if each training epoch ends with its only validation."""
    if not validates(trainer):
        return True
    # An int is a number of batches, a float a fraction of the epoch.
    interval = trainer.val_check_interval
    return trainer.check_val_every_n_epoch == 1 and isinstance(interval, float) and interval == 1.0


def missing_metric(callback: str, monitor: str, trainer: Trainer) -> str:
    """Returns the error message for a metric that was not logged."""
    known = sorted(trainer.callback_metrics)
    hint = nearest(monitor, known) if known else "No metric was logged."
    return f"{callback} monitors {monitor!r}, which was not logged. {hint} Log it with self.log({monitor!r}, value)."
