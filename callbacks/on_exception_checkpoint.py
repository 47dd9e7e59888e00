"""OnExceptionCheckpoint: a checkpoint of the moment in which a run failed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.format.errors import CheckpointError

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class OnExceptionCheckpoint(Callback):
    """Saves a checkpoint when fit ends by an exception, Ctrl-C included.

    Inside an accumulation window its position is the window's start, so that a resume repeats the window; gradients are
    never saved.

    Args:
        dirpath: where to save.
        filename: the checkpoint's name; if it is taken, `-v1` and so on is appended.

    Raises:
        ConfigurationError: if `filename` is empty, or leads out of its folder.

    Attributes:
        saved_path: what was written last, or None.

    Example:
        >>> OnExceptionCheckpoint("runs/digits").ckpt_path
        'runs/digits/on_exception'
    """

    order: ClassVar[int] = 200

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if filename in ("", ".", "..") or Path(filename).name != filename:
            raise ConfigurationError(
                f"OnExceptionCheckpoint(filename={filename!r}): give one name, and folders in dirpath."
            )
        self.dirpath = os.path.expanduser(os.fspath(dirpath))
        self.filename = filename
        self.saved_path: Path | None = None

    @property
    def ckpt_path(self) -> str:
        """The path asked for."""
        return os.path.join(self.dirpath, self.filename)

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}(dirpath={self.dirpath!r}, filename={self.filename!r})"

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self.saved_path = save_after(trainer, self.ckpt_path, exception) or self.saved_path


def can_save_after(trainer: Trainer, exception: BaseException) -> bool:
    """True if there is something to save of a run that failed, and everybody is there to save it."""
    if trainer.state.stage != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
        return False
    if isinstance(exception, CheckpointError):
        return False
    # Saving is done by all ranks together, and the others may be anywhere. A signal ends them in order.
    return trainer.world_size == 1 or exception is trainer.signals.interruption


def save_after(trainer: Trainer, path: str, exception: BaseException, weights_only: bool = False) -> Path | None:
    """Saves a run that failed, where there is something to save; what goes wrong now must not hide the first error.

    Args:
        trainer: of the run.
        path: of the checkpoint.
        exception: what ended the run; after a failure to save, saving is not tried again.
        weights_only: as in `Trainer.save_checkpoint`.

    Returns:
        What was written, or None.
    """
    if not can_save_after(trainer, exception):
        return None
    try:
        path = trainer.strategy.ranks.broadcast(path)
        return trainer.save_checkpoint(path, weights_only, exact=trainer.window_is_over, overwrite=False)
    except Exception as error:
        warnings.warn(f"no checkpoint could be saved after {type(exception).__name__}: {error}", stacklevel=3)
        return None
