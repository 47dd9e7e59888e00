"""TQDMProgressBar, a callback that shows the progress of a run, and draws and reads back no more often than the eye can
follow.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks import above_bars
from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError, needs

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

DRAW_SECONDS = 0.1
LINE_SECONDS = 30.0
# The first line comes early, to show in a log that the run moves, and how fast.
FIRST_LINE_SECONDS = 5.0
# A slow terminal (ssh) may take long to draw. The bar then waits this many times as long, so drawing stays below 5 %.
DRAW_SHARE = 20
NEVER = math.inf


class ProgressBar(Callback):
    """Base class of progress bars, by which the Trainer finds them.

    Override `get_metrics` to choose what is shown, and `print` to keep printed text off the bar.
    """

    # A closing callback, so that an event's metrics are reduced before they are shown; before checkpoints, which take
    # time.
    order: ClassVar[int] = 150
    is_enabled: bool = True

    @property
    def is_disabled(self) -> bool:
        """True if the bar is not shown."""
        return not self.is_enabled

    def enable(self) -> None:
        """Shows the bar from the next stage on."""
        self.is_enabled = True

    def disable(self) -> None:
        """Hides the bar from the next stage on."""
        self.is_enabled = False

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """Returns the metrics to show: those logged with `prog_bar=True`, in one read-back."""
        return dict(trainer.read_metrics(trainer.progress_bar_metrics))

    def print(
        self, *args: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool | None = None
    ) -> None:
        """Prints without breaking a bar on the screen; takes the arguments of Python's `print`."""
        print(*args, sep=sep, end=end, file=file, flush=file is None if flush is None else flush)


