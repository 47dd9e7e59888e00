"""ProgressBar, the base class for progress bars, and the number format of bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks.base import Callback
from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class ProgressBar(Callback):
    """Base class for progress bars. A bar passed as a callback replaces the Trainer's default bar.

    Override the hooks that move the bar, `get_metrics` to choose the metrics it shows, and `print` to keep printed text
    from breaking it. `total_train_batches`, `total_val_batches_current_dataloader` and so on give the number of
    batches. `enable` and `disable` switch the bar; ranks other than the first disable it.

    Example:
        >>> class Percent(ProgressBar):
        ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        ...         if self.is_enabled:
        ...             self.print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} %", end="\\r")
        >>> # Trainer(callbacks=[Percent()])
    """

    # A closing callback, so that an event's metrics are reduced before they are shown. It runs before checkpoint
    # callbacks, which take time.
    order: ClassVar[int] = 150

    # Class attributes, so that a subclass need not call __init__.
    _enabled: bool = True
    _trainer: Trainer | None = None
    _loader: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and other processes: everything except the Trainer."""
        return {name: value for name, value in vars(self).items() if name != "_trainer"}

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Keeps a reference to the Trainer, and disables the bar on all ranks except rank 0."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the run.

        Raises:
            ConfigurationError: before the first run.
        """
        if self._trainer is None:
            raise ConfigurationError(
                f"{type(self).__name__}.trainer is not set before the first run. If you override setup(), call "
                "super().setup(trainer, module, stage) in it."
            )
        return self._trainer

    @property
    def is_enabled(self) -> bool:
        """True if the bar is shown."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """True if the bar is not shown."""
        return not self.is_enabled

    def enable(self) -> None:
        """Shows the bar, starting with the next stage."""
        self._enabled = True

    def disable(self) -> None:
        """Hides the bar, starting with the next stage."""
        self._enabled = False

    # stage names: override to change the text
    @property
    def sanity_check_description(self) -> str:
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        return "Training"

    @property
    def validation_description(self) -> str:
        return "Validation"

    @property
    def test_description(self) -> str:
        return "Testing"

    @property
    def predict_description(self) -> str:
        return "Predicting"

    # batch counts: inf if a loader has no length
    @property
    def total_train_batches(self) -> float:
        """Number of batches in a training epoch. With max_steps alone, fewer in the epoch that it ends."""
        trainer = self.trainer
        if trainer.max_epochs != -1 or trainer.max_steps < 0:
            return trainer.num_training_batches
        window, done = trainer.accumulate_grad_batches, trainer.progress.batch
        left = (trainer.max_steps - trainer.global_step) * window
        return min(trainer.num_training_batches, done - done % window + left)

    @property
    def total_val_batches_current_dataloader(self) -> float:
        """Number of batches of the current validation loader; in the sanity check, the number that the check runs."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> float:
        """Number of batches of the current test loader."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> float:
        """Number of batches of the current prediction loader."""
        return self._of_loader(self.trainer.num_predict_batches)

    @property
    def total_val_batches(self) -> float:
        """Number of batches of all validation loaders together."""
        return sum(self.trainer.num_val_batches)

    def _of_loader(self, sizes: Sequence[float]) -> float:
        index = self.trainer.logs.dataloader_idx or 0
        return sizes[index] if index < len(sizes) else 0

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Returns True if the loader differs from the previous call's, or if this is the evaluation's first call."""
        before, self._loader = self._loader, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Makes the next `has_dataloader_changed` return True. Called at the end of an evaluation."""
        self._loader = None

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """Returns the metrics to show: those logged with `prog_bar=True`, and the loggers' version as `v_num`.

        The metrics are read back from the device in one transfer.
        """
        metrics: dict[str, Any] = dict(trainer.progress_bar_metrics)
        return metrics if "v_num" in metrics else metrics | _version(trainer)

    def print(
        self, *args: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool | None = None
    ) -> None:
        """Prints without breaking a bar on the screen. Takes the arguments of Python's `print`."""
        print(*args, sep=sep, end=end, file=file, flush=file is None if flush is None else flush)


def _version(trainer: Trainer) -> dict[str, Any]:
    """Returns the loggers' version as `v_num`. A string is cut to its last characters, in which ids differ."""
    versions = [version for logger in trainer.loggers if (version := logger.version) not in (None, "")]
    if not versions:
        return {}
    shown = versions[0] if len(versions) == 1 else "_".join(str(version) for version in dict.fromkeys(versions))
    return {"v_num": shown[-4:] if isinstance(shown, str) else shown}


def format_number(value: Any) -> str:
    """Formats a number in a few characters of nearly constant width, so that the bar does not jump.

    Example:
        >>> [format_number(value) for value in (3, 0.51234, 12345.678, 1e-5, float("nan"))]
        ['3', '0.512', '12345.7', '1.00e-05', 'nan']
    """
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return f"{value:g}"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.2e}"
    return f"{value:.3f}" if size < 1000 else f"{value:.1f}"


def format_metrics(metrics: dict[str, Any]) -> str:
    """Formats metrics as `name=value`, separated by commas."""
    return ", ".join(f"{name}={format_number(value)}" for name, value in metrics.items())
