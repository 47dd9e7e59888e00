"""RichProgressBar, a callback that shows the progress of a run with Rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from leyden.callbacks.bars import above_bars
from leyden.callbacks.bars.paced_bar import PacedProgressBar
from leyden.callbacks.bars.progress_bar import format_number
from leyden.core.errors import ConfigurationError, kind_of, needs

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress, ProgressColumn, Task, TaskID
    from rich.style import Style
    from rich.text import Text

    from leyden.trainer.trainer import Trainer

BAR_WIDTH = 10
"""Least width of the bar, in characters. If less is left, the metrics move to their own line, then the times go."""
UNLIMITED = 10_000
"""A width, in characters, that no text reaches."""
SMOOTHING = 0.3
"""Weight of the latest speed in the moving average that is shown, as in tqdm."""


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


class RichProgressBar(PacedProgressBar):
    """Shows one Rich bar for the training epoch and one for evaluation. Without a terminal, it prints plain lines.

    It draws as often as TQDMProgressBar, and prints the same lines to a log file. Printed and logged text appears above
    the bars. Metrics too long for the bar's line appear below the bars.

    Override `get_metrics` to choose the metrics, a `…_description` to rename a bar, and `configure_columns` to change
    the columns. `progress` is Rich's `Progress`, with one task per bar.

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
        self._screen: Screen | None = None
        self._tasks: dict[str, TaskID] = {}
        """The bars on the screen, by stage: "train", and below it the bar of an evaluation."""
        self._meters: dict[str, Meter] = {}
        self._silent: Progress | None = None
        """Stands in for `progress` when no bar is shown."""
        self._hidden: dict[str, TaskID] = {}
        """Invisible tasks that stand in for bars that are not shown, by stage."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and other processes: without the screen, which holds locks."""
        return {**super().__getstate__(), "_screen": None, "_tasks": {}, "_meters": {}, "_silent": None, "_hidden": {}}

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Returns the columns of each bar. Override it to use other Rich columns; Leyden appends the metrics."""
        from rich.progress import BarColumn, TextColumn

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
            field_column("batches", theme.batch_progress),
            field_column("time", theme.time),
            field_column("speed", theme.processing_speed),
        ]

    # bars for subclasses: an invisible one if the stage has none (outside of the stage, in a log file, on other ranks)
    @property
    def progress(self) -> Progress:
        """Rich's `Progress`. Its tasks are the bars."""
        if self._screen is not None:
            return self._screen.progress
        if self._silent is None:
            from rich.progress import Progress

            self._silent = Progress(disable=True)
        return self._silent

    @property
    def train_progress_bar_id(self) -> TaskID:
        return self._task_id("train")

    @property
    def val_sanity_progress_bar_id(self) -> TaskID:
        return self._task_id("sanity")

    @property
    def val_progress_bar_id(self) -> TaskID:
        return self._task_id("validation")

    @property
    def test_progress_bar_id(self) -> TaskID:
        return self._task_id("test")

    @property
    def predict_progress_bar_id(self) -> TaskID:
        return self._task_id("predict")

    @property
    def train_progress_bar(self) -> Task:
        """The bar of the training epochs."""
        return self._task_of("train")

    @property
    def val_sanity_check_bar(self) -> Task:
        """The bar of the sanity check."""
        return self._task_of("sanity")

    @property
    def val_progress_bar(self) -> Task:
        """The bar of the validation."""
        return self._task_of("validation")

    @property
    def test_progress_bar(self) -> Task:
        """The bar of the test."""
        return self._task_of("test")

    @property
    def predict_progress_bar(self) -> Task:
        """The bar of the prediction."""
        return self._task_of("predict")

    def _task_id(self, stage: str) -> TaskID:
        if stage in self._tasks:
            return self._tasks[stage]
        if stage not in self._hidden:
            self._hidden[stage] = self.progress.add_task(stage, total=None, visible=False)
        return self._hidden[stage]

    def _task_of(self, stage: str) -> Task:
        task_id = self._task_id(stage)
        return next(task for task in self.progress.tasks if task.id == task_id)

    def refresh(self, hard: bool = False) -> None:
        """Redraws the bars. `hard` is accepted for Lightning's sake and has no effect."""
        if self._screen is not None:
            self._screen.refresh()

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

    def _ensure_screen(self, trainer: Trainer, is_transient: bool = False) -> Screen:
        if self._screen is None:
            self._hidden.clear()
            self._screen = Screen(self._console(), self.configure_columns(trainer), self.theme.metrics, is_transient)
        return self._screen

    def _open_training(self, trainer: Trainer) -> None:
        self._ensure_screen(trainer)

    def _open_epoch(self, name: str, done: int, total: int | None) -> None:
        if self._leave and "train" in self._tasks and self._task_of("train").completed:
            self._close()
        screen = self._ensure_screen(self.trainer)
        if "train" in self._tasks:
            screen.progress.remove_task(self._tasks.pop("train"))
        # Pad the name to the width of the validation bar's name below it, so that the bar does not jump.
        self._add("train", name.ljust(len(self.validation_description)), done, total)

    def _draw_training(self, done: int, metrics: dict[str, Any] | None) -> None:
        if self._screen is None:
            return
        if metrics is not None:
            self._screen.show(self._format_metrics(metrics))
        self._move("train", done)

    def _format_metrics(self, metrics: dict[str, Any]) -> str:
        spec = self.theme.metrics_format

        def text(value: Any) -> str:
            return format(value, spec) if spec is not None and isinstance(value, float) else format_number(value)

        return self.theme.metrics_text_delimiter.join(f"{name}: {text(value)}" for name, value in metrics.items())

    def _open_evaluation(self, trainer: Trainer, stage: str, total: int | None) -> None:
        self._ensure_screen(trainer, is_transient=stage == "sanity")
        self._add(stage, self._eval_name, 0, total)

    def _draw_evaluation(self, done: int) -> None:
        for stage in self._tasks:
            if stage != "train":
                self._move(stage, done)

    def _close_evaluation(self) -> None:
        for stage in [stage for stage in self._tasks if stage != "train"]:
            seconds = self._meters.pop(stage).seconds
            if "train" not in self._tasks:
                self._close()
                return
            # The speed of training does not include the time of an evaluation.
            self._meters["train"].skip(seconds)
            self.progress.remove_task(self._tasks.pop(stage))
            self.refresh()

    def _close(self) -> None:
        if self._screen is not None:
            self._screen.stop()
        self._screen = None
        self._tasks.clear()
        self._meters.clear()
        self._hidden.clear()

    def _add(self, stage: str, name: str, done: int, total: int | None) -> None:
        self._meters[stage] = meter = Meter(done, total)
        self._tasks[stage] = self.progress.add_task(name, total=total, completed=done, **meter.texts())
        self.refresh()

    def _move(self, stage: str, done: int) -> None:
        meter = self._meters[stage]
        meter.move(done)
        self.progress.update(self._tasks[stage], completed=done, **meter.texts())
        self.refresh()


