"""TQDMProgressBar, a callback that shows the progress of a run with tqdm."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from io import StringIO
from typing import Any, ClassVar

from leyden.callbacks.bars.above_bars import ReplacedStreams
from leyden.callbacks.bars.paced_bar import PacedProgressBar, in_notebook
from leyden.callbacks.bars.progress_bar import format_metrics
from leyden.core.checks import check_whole
from leyden.core.errors import needs

WITHOUT_TIMES = "{l_bar}{bar}| {n_fmt}/{total_fmt}"


def _bar_of(*stages: str) -> property:
    """Returns a property: the bar of the one of these stages that is running, else a silent bar."""

    def running(bars: dict[str, Any]) -> str:
        return next((stage for stage in stages if stage in bars), stages[-1])

    def get_bar(self: TQDMProgressBar) -> Any:
        bar = self._bars.get(running(self._bars))
        return silent_bar() if bar is None else bar

    def set_bar(self: TQDMProgressBar, bar: Any) -> None:
        self._bars[running(self._bars)] = bar

    return property(get_bar, set_bar, doc=f"The bar of this stage: {stages[-1]}. A silent bar if it is not running.")


class TQDMProgressBar(PacedProgressBar):
    """Shows one tqdm bar for the training epoch and one for evaluation. Without a terminal, it prints plain lines.

    A bar is redrawn at most ten times a second, and metrics are read back from the device only then. Between drawings,
    a batch costs one reading of the clock. Printed and logged text appears above the bars. Without a terminal (a log
    file, a batch job), a line with epoch, step, speed and metrics is printed at the end of each epoch and every 30 s;
    the first one comes after 5 s.

    Metrics that leave less than ten cells for the bar move to a second line, and a terminal too narrow for the times
    shows none.

    Override `get_metrics` to choose the metrics, a `…_description` to rename a bar, and `init_…_tqdm` to use other bars
    (any class with tqdm's methods). `train_progress_bar`, `val_progress_bar`, `test_progress_bar` and
    `predict_progress_bar` are the bars on the screen, or silent ones where none is drawn.

    Args:
        refresh_rate: minimum number of batches between redraws; 0 hides the bar.
        process_position: number of lines to leave free above the bars, for several runs in one terminal.
        leave: whether to keep the bar of each epoch on the screen.

    Raises:
        ConfigurationError: if `refresh_rate` or `process_position` is negative.

    Example:
        >>> class WithoutVersion(TQDMProgressBar):
        ...     def get_metrics(self, trainer, module):
        ...         metrics = super().get_metrics(trainer, module)
        ...         metrics.pop("v_num", None)
        ...         return metrics
        >>> bar = WithoutVersion(refresh_rate=10)
        >>> # Trainer(callbacks=[bar])
    """

    BAR_FORMAT: ClassVar[str | None] = None
    """The `bar_format` of the bars; None for tqdm's default."""

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate)
        check_whole(type(self).__name__, 0, process_position=process_position)
        self._position = process_position
        self._leave = leave
        self._bars: dict[str, Any] = {}
        """The bars on the screen, by stage: "train", below it "metrics" if they need a line, then an evaluation."""
        self._displays: list[Any] = []
        """In a notebook, the displays of closed bars, for reuse by later bars."""
        self._printing: ReplacedStreams | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and other processes: without bars, which hold a lock and a file."""
        return {**super().__getstate__(), "_bars": {}, "_displays": [], "_printing": None}

    @property
    def process_position(self) -> int:
        """Number of lines left free above the bars."""
        return self._position

    train_progress_bar = _bar_of("train")
    val_progress_bar = _bar_of("sanity", "validation")
    test_progress_bar = _bar_of("test")
    predict_progress_bar = _bar_of("predict")

    def init_train_tqdm(self) -> Any:
        """Creates the bar of the training epochs. Each epoch sets its own description."""
        return self._new_bar(self.train_description, leave=True)

    def init_validation_tqdm(self) -> Any:
        """Creates the bar of a validation, below the training bar if there is one."""
        below = len(self._bars)
        return self._new_bar(self.validation_description, leave=not below, below=below)

    def init_sanity_tqdm(self) -> Any:
        """Creates the bar of the sanity check."""
        return self._new_bar(self.sanity_check_description, leave=False)

    def init_test_tqdm(self) -> Any:
        """Creates the bar of a test."""
        return self._new_bar(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Creates the bar of a prediction."""
        return self._new_bar(self.predict_description, leave=True)

    # how PacedProgressBar draws ---------------------------------------------------------------------------------------
    def _can_redraw(self) -> bool:
        return is_interactive()

    def _open_training(self) -> None:
        if "train" not in self._bars:
            self._bars["train"] = self._create(self.init_train_tqdm)
        self._begin_printing()

    def _open_epoch(self, name: str, done: int, total: int | None) -> None:
        bar = self._bars["train"]
        if self._leave and bar.n:
            self._close_training()
            self._open_training()
            bar = self._bars["train"]
        bar.set_description_str(name, refresh=False)
        bar.reset(total)
        if done:
            bar.initial = bar.n = bar.last_print_n = done
            bar.refresh()

    def _draw_training(self, done: int, metrics: dict[str, Any] | None) -> None:
        bar = self._bars["train"]
        if metrics is not None:
            self._show_metrics(bar, format_metrics(metrics))
        draw(bar, done)

    def _open_evaluation(self, stage: str, total: int | None) -> None:
        self._bars[stage] = self._create(getattr(self, f"init_{stage}_tqdm"))
        self._begin_printing()
        self._bars[stage].reset(total)

    def _draw_evaluation(self, done: int) -> None:
        for bar in self._evaluation_bars().values():
            # A subclass may reset the bar for each loader; it then counts that loader's batches.
            counts_all_loaders = getattr(bar, "total", self._eval_total) == self._eval_total
            fit_to_terminal(bar)
            draw(bar, done if counts_all_loaders else self._eval_batch)

    def _close_evaluation(self) -> None:
        for stage, bar in self._evaluation_bars().items():
            bar.close()
            del self._bars[stage]
        if "train" in self._bars:
            # The speed of training does not include the time of an evaluation.
            self._bars["train"].unpause()
        self._end_printing()

    def _close(self) -> None:
        self._close_evaluation()
        self._close_training()
        # Displays belong to a notebook cell, and the next run may be in another one.
        self._displays.clear()

    def _close_training(self) -> None:
        for name in ("train", "metrics"):
            if name in self._bars:
                self._bars.pop(name).close()
        self._end_printing()

    def _evaluation_bars(self) -> dict[str, Any]:
        return {stage: bar for stage, bar in self._bars.items() if stage not in ("train", "metrics")}

    def _show_metrics(self, bar: Any, text: str) -> None:
        """Shows the metrics in the bar, or in a line of their own once they have not fit."""
        bar.set_postfix_str(text, refresh=False)
        if "metrics" not in self._bars and not fit_to_terminal(bar):
            make = functools.partial(new_bar, 2 * self._position + 1, leave=True, bar_format="{desc}")
            self._bars["metrics"] = self._create(make)
        line = self._bars.get("metrics")
        if line is not None:
            from tqdm.utils import disp_trim  # type: ignore[import-untyped, unused-ignore]

            bar.set_postfix_str("", refresh=False)
            columns = line.format_dict["ncols"]
            line.set_description_str(disp_trim(text, columns) if columns else text, refresh=False)
            line.refresh()

    def _create(self, make: Callable[[], Any]) -> Any:
        with nullcontext() if self._printing is None else self._printing.suspended():
            return make()

    def _new_bar(self, description: str, leave: bool, below: int = 0) -> Any:
        options: dict[str, Any] = {"desc": description, "bar_format": self.BAR_FORMAT}
        if in_notebook():
            options |= {"free": self._displays, "is_reused": below > 0}
        return new_bar(2 * self._position + below, leave, **options)

    def _begin_printing(self) -> None:
        """Makes printed and logged text appear above the bars, until `_end_printing`."""
        if self._printing is None:
            self._printing = ReplacedStreams(self._print_above)

    def _print_above(self, stream: Any, text: str) -> None:
        bars = list(self._bars.values())
        for bar in bars:
            bar.clear()
        stream.write(text)
        stream.flush()
        for bar in bars:
            bar.refresh()

    def _end_printing(self) -> None:
        if self._printing is not None and not self._bars:
            self._printing.end()
            self._printing = None