class TQDMProgressBar(ProgressBar):
    """Shows a tqdm bar for the training epoch and one for evaluation; plain lines if there is no terminal.

    A bar is redrawn at most ten times a second, and metrics are read back from the device only then; in between, a
    batch costs one reading of the clock. Printed text appears above the bars. Without a terminal (a log file, a batch
    job), a line with epoch, step, speed and metrics is written at the end of each epoch and every 30 s, the first one
    after 5 s.

    Args:
        refresh_rate: redraw only at multiples of this many batches; 0 hides the bar.
        process_position: lines to leave free above the bars, for several runs in one terminal.
        leave: keep the bar of each epoch on the screen.

    Raises:
        ConfigurationError: if `refresh_rate` or `process_position` is negative.

    Example:
        >>> bar = TQDMProgressBar(refresh_rate=10)
        >>> # Trainer(callbacks=[bar])
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        for name, value in (("refresh_rate", refresh_rate), ("process_position", process_position)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"TQDMProgressBar({name}={value!r}): give a whole number of 0 or more.")
        self._refresh_rate = refresh_rate
        self._position = process_position
        self._leave = leave
        self._train_bar: Any = None
        self._eval_bar: Any = None
        self._plain = False
        self._due = NEVER
        """When the training bar may be drawn again, in `time.perf_counter` seconds."""
        self._eval_due = NEVER
        self._eval_done = 0
        self._eval_total: int | None = None
        self._eval_name = ""
        self._eval_since = 0.0
        self._line_since = 0.0
        self._line_batch = 0
        self._has_written = False
        """True once a line was written in this run."""
        self._printing: above_bars.AboveBars | None = None

    @property
    def refresh_rate(self) -> int:
        """The bar is redrawn only at multiples of this many batches."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """The lines left free above the bars."""
        return self._position

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if not trainer.is_global_zero or self._refresh_rate == 0:
            self.disable()
        self._has_written = False

    # A subclass may build other bars, of any class with tqdm's methods.
    def init_train_tqdm(self) -> Any:
        """Makes the bar of the training epochs."""
        return new_bar(position=2 * self._position, leave=True)

    def init_validation_tqdm(self) -> Any:
        """Makes the bar of a validation, below the training bar if there is one."""
        return new_bar(position=2 * self._position + (self._train_bar is not None), leave=self._train_bar is None)

    def init_sanity_tqdm(self) -> Any:
        """Makes the bar of the sanity check."""
        return new_bar(position=2 * self._position, leave=False)

    def init_test_tqdm(self) -> Any:
        """Makes the bar of a test."""
        return new_bar(position=2 * self._position, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Makes the bar of a prediction."""
        return new_bar(position=2 * self._position, leave=True)

    # training
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.is_disabled:
            self._due = NEVER
            return
        self._plain = not is_interactive()
        if not self._plain:
            self._train_bar = self.init_train_tqdm()
            self._begin_printing()
        self._begin_epoch(trainer)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._due == NEVER:
            return
        if self._leave and self._train_bar is not None and self._train_bar.n:
            self._train_bar.close()
            self._train_bar = self.init_train_tqdm()
        self._begin_epoch(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if now < self._due or (batch_idx + 1) % self._refresh_rate:
            return
        self._show_training(trainer, module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._due != NEVER:
            self._show_training(trainer, module, trainer.progress.batch)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._close()

    # evaluation: one bar over all loaders
    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._plain = not is_interactive()

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.sanity_checking:
            self._begin_evaluation(trainer, "sanity", trainer.num_sanity_val_batches)
        else:
            self._begin_evaluation(trainer, "validation", trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin_evaluation(trainer, "test", trainer.num_test_batches)

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin_evaluation(trainer, "predict", trainer.num_predict_batches)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._eval_done += 1
        if time.perf_counter() >= self._eval_due and not self._eval_done % self._refresh_rate:
            self._show_evaluation()

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._eval_due == NEVER:
            return
        # In a fit the next line or redraw of the training bar shows the result.
        if self._eval_bar is not None or (self._due == NEVER and not trainer.sanity_checking):
            self._show_evaluation()
        self._close_evaluation()
        self._line_since += time.perf_counter() - self._eval_since
        if self._train_bar is not None:
            # The speed of training does not include the time of validation.
            self._train_bar.unpause()
            self._due = 0.0

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def print(
        self, *args: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool | None = None
    ) -> None:
        bar = self._train_bar if self._eval_bar is None else self._eval_bar
        if bar is None or file not in (None, sys.stdout, sys.stderr):
            super().print(*args, sep=sep, end=end, file=file, flush=flush)
        else:
            text = (" " if sep is None else sep).join(str(arg) for arg in args)
            bar.write(text, file=sys.stdout if file is None else file, end="\n" if end is None else end)

    def _begin_epoch(self, trainer: Trainer) -> None:
        done, now = trainer.progress.batch, time.perf_counter()
        self._line_since, self._line_batch = now, done
        if self._train_bar is None:
            self._due = now + self._line_pause()
            return
        self._due = 0.0
        self._train_bar.set_description_str(_epoch_name(trainer), refresh=False)
        self._train_bar.reset(_whole(trainer.num_training_batches))
        if done:
            self._train_bar.initial = self._train_bar.n = self._train_bar.last_print_n = done
            self._train_bar.refresh()

    def _show_training(self, trainer: Trainer, module: TrainModule, done: int) -> None:
        metrics = self.get_metrics(trainer, module)
        start = time.perf_counter()
        if self._train_bar is None:
            speed = _rate(done - self._line_batch, start - self._line_since)
            of = "" if (total := _whole(trainer.num_training_batches)) is None else f"/{total}"
            where = (_epoch_name(trainer), f"batch {done}{of}", f"step {trainer.global_step}")
            _line(*where, speed, format_metrics(metrics))
            self._has_written = True
            self._line_since, self._line_batch, self._due = start, done, start + LINE_SECONDS
        else:
            self._train_bar.set_postfix_str(format_metrics(metrics), refresh=False)
            self._due = draw(self._train_bar, done)

    def _begin_evaluation(self, trainer: Trainer, name: str, sizes: Any) -> None:
        self._eval_due, self._eval_done, self._eval_name = NEVER, 0, name
        if self.is_disabled:
            return
        if self._train_bar is None:
            self._plain = not is_interactive()
        totals = [_whole(size) for size in sizes]
        self._eval_total = None if None in totals else sum(total for total in totals if total is not None)
        self._eval_since = time.perf_counter()
        if self._plain:
            self._eval_due = self._eval_since + self._line_pause()
            return
        if self._train_bar is not None:
            draw(self._train_bar, trainer.progress.batch)
        self._eval_bar = getattr(self, f"init_{name}_tqdm")()
        self._begin_printing()
        self._eval_bar.set_description_str(name.capitalize(), refresh=False)
        self._eval_bar.reset(self._eval_total)
        self._eval_due = 0.0

    def _show_evaluation(self) -> None:
        now = time.perf_counter()
        if self._eval_bar is None:
            of = "" if self._eval_total is None else f"/{self._eval_total}"
            speed = _rate(self._eval_done, now - self._eval_since)
            _line(self._eval_name, f"batch {self._eval_done}{of}", speed)
            self._has_written = True
            self._eval_due = now + LINE_SECONDS
        else:
            self._eval_due = draw(self._eval_bar, self._eval_done)

    def _line_pause(self) -> float:
        """Returns the seconds until the next line, fewer before the first line of a run."""
        return LINE_SECONDS if self._has_written else min(FIRST_LINE_SECONDS, LINE_SECONDS)

    def _close_evaluation(self) -> None:
        if self._eval_bar is not None:
            self._eval_bar.close()
        self._eval_bar, self._eval_due = None, NEVER
        self._end_printing()

    def _close(self) -> None:
        self._close_evaluation()
        if self._train_bar is not None:
            self._train_bar.close()
        self._train_bar, self._due = None, NEVER
        self._end_printing()

    def _begin_printing(self) -> None:
        """Makes printed text appear above the bars from now on."""
        if self._printing is None:
            self._printing = above_bars.begin(self._on_screen)

    def _end_printing(self) -> None:
        if not self._on_screen():
            above_bars.end(self._printing)
            self._printing = None

    def _on_screen(self) -> list[Any]:
        return [bar for bar in (self._train_bar, self._eval_bar) if bar is not None]


def is_interactive() -> bool:
    """Returns True if a bar can be redrawn: stderr is a terminal, or this is a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and "IPKernelApp" in getattr(shell, "config", {}):
        return True
    return sys.stderr is not None and sys.stderr.isatty()


def new_bar(position: int, leave: bool) -> Any:
    """Makes a tqdm bar that is drawn only on request."""
    with needs("tqdm", None, "TQDMProgressBar"):
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
    return tqdm(total=None, position=position, leave=leave, dynamic_ncols=True, mininterval=0, miniters=0, delay=1e-9)


def draw(bar: Any, done: int) -> float:
    """Moves the bar to `done` batches, and returns when it may be drawn again."""
    start = time.perf_counter()
    if done > bar.n:
        bar.update(done - bar.n)
    else:
        bar.refresh()
    end = time.perf_counter()
    return end + max(DRAW_SECONDS, DRAW_SHARE * (end - start))


def format_number(value: Any) -> str:
    """Formats a number in a few characters, always about as many, so that the bar does not jump.

    Example:
        >>> [format_number(value) for value in (3, 0.51234, 12345.678, 1e-5, float("nan"))]
        ['3', '0.512', '12345.7', '1.00e-05', 'nan']
    """
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.2e}"
    return f"{value:.3f}" if size < 1000 else f"{value:.1f}"


def format_metrics(metrics: dict[str, Any]) -> str:
    """Formats metrics as `name=value`, separated by commas."""
    return ", ".join(f"{name}={format_number(value)}" for name, value in metrics.items())


def _whole(size: Any) -> int | None:
    return None if size is None or size == math.inf else int(size)


def _epoch_name(trainer: Trainer) -> str:
    last = trainer.max_epochs
    return f"Epoch {trainer.current_epoch}" + (f"/{last - 1}" if last is not None and last > 0 else "")


def _rate(batches: int, seconds: float) -> str:
    return f"{batches / seconds:.1f} it/s" if batches and seconds > 0 else ""


def _line(*parts: str) -> None:
    if sys.stderr is not None:
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)
