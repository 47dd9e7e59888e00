"""BatchSizeFinder, a callback that searches the largest batch that fits, before a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyden.callbacks.base import Callback
from leyden.trainer.tuning.batch_size import BatchSizeSearch
from leyden.trainer.tuning.trial import Subject
from leyden.trainer.tuning.tuner import find_batch_size

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

KINDS = {"validate": "val", "test": "test", "predict": "predict"}


class BatchSizeFinder(Callback):
    """Searches the largest batch that fits into memory, with copies, and gives it to the module or DataModule.

    It searches in `setup` of a fit, validate, test or predict, before the loaders are made; a fit that resumes a
    checkpoint does not search. Loaders that are passed to the Trainer, and several ranks, are refused.

    Args:
        mode: "power" doubles the size until it is too large; "binsearch" halves the interval then.
        steps_per_trial: steps that must fit.
        init_val: the first size.
        max_trials: sizes tried at most.
        batch_arg_name: the attribute or hyperparameter that is the size.
        margin: what "binsearch" leaves free of the size that it found, as a fraction.
        max_val: no larger one is tried; None for no limit.

    Attributes:
        optimal_batch_size: what was found; None before.

    Raises:
        ConfigurationError: for a value that cannot be, and where a size cannot be searched.

    Example:
        >>> BatchSizeFinder(mode="binsearch", max_val=512).optimal_batch_size is None
        True
    """

    state_per_rank = False

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int | None = 8192,
    ) -> None:
        self._search = BatchSizeSearch(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self.optimal_batch_size: int | None = None

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        goes_on = stage == "fit" and (trainer.ckpt_path is not None or trainer.global_step > 0)
        if not goes_on:
            self.scale_batch_size(trainer, module)

    def scale_batch_size(self, trainer: Trainer, module: TrainModule) -> None:
        """Searches now."""
        stage, given = trainer.state.stage or "fit", trainer.given_loaders
        loaders = {"train_dataloaders": given.get("train"), "val_dataloaders": given.get("val")}
        if stage != "fit":
            loaders = {"dataloaders": given.get(KINDS[stage])}
        subject = Subject(trainer, stage, module, loaders, trainer.datamodule)
        self.optimal_batch_size = find_batch_size(self._search, subject)
