"""RichScreen: Rich's progress display, with metrics beside or below the bars. It is imported when a bar is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Column
from rich.text import Text

from leyden.callbacks.bars.above_bars import ReplacedStreams

BAR_WIDTH = 10
"""Least width of the bar, in characters. If less is left, the metrics move to their own line, then the times go."""
UNLIMITED = 10_000
"""A width, in characters, that no text reaches."""
SPEED_SECONDS = 120.0
"""Time over which the speed is averaged. Batches that take longer show none."""


class RichScreen(Progress):
    """Rich's progress display, which is drawn only on request, in a notebook too.

    `style` is that of the metrics. `stop` clears transient bars from the screen.
    """

    def __init__(self, console: Console, columns: list[ProgressColumn], style: str | Style, is_transient: bool) -> None:
        self._metrics, self._style = "", style
        self._paused = 0.0
        """Seconds for which the training bar has been paused."""
        self._handle: Any = None
        """The display handle in a notebook; None on a terminal."""
        self._streams: ReplacedStreams | None = None
        super().__init__(
            *columns,
            TaskText(self._inline_metrics, style),
            console=console,
            auto_refresh=False,
            speed_estimate_period=SPEED_SECONDS,
            transient=is_transient,
            # Rich's own redirection treats "[/x]" as markup, and breaks the line at each flush.
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=lambda: time.perf_counter() - self._paused,
            expand=True,
        )

    def start(self) -> None:
        if self.console.is_jupyter:
            # Rich's own notebook display needs ipywidgets, and a saved notebook does not show it.
            from IPython.display import display

            self._handle = display(self, display_id=True)
            return
        # Pin the file: a console without one looks up `sys.stdout` at each write, and would find the replacement.
        self.console.file = self.console.file
        super().start()
        self._streams = ReplacedStreams(self._print_above)

    def refresh(self) -> None:
        if self._handle is not None:
            self._handle.update(self)
        else:
            super().refresh()

    def stop(self) -> None:
        if self._handle is None:
            super().stop()
        elif self.live.transient:
            self._handle.update({"text/plain": ""}, raw=True)
        if self._streams is not None:
            self._streams.end()

    def show_task(self, task_id: TaskID, name: str, done: int, total: int | None) -> None:
        """Shows a task, and starts its time and speed at `done` batches."""
        self._tasks[task_id].total = total  # `reset` would keep the previous total if this one is unknown.
        self.reset(task_id, completed=done, visible=True, description=name)
        self.advance(task_id, 0)

    def show_metrics(self, metrics: str) -> None:
        """Sets the metrics for the next drawing."""
        self._metrics = metrics

    def resume_task(self, task_id: TaskID, seconds: float) -> None:
        """Continues a task after `stop_task`: its time and speed do not include these seconds."""
        self._paused += seconds
        self._tasks[task_id].stop_time = None

    def get_renderable(self) -> RenderableType:
        table = self.make_tasks_table(self.tasks)
        if not table.row_count:
            return Group()
        # The metrics are the last column.
        widths = [self._least_width(column) for column in table.columns]
        while len(widths) > 2 and sum(widths) > self.console.width:
            table.columns.pop()
            widths.pop()
        is_inline = len(widths) == len(self.columns)
        return Group(table) if is_inline else Group(table, Text(self._metrics, style=self._style))

    def _least_width(self, column: Column) -> int:
        """Returns the width of a column's widest text. A bar fills any width, so its least one counts."""
        options = self.console.options.update(max_width=UNLIMITED)
        widths = [Measurement.get(self.console, options, cell).maximum for cell in column.cells]
        return 1 + max(BAR_WIDTH if width == UNLIMITED else width for width in widths)

    def _inline_metrics(self, task: Task) -> str:
        first = next(task.id for task in self.tasks if task.visible)
        return self._metrics if task.id == first else ""

    def _print_above(self, stream: Any, text: str) -> None:
        self.console.print(Segments([Segment(text)]), crop=False)


class TaskText(ProgressColumn):
    """A column of text in one line, which a function returns for a task."""

    def __init__(self, text: Callable[[Task], str], style: str | Style) -> None:
        super().__init__(Column(no_wrap=True))
        self._text, self._style = text, style

    def render(self, task: Task) -> Text:
        return Text(self._text(task), style=self._style)


def restyled(style: str | Style, *columns: ProgressColumn) -> ProgressColumn:
    """Returns one column with the texts of Rich's columns in a style of its own."""
    return TaskText(lambda task: " • ".join(filter(None, (str(each.render(task)) for each in columns))), style)


def speed_of(task: Task) -> str:
    """Returns a task's speed in batches per second; nothing before its first batch."""
    return "" if task.speed is None else f"{task.speed:.2f}it/s"
