"""RichProgressBar, a callback that shows the progress of a run with Rich."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from leyden.callbacks.bars.paced_bar import PacedProgressBar
from leyden.callbacks.bars.progress_bar import format_number
from leyden.core.errors import ConfigurationError, kind_of, needs

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task, TaskID
    from rich.style import Style

    from leyden.callbacks.bars.rich_screen import RichScreen
    from leyden.trainer.trainer import Trainer

STAGES = ("sanity", "train", "validation", "test", "predict")


@dataclass
class RichProgressBarTheme:
    """Styles of a RichProgressBar, in Rich's notation: "green", "bold #6206E0", or a `rich.style.Style`.

    Attributes:
        description: style of the bar's name.
        progress_bar: style of the completed part.
        progress_bar_finished: style of a full bar.
        progress_bar_pulse: style of a bar of unknown length.
        batch_progress: style of the batch count.
        time: style of the elapsed and the remaining time.
        processing_speed: style of the batches per second.
        metrics: style of the metrics.
        metrics_text_delimiter: text between two metrics.
        metrics_format: format spec of a metric, such as ".3f"; None for about three significant digits.
    """

    description: str | Style = ""
    progress_bar: str | Style = "#6206E0"
    progress_bar_finished: str | Style = "#6206E0"
    progress_bar_pulse: str | Style = "#6206E0"
    batch_progress: str | Style = ""
    time: str | Style = "dim"
    processing_speed: str | Style = "dim underline"
    metrics: str | Style = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str | None = None


def _id_of(stage: str) -> property:
    def task_id(self: RichProgressBar) -> TaskID:
        return self._task(stage).id

    return property(task_id, doc=f"Rich's id of the bar of this stage: {stage}.")


def _task_of(stage: str) -> property:
    return property(lambda self: self._task(stage), doc=f"The bar of this stage: {stage}.")


class RichProgressBar(PacedProgressBar):
    """Shows one Rich bar for the training epoch and one for evaluation. Without a terminal, it prints plain lines.

    It draws as often as TQDMProgressBar, and prints the same lines to a log file. Printed and logged text appears above
    the bars. Metrics too long for the bar's line appear below the bars.

    Override `get_metrics` to choose the metrics, a `…_description` to rename a bar, and `configure_columns` to change
    the columns. `progress` is Rich's `Progress`, with one task per stage (`train_progress_bar_id` and so on), hidden
    while the stage is not running.

    Args:
        refresh_rate: minimum number of batches between redraws; 0 hides the bar.
        leave: whether to keep the bar of each epoch on the screen.
        theme: styles of the bar.
        console_kwargs: arguments for `rich.console.Console`, such as `{"stderr": True}`.

    Raises:
        MissingExtraError: if `rich` is not installed.
        ConfigurationError: if `refresh_rate` is negative, or Rich rejects a style or an argument.

    Example:
        >>> bar = RichProgressBar(theme=RichProgressBarTheme(progress_bar="green"), leave=True)
        >>> # Trainer(callbacks=[bar])
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(refresh_rate)
        self._leave = leave
        self.theme = RichProgressBarTheme() if theme is None else theme
        self._console_kwargs = dict(console_kwargs or {})
        check_theme(self.theme, self._console())
        self._screen: RichScreen | None = None
        self._progress: Progress | None = None
        """The screen, or a silent display while no bar is shown."""
        self._ids: dict[str, TaskID] = {}
        """The tasks of `progress` by stage."""
        self._evaluated = ""
        """The stage of the current evaluation."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and other processes: without the screen, which holds locks."""
        return {**super().__getstate__(), "_screen": None, "_progress": None, "_ids": {}}

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Returns the columns of each bar. Override it to use other Rich columns; Leyden appends the metrics."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        from leyden.callbacks.bars.rich_screen import TaskText, restyled, speed_of

        theme = self.theme
        bar = BarColumn(
            bar_width=None,
            complete_style=theme.progress_bar,
            finished_style=theme.progress_bar_finished,
            pulse_style=theme.progress_bar_pulse,
        )
        return [
            TextColumn("{task.description}", style=theme.description),
            bar,
            restyled(theme.batch_progress, MofNCompleteColumn()),
            restyled(theme.time, TimeElapsedColumn(), TimeRemainingColumn()),
            TaskText(speed_of, theme.processing_speed),
        ]

    # bars for subclasses: hidden ones outside of their stage, in a log file, and on other ranks
    @property
    def progress(self) -> Progress:
        """Rich's `Progress`. Its tasks are the bars."""
        if self._progress is not None:
            return self._progress
        from rich.progress import Progress

        return self._with_stages(Progress(disable=True))

    train_progress_bar_id = _id_of("train")
    val_sanity_progress_bar_id = _id_of("sanity")
    val_progress_bar_id = _id_of("validation")
    test_progress_bar_id = _id_of("test")
    predict_progress_bar_id = _id_of("predict")
    train_progress_bar = _task_of("train")
    val_sanity_check_bar = _task_of("sanity")
    val_progress_bar = _task_of("validation")
    test_progress_bar = _task_of("test")
    predict_progress_bar = _task_of("predict")

    def refresh(self, hard: bool = False) -> None:
        """Redraws the bars. `hard` is accepted for Lightning's sake and has no effect."""
        self.progress.refresh()

    def _with_stages(self, progress: Progress) -> Progress:
        self._progress = progress
        self._ids = {stage: progress.add_task(stage, total=None, visible=False) for stage in STAGES}
        return progress

    def _task(self, stage: str) -> Task:
        progress = self.progress
        return next(task for task in progress.tasks if task.id == self._ids[stage])

    # how PacedProgressBar draws ---------------------------------------------------------------------------------------
    def _console(self) -> Console:
        with needs("rich", "rich", type(self).__name__):
            from rich.console import Console
        try:
            return Console(**self._console_kwargs)
        except TypeError as error:
            raise ConfigurationError(
                f"{type(self).__name__}(console_kwargs={self._console_kwargs!r}): rich.console.Console raised: {error}."
            ) from None

    def _can_redraw(self) -> bool:
        console = self._console()
        forced = any(self._console_kwargs.get(name) for name in ("force_terminal", "force_interactive"))
        # Rich treats FORCE_COLOR as a sign of a terminal, but build servers set it too, and cannot move the cursor.
        return console.is_jupyter or (console.is_interactive and (forced or console.file.isatty()))

    def _ensure_screen(self, is_transient: bool = False) -> RichScreen:
        if self._screen is None:
            from leyden.callbacks.bars.rich_screen import RichScreen

            columns = self.configure_columns(self.trainer)
            self._screen = RichScreen(self._console(), columns, self.theme.metrics, is_transient)
            self._with_stages(self._screen).start()
        return self._screen

    def _open_training(self) -> None:
        self._ensure_screen()

    def _open_epoch(self, name: str, done: int, total: int | None) -> None:
        if self._leave and self._task("train").completed:
            self._close()
        # Pad the name to the width of the validation bar's name below it, so that the bar does not jump.
        name = name.ljust(len(self.validation_description))
        self._ensure_screen().show_task(self._ids["train"], name, done, total)

    def _draw_training(self, done: int, metrics: dict[str, Any] | None) -> None:
        screen = self._ensure_screen()
        if metrics is not None:
            screen.show_metrics(self._format_metrics(metrics))
        screen.update(self._ids["train"], completed=done, refresh=True)

    def _format_metrics(self, metrics: dict[str, Any]) -> str:
        spec = self.theme.metrics_format

        def text(value: Any) -> str:
            return format(value, spec) if spec is not None and isinstance(value, float) else format_number(value)

        return self.theme.metrics_text_delimiter.join(f"{name}: {text(value)}" for name, value in metrics.items())

    def _open_evaluation(self, stage: str, total: int | None) -> None:
        screen = self._ensure_screen(is_transient=stage == "sanity")
        screen.stop_task(self._ids["train"])
        self._evaluated = stage
        screen.show_task(self._ids[stage], self._eval_name, 0, total)

    def _draw_evaluation(self, done: int) -> None:
        self.progress.update(self._ids[self._evaluated], completed=done, refresh=True)

    def _close_evaluation(self) -> None:
        if self._screen is None:
            return
        if not self._task("train").visible:
            self._close()
            return
        # The time and the speed of training do not include an evaluation.
        self._screen.resume_task(self._ids["train"], time.perf_counter() - self._eval_since)
        self._screen.update(self._ids[self._evaluated], visible=False, refresh=True)

    def _close(self) -> None:
        if self._screen is not None:
            self._screen.stop()
        self._screen = self._progress = None


def check_theme(theme: RichProgressBarTheme, console: Console) -> None:
    """Raises ConfigurationError for a style or format spec that Rich or Python rejects."""
    from rich.errors import MissingStyle

    if not isinstance(theme, RichProgressBarTheme):
        raise ConfigurationError(f"theme={theme!r}: use a RichProgressBarTheme(…), not {kind_of(theme)}.")
    for field in fields(theme):
        value = getattr(theme, field.name)
        if field.name == "metrics_text_delimiter":
            continue
        try:
            if field.name == "metrics_format":
                format(1.0, value or "")
            else:
                console.get_style(value)
        except (MissingStyle, ValueError, TypeError) as error:
            raise ConfigurationError(f"RichProgressBarTheme({field.name}={value!r}): {error}.") from None