def is_interactive() -> bool:
    """Returns True if a bar can be redrawn: in a notebook, or if stderr is a terminal."""
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def new_bar(position: int, leave: bool, **options: Any) -> Any:
    """Creates a tqdm bar that is drawn only on request."""
    with needs("tqdm", None, "TQDMProgressBar"):
        from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
    if in_notebook():
        tqdm = notebook_bar()
    on_request = {"dynamic_ncols": True, "mininterval": 0, "miniters": 0, "delay": 1e-9}
    return tqdm(total=None, position=position, leave=leave, **on_request, **options)


def fit_to_terminal(bar: Any) -> bool:
    """Returns False if a bar has ten cells only without its metrics. Drops the times if they do not fit even then.

    True for bars without a width, such as those of a notebook, and for bars of other classes than tqdm's.
    """
    fields = getattr(bar, "format_dict", None) or {}
    if not fields.get("ncols") or least_width(bar, fields) <= fields["ncols"]:
        return True
    without_metrics = least_width(bar, {**fields, "postfix": ""})
    if fields["bar_format"] is None and fields["total"] is not None and without_metrics > fields["ncols"]:
        bar.bar_format = WITHOUT_TIMES
    # A user's own format may not show metrics.
    return without_metrics == least_width(bar, fields)


def least_width(bar: Any, fields: dict[str, Any]) -> int:
    """Returns the width of a tqdm bar with ten cells, tqdm's number of cells where no width is known."""
    from tqdm.utils import disp_len  # type: ignore[import-untyped, unused-ignore]

    return int(disp_len(bar.format_meter(**{**fields, "ncols": None})))