class Screen:
    """Rich bars on a terminal or in a notebook, from construction to `stop`.

    Args:
        console: the console to draw on.
        columns: the columns of each bar.
        style: the style of the metrics.
        is_transient: whether `stop` clears the bars from the screen.
    """

    def __init__(self, console: Console, columns: list[ProgressColumn], style: str | Style, is_transient: bool) -> None:
        from rich.progress import Progress
        from rich.text import Text

        self._console, self._style, self._is_transient = console, style, is_transient
        self._metrics, self._is_inline = Text(), True
        # Inline metrics stand in a column of the first bar. In a notebook, long metrics wrap within the column.
        metrics = column(
            lambda task: self._metrics if self._is_inline and task.id == self._first() else Text(), console.is_jupyter
        )
        self.progress = Progress(*columns, metrics, console=console, expand=True)
        self._handle: Any = None
        """The display handle in a notebook; None on a terminal."""
        self._live: Live | None = None
        """Rich's live display on a terminal; None in a notebook."""
        self._above: dict[str, AboveScreen] = {}
        self._replaced: above_bars.ReplacedStreams | None = None
        if console.is_jupyter:
            self._start_in_notebook()
        else:
            self._start_on_terminal()

    def _start_in_notebook(self) -> None:
        # Rich's own notebook display needs ipywidgets, and a saved notebook does not show it.
        from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

        self._handle = display(self.progress, display_id=True)

    def _start_on_terminal(self) -> None:
        from rich.live import Live

        console = self._console
        # Rich's own redirection treats "[/x]" as markup, and breaks the line at each flush.
        self._live = Live(
            console=console,
            auto_refresh=False,
            get_renderable=self._rendered,
            transient=self._is_transient,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        # Pin the file: a console without one looks up `sys.stdout` at each write, and would find the replacement.
        console.file = console.file
        self._live.start()
        streams = {name: getattr(sys, name) for name in above_bars.STREAMS}
        self._above = {
            name: AboveScreen(stream, console, self.refresh)
            for name, stream in streams.items()
            if stream is not None and not hasattr(stream, "rich_proxied_file") and stream.isatty()
        }
        self._replaced = above_bars.ReplacedStreams(
            {name: (streams[name], above) for name, above in self._above.items()}
        )

    def show(self, metrics: str) -> None:
        """Sets the metrics for the next drawing."""
        from rich.text import Text

        self._metrics = Text(metrics, style=self._style)

    def refresh(self) -> None:
        """Draws the bars."""
        if self._live is not None:
            self._live.refresh()
        elif self._handle is not None:
            self._handle.update(self.progress)

    def stop(self) -> None:
        """Stops drawing, and restores the streams and the cursor."""
        if self._replaced is not None:
            self._replaced.end()
        if self._live is not None:
            self._live.stop()
        elif self._is_transient:
            self._handle.update({"text/plain": ""}, raw=True)

    def _first(self) -> int | None:
        return next((task.id for task in self.progress.tasks if task.visible), None)

    def _rendered(self) -> RenderableType:
        from rich.console import Group

        tasks, columns = self.progress.tasks, self.progress.columns
        # Measure with inline metrics, to decide whether they fit. They are the last column.
        self._is_inline = True
        fitting = columns
        while len(fitting) > 2 and self._least_width(tasks, fitting) + BAR_WIDTH > self._console.width:
            fitting = fitting[:-1]
        self._is_inline = len(fitting) == len(columns)
        try:
            self.progress.columns = fitting
            table = self.progress.make_tasks_table(tasks)
        finally:
            self.progress.columns = columns
        open_lines = [above.open_line for above in self._above.values() if above.open_line]
        return Group(*open_lines, table, *(() if self._is_inline else (self._metrics,)))

    def _least_width(self, tasks: list[Task], columns: Sequence[str | ProgressColumn]) -> int:
        """Returns the total width of these columns: the widest cell of each, and the minimum width of a bar column."""
        from rich.measure import Measurement

        options, width = self._console.options.update(max_width=UNLIMITED), 0
        for each in columns:
            cells = [each.format(task=task) if isinstance(each, str) else each(task) for task in tasks]
            sizes = [Measurement.get(self._console, options, cell) for cell in cells]
            # A bar column fills all available width, so only its minimum counts.
            width += 1 + max((size.maximum if size.maximum < UNLIMITED else size.minimum for size in sizes), default=0)
        return width


class AboveScreen(above_bars.LineBufferedStream):
    """Prints complete lines above a Screen, unaltered. An unfinished line is drawn as part of the screen.

    Args:
        stream: the terminal stream.
        console: the console of the screen.
        refresh: a function that draws the screen.
    """

    def __init__(self, stream: Any, console: Console, refresh: Callable[[], None]) -> None:
        from rich.ansi import AnsiDecoder
        from rich.text import Text

        super().__init__(stream)
        self._console, self._refresh, self._decoder = console, refresh, AnsiDecoder()
        self.open_line = Text()
        """The unfinished line after a flush, cropped to the console's width."""

    def _write_lines(self, text: str) -> None:
        from rich.text import Text

        self.open_line = Text()
        lines = [self._decoder.decode_line(line.rstrip("\r")) for line in text[:-1].split("\n")]
        self._console.print(Text("\n").join(lines))

    def _write_unfinished(self) -> None:
        from rich.text import Text

        # Drop text that a carriage return has overwritten.
        self._unfinished = self._unfinished[self._unfinished.rstrip("\r").rfind("\r") + 1 :]
        line = Text.from_ansi(self._unfinished.rstrip("\r"), no_wrap=True, overflow="crop")
        self.open_line = line[-self._console.width :]
        self._refresh()

    def _end(self) -> None:
        if self._unfinished:
            self._write_lines(self._unfinished + "\n")


class Meter:
    """Measures the position, speed and elapsed time of a bar.

    Args:
        done: number of batches done before the bar was created.
        total: total number of batches; None if unknown.
    """

    def __init__(self, done: int, total: int | None) -> None:
        self._start = self._last = time.perf_counter()
        self._done, self._total = done, total
        self._speed: float | None = None

    @property
    def seconds(self) -> float:
        """Elapsed seconds since the start."""
        return time.perf_counter() - self._start

    def skip(self, seconds: float) -> None:
        """Excludes seconds spent elsewhere from the elapsed time and the speed."""
        self._start += seconds
        self._last += seconds

    def move(self, done: int) -> None:
        """Records that `done` batches are done, and updates the speed."""
        now = time.perf_counter()
        if done > self._done and now > self._last:
            speed = (done - self._done) / (now - self._last)
            previous = speed if self._speed is None else self._speed
            self._speed = SMOOTHING * speed + (1 - SMOOTHING) * previous
            self._last, self._done = now, done

    def texts(self) -> dict[str, Any]:
        """Returns the text of each column."""
        remaining = None if self._total is None or not self._speed else (self._total - self._done) / self._speed
        return {
            "batches": f"{self._done}/{'--' if self._total is None else self._total}",
            "time": f"{_clock(self.seconds)} • {_clock(remaining)}",
            "speed": "" if self._speed is None else f"{self._speed:.2f}it/s",
        }


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def column(render: Callable[[Task], Text], wraps: bool = False) -> ProgressColumn:
    """Creates a Rich column from a function that returns its text, on one line unless it `wraps`."""
    from rich.progress import ProgressColumn
    from rich.table import Column

    class Rendered(ProgressColumn):
        def render(self, task: Task) -> Text:
            return render(task)

    return Rendered(table_column=Column(no_wrap=not wraps))


def field_column(name: str, style: str | Style) -> ProgressColumn:
    """Creates a column that shows a field of each task. A task without the field shows nothing."""
    from rich.text import Text

    return column(lambda task: Text(str(task.fields.get(name, "")), style=style))


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
