"""RichProgressBar, a callback that shows the progress of a run with Rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from leyden.callbacks.bars import above_bars
from leyden.callbacks.bars.paced_bar import PacedProgressBar
from leyden.callbacks.bars.progress_bar import format_number
from leyden.strategies.errors import ConfigurationError, kind_of, needs

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, ProgressColumn, Task, TaskID
    from rich.style import Style
    from rich.text import Text

    from leyden.trainer.trainer import Trainer

BAR_WIDTH = 16
"""Columns of the bar below which the metrics move to a line of their own."""
UNLIMITED = 10_000
"""Columns that no text has."""
SMOOTHING = 0.3
"""What the newest speed weighs in the one that is shown, as in tqdm."""


@dataclass
class RichProgressBarTheme:
    """Styles of a RichProgressBar, each as Rich writes it: "green", "bold #6206E0", or a `rich.style.Style`.

    Attributes:
        description: of a bar's name.
        progress_bar: of the part that is done.
        progress_bar_finished: of a bar that is full.
        progress_bar_pulse: of a bar without a length.
        batch_progress: of the number of batches.
        time: of the time that has passed, and that is left.
        processing_speed: of the batches per second.
        metrics: of the metrics.
        metrics_text_delimiter: text between two metrics.
        metrics_format: how a metric is written, such as ".3f"; None writes about three digits, also of small numbers.
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
    """Shows a bar of Rich's for the training epoch and one for evaluation; plain lines if there is no terminal.

    It is drawn as often as TQDMProgressBar, and writes the same lines to a log file. What is printed and logged appears
    above the bars, and metrics that are too long for the line below them.

    Override `get_metrics` to choose the metrics, a `…_description` to rename a bar, and `configure_columns` for other
    columns. `progress` is Rich's `Progress`, with a task for each bar.

    Args:
        refresh_rate: redraw only at multiples of this many batches; 0 hides the bar.
        leave: keep the bar of each epoch on the screen.
        theme: styles.
        console_kwargs: arguments of `rich.console.Console`, such as `{"stderr": True}`.

    Raises:
        MissingExtraError: if `rich` is not installed.
        ConfigurationError: if `refresh_rate` is negative, or Rich does not know a style or an argument.

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
        """The bars on the screen by stage: "train", and below it one of an evaluation."""
        self._meters: dict[str, Meter] = {}
        self._silent: Progress | None = None
        self._hidden: dict[str, TaskID] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and sent to other processes: no screen, which holds locks."""
        return {**super().__getstate__(), "_screen": None, "_tasks": {}, "_meters": {}, "_silent": None, "_hidden": {}}

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Returns the columns of each bar but its metrics, which Leyden adds. Override it for others of Rich's."""
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

    # what subclasses reach: where no bar is shown (outside its stage, in a log file, on other ranks), one unseen
    @property
    def progress(self) -> Progress:
        """Rich's `Progress`, which has the bars as its tasks."""
        if self._screen is not None:
            return self._screen.progress
        if self._silent is None:
            from rich.progress import Progress

            self._silent = Progress(disable=True)
        return self._silent

    @property
    def train_progress_bar_id(self) -> TaskID:
        return self._task("train")

    @property
    def val_sanity_progress_bar_id(self) -> TaskID:
        return self._task("sanity")

    @property
    def val_progress_bar_id(self) -> TaskID:
        return self._task("validation")

    @property
    def test_progress_bar_id(self) -> TaskID:
        return self._task("test")

    @property
    def predict_progress_bar_id(self) -> TaskID:
        return self._task("predict")

    @property
    def train_progress_bar(self) -> Task:
        """The bar of the training epochs."""
        return self._by_id("train")

    @property
    def val_sanity_check_bar(self) -> Task:
        """The bar of the sanity check."""
        return self._by_id("sanity")

    @property
    def val_progress_bar(self) -> Task:
        """The bar of the validation."""
        return self._by_id("validation")

    @property
    def test_progress_bar(self) -> Task:
        """The bar of the test."""
        return self._by_id("test")

    @property
    def predict_progress_bar(self) -> Task:
        """The bar of the prediction."""
        return self._by_id("predict")

    def _task(self, stage: str) -> TaskID:
        if stage in self._tasks:
            return self._tasks[stage]
        if stage not in self._hidden:
            self._hidden[stage] = self.progress.add_task(stage, total=None, visible=False)
        return self._hidden[stage]

    def _by_id(self, stage: str) -> Task:
        number = self._task(stage)
        return next(task for task in self.progress.tasks if task.id == number)

    def refresh(self, hard: bool = False) -> None:
        """Draws the bars as they are now; `hard`, which Lightning's needs in a notebook, changes nothing."""
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
                f"{type(self).__name__}(console_kwargs={self._console_kwargs!r}): rich.console.Console says: {error}."
            ) from None

    def _can_redraw(self) -> bool:
        console = self._console()
        forced = any(self._console_kwargs.get(name) for name in ("force_terminal", "force_interactive"))
        # Rich takes FORCE_COLOR for a terminal, which build servers set, and which asks for no cursor.
        return console.is_jupyter or (console.is_interactive and (forced or console.file.isatty()))

    def _show_on(self, trainer: Trainer, is_transient: bool = False) -> Screen:
        if self._screen is None:
            self._hidden.clear()
            self._screen = Screen(self._console(), self.configure_columns(trainer), self.theme.metrics, is_transient)
        return self._screen

    def _open_training(self, trainer: Trainer) -> None:
        self._show_on(trainer)

    def _open_epoch(self, name: str, done: int, total: int | None) -> None:
        if self._leave and "train" in self._tasks and self._by_id("train").completed:
            self._close()
        screen = self._show_on(self.trainer)
        if "train" in self._tasks:
            screen.progress.remove_task(self._tasks.pop("train"))
        # As wide as the name below it, so that the bar does not jump.
        self._add("train", name.ljust(len(self.validation_description)), done, total)

    def _draw_training(self, done: int, metrics: dict[str, Any] | None) -> None:
        if self._screen is None:
            return
        if metrics is not None:
            self._screen.show(self._written(metrics))
        self._move("train", done)

    def _written(self, metrics: dict[str, Any]) -> str:
        form = self.theme.metrics_format

        def written(value: Any) -> str:
            return format(value, form) if form is not None and isinstance(value, float) else format_number(value)

        return self.theme.metrics_text_delimiter.join(f"{name}: {written(value)}" for name, value in metrics.items())

    def _open_evaluation(self, trainer: Trainer, stage: str, total: int | None) -> None:
        self._show_on(trainer, is_transient=stage == "sanity")
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
    """Bars of Rich's on a terminal or in a notebook, from the first drawing to `stop`.

    Args:
        console: where they are shown.
        columns: of each bar.
        style: of the metrics.
        is_transient: they leave nothing on the screen.
    """

    def __init__(self, console: Console, columns: list[ProgressColumn], style: str | Style, is_transient: bool) -> None:
        from rich.live import Live
        from rich.progress import Progress
        from rich.text import Text

        self._console, self._style = console, style
        self._metrics, self._is_beside = Text(), True
        # In a notebook long metrics wrap within their column.
        metrics = column(
            lambda task: self._metrics if self._is_beside and task.id == self._first() else Text(), console.is_jupyter
        )
        self.progress = Progress(*columns, metrics, console=console, expand=True)
        self._handle: Any = None
        self._is_transient = is_transient
        self._live: Live | None = None
        self._above: dict[str, AboveScreen] = {}
        if console.is_jupyter:
            # Rich's own display needs ipywidgets, and a saved notebook does not show it.
            from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

            self._handle = display(self.progress, display_id=True)
            self._replaced: above_bars.ReplacedStreams | None = None
            return
        # Rich's own redirection takes "[/x]" for markup, and ends a line at each flush.
        self._live = Live(
            console=console,
            auto_refresh=False,
            get_renderable=self._rendered,
            transient=is_transient,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        # Where its file is the `sys.stdout` of the moment, it would write into what takes its place.
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
        """Sets the metrics, which the next drawing shows."""
        from rich.text import Text

        self._metrics = Text(metrics, style=self._style)

    def refresh(self) -> None:
        """Draws."""
        if self._live is not None:
            self._live.refresh()
        elif self._handle is not None:
            self._handle.update(self.progress)

    def stop(self) -> None:
        """Ends the drawing, and restores the streams and the cursor."""
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

        tasks = self.progress.tasks
        self._is_beside = True
        self._is_beside = self._least_width(tasks) + BAR_WIDTH <= self._console.width
        table = self.progress.make_tasks_table(tasks)
        open_lines = [above.open_line for above in self._above.values() if above.open_line]
        return Group(*open_lines, table, *(() if self._is_beside else (self._metrics,)))

    def _least_width(self, tasks: list[Task]) -> int:
        """Returns the width of the widest cell of each column, and of a bar, which takes what is left, its least."""
        from rich.measure import Measurement

        options, width = self._console.options.update(max_width=UNLIMITED), 0
        for own in self.progress.columns:
            cells = [own.format(task=task) if isinstance(own, str) else own(task) for task in tasks]
            sizes = [Measurement.get(self._console, options, cell) for cell in cells]
            width += 1 + max((size.maximum if size.maximum < UNLIMITED else size.minimum for size in sizes), default=0)
        return width


class AboveScreen(above_bars.Lines):
    """Prints what is written above a Screen, as it is; a line that has not ended stands on the screen itself.

    Args:
        stream: the terminal's stream.
        console: of the screen.
        refresh: draws the screen.
    """

    def __init__(self, stream: Any, console: Console, refresh: Callable[[], None]) -> None:
        from rich.ansi import AnsiDecoder
        from rich.text import Text

        super().__init__(stream)
        self._console, self._refresh, self._decoder = console, refresh, AnsiDecoder()
        self.open_line = Text()
        """The end of the line that has been flushed before it ended."""

    def _write_lines(self, text: str) -> None:
        from rich.text import Text

        self.open_line = Text()
        lines = [self._decoder.decode_line(line.rstrip("\r")) for line in text[:-1].split("\n")]
        self._console.print(Text("\n").join(lines))

    def _write_rest(self) -> None:
        from rich.text import Text

        # What a carriage return has overwritten is gone.
        self._rest = self._rest[self._rest.rstrip("\r").rfind("\r") + 1 :]
        line = Text.from_ansi(self._rest.rstrip("\r"), no_wrap=True, overflow="crop")
        self.open_line = line[-self._console.width :]
        self._refresh()

    def _end(self) -> None:
        if self._rest:
            self._write_lines(self._rest + "\n")


class Meter:
    """How far a bar is, how fast, and how long it has taken.

    Args:
        done: the batches that were done before it began.
        total: all batches; None if unknown.
    """

    def __init__(self, done: int, total: int | None) -> None:
        self._start = self._last = time.perf_counter()
        self._done, self._total = done, total
        self._speed: float | None = None

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.perf_counter() - self._start

    def skip(self, seconds: float) -> None:
        """Leaves out a time that belongs to something else."""
        self._start += seconds
        self._last += seconds

    def move(self, done: int) -> None:
        """Counts batches."""
        now = time.perf_counter()
        if done > self._done and now > self._last:
            speed = (done - self._done) / (now - self._last)
            before = speed if self._speed is None else self._speed
            self._speed = SMOOTHING * speed + (1 - SMOOTHING) * before
            self._last, self._done = now, done

    def texts(self) -> dict[str, Any]:
        """Returns what stands in the columns."""
        left = None if self._total is None or not self._speed else (self._total - self._done) / self._speed
        return {
            "batches": f"{self._done}/{'--' if self._total is None else self._total}",
            "time": f"{_clock(self.seconds)} • {_clock(left)}",
            "speed": "" if self._speed is None else f"{self._speed:.2f}it/s",
        }


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def column(render: Callable[[Task], Text], wraps: bool = False) -> ProgressColumn:
    """Makes a column of Rich's from the function that returns its text, on one line unless it `wraps`."""
    from rich.progress import ProgressColumn
    from rich.table import Column

    class Rendered(ProgressColumn):
        def render(self, task: Task) -> Text:
            return render(task)

    return Rendered(table_column=Column(no_wrap=not wraps))


def field_column(name: str, style: str | Style) -> ProgressColumn:
    """Makes a column that shows a field of each task, and nothing for a task without it."""
    from rich.text import Text

    return column(lambda task: Text(str(task.fields.get(name, "")), style=style))


def check_theme(theme: RichProgressBarTheme, console: Console) -> None:
    """Raises a ConfigurationError for a style or format that Rich or Python does not know."""
    from rich.errors import MissingStyle

    if not isinstance(theme, RichProgressBarTheme):
        raise ConfigurationError(f"theme={theme!r}: give a RichProgressBarTheme(…), not {kind_of(theme)}.")
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
