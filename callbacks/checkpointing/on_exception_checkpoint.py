"""OnExceptionCheckpoint, a callback that saves a checkpoint when a run fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from leyden.callbacks.base import Callback
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import Place, expanded
from leyden.checkpoint.format.errors import CheckpointError
from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class OnExceptionCheckpoint(Callback):
    """Saves a checkpoint when fit ends with an exception, Ctrl-C included.

    Gradients are never saved. A checkpoint taken inside an accumulation window therefore points to the start of the
    window, and a resume repeats the window.

    Args:
        dirpath: the folder to save in.
        filename: the checkpoint's name; `-v1`, `-v2`, … is appended if it is taken.

    Raises:
        ConfigurationError: if `filename` is empty or too long, or leads out of the folder.

    Attributes:
        saved_path: the last checkpoint written; None before the first.

    Example:
        >>> OnExceptionCheckpoint("runs/digits").ckpt_path
        'runs/digits/on_exception'
    """

    order: ClassVar[int] = 200

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if filename in ("", ".", "..") or Path(filename).name != filename:
            raise ConfigurationError(
                f"OnExceptionCheckpoint(filename={filename!r}): use a plain name, and put folders in dirpath."
            )
        staging.check_length(filename)
        self.dirpath = expanded(dirpath, "dirpath")
        self.filename = filename
        self.saved_path: Place | None = None

    @property
    def ckpt_path(self) -> str:
        """The path for the checkpoint, before any version is appended."""
        return os.path.join(self.dirpath, self.filename)

    @property
    def state_key(self) -> str:
        return self._generate_state_key(dirpath=self.dirpath, filename=self.filename)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self.saved_path = save_after(trainer, self.ckpt_path, exception) or self.saved_path


def can_save_after(trainer: Trainer, exception: BaseException) -> bool:
    """Returns True if a failed run has state to save and every rank can take part in the save."""
    if trainer.state.stage != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
        return False
    if isinstance(exception, CheckpointError):
        return False
    # A save needs all ranks. After an error the other ranks may be anywhere; a signal stops all at the same step.
    return trainer.world_size == 1 or exception is trainer.signals.interruption


def save_after(trainer: Trainer, path: str, exception: BaseException, weights_only: bool = False) -> Place | None:
    """Saves a failed run if possible, and returns the path written, or None.

    An error during the save becomes a warning, so the original error is not hidden.
    """
    if not can_save_after(trainer, exception):
        return None
    try:
        path = trainer.strategy.ranks.broadcast(path)
        return trainer.save_checkpoint(
            path, weights_only, exact=trainer.window_is_over, overwrite=False, asynchronous=False
        )
    except Exception as error:
        warn(f"no checkpoint could be saved after {type(exception).__name__}: {error}")
        return None
