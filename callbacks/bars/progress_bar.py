"""ProgressBar, the base class of progress bars, and how they write numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class ProgressBar(Callback):
    """Base class of progress bars, by which the Trainer finds them. A bar in `callbacks` replaces the default one.

    Override the hooks in which the bar moves, `get_metrics` to choose what it shows, and `print` to keep printed text
    off it.

    Example:
        >>> class Percent(ProgressBar):
        ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        ...         if self.is_enabled:
        ...             self.print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} %", end="\\r")
        >>> # Trainer(callbacks=[Percent()])
    """

    # A closing callback, so that an event's metrics are reduced before they are shown; before checkpoints, which take
    # time.
    order: ClassVar[int] = 150

    # On the class, so that a subclass need not call __init__.
    _enabled: bool = True
    _trainer: Trainer | None = None
    _loader: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and sent to other processes: everything but the Trainer."""
        return {name: value for name, value in vars(self).items() if name != "_trainer"}

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Keeps the Trainer, and disables the bar on all ranks but the first."""
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
                f"{type(self).__name__}.trainer: there is none before the first run. A setup() of your own must call "
                "super().setup(trainer, module, stage)."
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
        """Shows the bar from the next stage on."""
        self._enabled = True

    def disable(self) -> None:
        """Hides the bar from the next stage on."""
        self._enabled = False

    # names of the stages: override them to show others
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

    # numbers of batches: inf if a loader has no length
    @property
    def total_train_batches(self) -> float:
        """Batches of a training epoch."""
        return self.trainer.num_training_batches

    @property
    def total_val_batches_current_dataloader(self) -> float:
        """Batches of the validation loader that runs now, and in the sanity check its share of them."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> float:
        """Batches of the test loader that runs now."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> float:
        """Batches of the prediction loader that runs now."""
        return self._of_loader(self.trainer.num_predict_batches)

    @property
    def total_val_batches(self) -> float:
        """Batches of all validation loaders."""
        return sum(self.trainer.num_val_batches)

    def _of_loader(self, sizes: Sequence[float]) -> float:
        index = self.trainer.logs.dataloader_idx or 0
        return sizes[index] if index < len(sizes) else 0

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Returns True if it was last called with another loader, or not at all in this evaluation."""
        before, self._loader = self._loader, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Makes the next `has_dataloader_changed` return True; for the end of an evaluation."""
        self._loader = None

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """Returns the metrics to show: those logged with `prog_bar=True`, which are read back from the device all at
        once, and the loggers' version as `v_num`.
        """
        metrics = dict(trainer.read_metrics(trainer.progress_bar_metrics))
        return metrics if "v_num" in metrics else metrics | _version(trainer)

    def print(
        self, *args: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool | None = None
    ) -> None:
        """Prints without breaking a bar on the screen; takes the arguments of Python's `print`."""
        print(*args, sep=sep, end=end, file=file, flush=file is None if flush is None else flush)


def _version(trainer: Trainer) -> dict[str, Any]:
    """Returns the version of the loggers under its name in a bar; of a string the end, where ids differ."""
    versions = [version for logger in trainer.loggers if (version := logger.version) not in (None, "")]
    if not versions:
        return {}
    shown = versions[0] if len(versions) == 1 else "_".join(str(version) for version in dict.fromkeys(versions))
    return {"v_num": shown[-4:] if isinstance(shown, str) else shown}


def format_number(value: Any) -> str:
    """Formats a number in a few characters, always about as many, so that the bar does not jump.

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
