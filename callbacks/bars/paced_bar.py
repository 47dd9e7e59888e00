"""PacedProgressBar: decides when a bar is drawn, and writes plain lines where no bar can be."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leyden.callbacks.bars.epoch_table import EpochTable
from leyden.callbacks.bars.progress_bar import ProgressBar, format_metrics
from leyden.core.checks import check_whole

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

DRAW_SECONDS = 0.1
LINE_SECONDS = 30.0
# The first line comes early, to show in a log that the run makes progress, and how fast.
FIRST_LINE_SECONDS = 5.0
# Drawing on a slow terminal (ssh) may take long. The pause after a drawing is at least this many times as long as the
# drawing itself, so that drawing takes less than 5 % of the time.
DRAW_SHARE = 20
NEVER = math.inf


class PacedProgressBar(ProgressBar, ABC):
    """Base class for Leyden's bars. It decides when to draw, as TQDMProgressBar describes; subclasses decide how."""

    def __init__(self, refresh_rate: int = 1) -> None:
        check_whole(type(self).__name__, 0, refresh_rate=refresh_rate)
        self._refresh_rate = refresh_rate
        self._is_plain = False
        self._is_training = False
        self._due = NEVER
        """Earliest time of the next drawing of the training bar, on `time.perf_counter`; NEVER outside training."""
        self._eval_due = NEVER
        self._eval_done = 0
        self._eval_batch = 0
        """Number of batches done of the current evaluation loader."""
        self._eval_total: int | None = None
        self._eval_name = ""
        self._eval_since = 0.0
        self._line_since = 0.0
        self._line_batch = 0
        self._has_written = False
        """True once this run has written a plain line."""
        self._names: dict[str, None] = {}
        """The names of the metrics shown so far in this run, in order."""
        self._table: EpochTable | None = None
        """In a notebook, the table of the epochs of this fit."""

    # how a subclass draws
    @abstractmethod
    def _can_redraw(self) -> bool:
        """Returns True if the output can redraw a bar."""

    @abstractmethod
    def _open_training(self) -> None:
        """Creates the training bar."""

    @abstractmethod
    def _open_epoch(self, name: str, done: int, total: int | None) -> None:
        """Starts an epoch in the training bar."""

    @abstractmethod
    def _draw_training(self, done: int, metrics: dict[str, Any] | None) -> None:
        """Draws the training bar. If `metrics` is None, the bar keeps its previous metrics."""

    @abstractmethod
    def _open_evaluation(self, stage: str, total: int | None) -> None:
        """Creates the evaluation bar for a stage: "sanity", "validation", "test" or "predict"."""

    @abstractmethod
    def _draw_evaluation(self, done: int) -> None:
        """Draws the evaluation bar."""

    @abstractmethod
    def _close_evaluation(self) -> None:
        """Removes the evaluation bar, if there is one."""

    @abstractmethod
    def _close(self) -> None:
        """Closes all bars, if any, and restores the terminal."""

    # members
    @property
    def refresh_rate(self) -> int:
        """Minimum number of batches between redraws; 0 hides the bar."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """True if the bar is shown: on rank 0, unless `refresh_rate` is 0."""
        return self._enabled and self._refresh_rate > 0

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._has_written = False
        self._names.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and other processes: without the table, which has a display."""
        return {**super().__getstate__(), "_table": None}

    # training
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin_training(trainer)
        if self._is_training:
            self._begin_epoch(trainer)

    # A subclass may override `on_train_start` without calling super: in Lightning, that hook creates the bar.
    on_train_epoch_start = on_train_start

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if now < self._due or (batch_idx + 1) % self._refresh_rate:
            return
        self._show_training(trainer, module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._is_training:
            self._show_training(trainer, module, trainer.progress.batch)
            if self._table is not None:
                self._table.end_epoch(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._end()

    # evaluation: one bar over all loaders
    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.sanity_checking:
            self._begin_evaluation(trainer, "sanity", self.sanity_check_description, trainer.num_sanity_val_batches)
        else:
            if self._table is not None:
                self._table.begin_validation(trainer)
            self._begin_evaluation(trainer, "validation", self.validation_description, trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin_evaluation(trainer, "test", self.test_description, trainer.num_test_batches)

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin_evaluation(trainer, "predict", self.predict_description, trainer.num_predict_batches)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._eval_done, self._eval_batch = self._eval_done + 1, batch_idx + 1
        if time.perf_counter() >= self._eval_due and not self._eval_done % self._refresh_rate:
            self._show_evaluation()

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.reset_dataloader_idx_tracker()
        if self._table is not None and trainer.validating:
            self._table.end_validation(trainer)
        if self._eval_due == NEVER:
            return
        # In a fit, the next line or redraw of the training bar shows the result.
        if not self._is_plain or not (self._is_training or trainer.sanity_checking):
            self._show_evaluation()
        self._eval_due = NEVER
        self._close_evaluation()
        self._line_since += time.perf_counter() - self._eval_since
        if self._is_training and not self._is_plain:
            self._due = 0.0

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    # ------------------------------------------------------------------------------------------------------------------
    def _begin_training(self, trainer: Trainer) -> None:
        if self._is_training or self.is_disabled:
            return
        self._is_training, self._is_plain = True, not self._can_redraw()
        if not self._is_plain:
            self._open_training()
        if in_notebook():
            self._table = EpochTable()

    def _begin_epoch(self, trainer: Trainer) -> None:
        done, now = trainer.progress.batch, time.perf_counter()
        self._line_since, self._line_batch = now, done
        if self._table is not None:
            self._table.begin_epoch()
        if self._is_plain:
            self._due = now + self._line_interval()
        else:
            self._due = 0.0
            self._open_epoch(_epoch_name(trainer), done, batch_count(self.total_train_batches))

    def _show_training(self, trainer: Trainer, module: TrainModule, done: int) -> None:
        metrics = self._in_stable_order(self.get_metrics(trainer, module))
        if not self._is_plain:
            self._due = draw_timed(self._draw_training, done, metrics)
            return
        now, total = time.perf_counter(), batch_count(self.total_train_batches)
        position = (_epoch_name(trainer), _batches(done, total), f"step {trainer.global_step}")
        self._write(*position, _rate(done - self._line_batch, now - self._line_since), format_metrics(metrics))
        self._line_since, self._line_batch, self._due = now, done, now + LINE_SECONDS

    def _in_stable_order(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns the metrics in the order of their first appearance, so that each keeps its place in the bar."""
        self._names.update(dict.fromkeys(metrics))
        return {name: metrics[name] for name in self._names if name in metrics}

    def _begin_evaluation(self, trainer: Trainer, stage: str, name: str, sizes: Any) -> None:
        self._eval_due, self._eval_done, self._eval_batch, self._eval_name = NEVER, 0, 0, name
        if self.is_disabled:
            return
        if not self._is_training:
            self._is_plain = not self._can_redraw()
        totals = [batch_count(size) for size in sizes]
        self._eval_total = None if None in totals else sum(total for total in totals if total is not None)
        self._eval_since = time.perf_counter()
        if self._is_plain:
            self._eval_due = self._eval_since + self._line_interval()
            return
        if self._is_training:
            self._draw_training(trainer.progress.batch, None)
        self._open_evaluation(stage, self._eval_total)
        self._eval_due = 0.0

    def _show_evaluation(self) -> None:
        if not self._is_plain:
            self._eval_due = draw_timed(self._draw_evaluation, self._eval_done)
            return
        now = time.perf_counter()
        speed = _rate(self._eval_done, now - self._eval_since)
        self._write(self._eval_name, _batches(self._eval_done, self._eval_total), speed)
        self._eval_due = now + LINE_SECONDS

    def _end(self) -> None:
        self._due = self._eval_due = NEVER
        self._is_training = False
        self._close()
        if self._table is not None:
            self._table.end()
            self._table = None

    def _line_interval(self) -> float:
        """Returns the seconds until the next line; fewer before the first line of a run."""
        return LINE_SECONDS if self._has_written else min(FIRST_LINE_SECONDS, LINE_SECONDS)

    def _write(self, *parts: str) -> None:
        self._has_written = True
        if sys.stderr is not None:
            print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)


def draw_timed(draw: Callable[..., None], *args: Any) -> float:
    """Draws, and returns the earliest time of the next drawing, on `time.perf_counter`."""
    start = time.perf_counter()
    draw(*args)
    end = time.perf_counter()
    return end + max(DRAW_SECONDS, DRAW_SHARE * (end - start))


def in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


def batch_count(size: Any) -> int | None:
    """Returns a loader's size as an int; None if it is unknown or infinite."""
    return None if size is None or size == math.inf else int(size)


def _epoch_name(trainer: Trainer) -> str:
    last = trainer.max_epochs
    return f"Epoch {trainer.current_epoch}" + (f"/{last - 1}" if last is not None and last > 0 else "")


def _batches(done: int, total: int | None) -> str:
    return f"batch {done}" if total is None else f"batch {done}/{total}"


def _rate(batches: int, seconds: float) -> str:
    return f"{batches / seconds:.1f} it/s" if batches and seconds > 0 else ""