def draw(bar: Any, done: int) -> None:
    """Advances the bar to `done` batches and draws it."""
    if done > bar.n:
        bar.update(done - bar.n)
        # A user's own bar may skip drawing in `update`; `refresh` below then draws it.
        if getattr(bar, "last_print_n", done) == done:
            return
    bar.refresh()


@cache
def silent_bar() -> Any:
    """Returns a bar that shows nothing, importing tqdm on the first call."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    return tqdm(disable=True)


@cache
def notebook_bar() -> type[Any]:
    """Returns the bar class, importing tqdm on the first call.

    tqdm's own notebook bar needs ipywidgets. Without them, it writes cursor-up sequences that a notebook shows as
    repeated lines. With them, each removed bar leaves an empty widget, and a saved notebook shows every bar at 0 %.
    """
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class NotebookBar(tqdm):  # type: ignore[misc, unused-ignore]
        """A bar that redraws one notebook display in place.

        It takes the last of the `free` displays of earlier bars, and returns one that `is_reused` once it is empty.
        """

        def __init__(self, *args: Any, free: list[Any], is_reused: bool, **options: Any) -> None:
            self._free, self._is_reused = free, is_reused
            self._handle: Any = None
            super().__init__(*args, file=StringIO(), **{"ascii": False, **options})

        def display(self, msg: str | None = None, pos: int | None = None, **kwargs: Any) -> None:
            text = str(self) if msg is None else msg
            if self._handle is None:
                if not text:
                    return
                self._handle = self._free.pop() if self._free else _new_display()
            self._handle.update({"text/plain": text}, raw=True)
            if not text and self._is_reused:
                self._free.append(self._handle)
                self._handle = None

        def clear(self, *args: Any, **kwargs: Any) -> None:
            """A no-op: printed text appears below the bar."""

    return NotebookBar


def _new_display() -> Any:
    from IPython.display import display

    return display({"text/plain": ""}, raw=True, display_id=True)
