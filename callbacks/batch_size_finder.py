"""BatchSizeFinder, a callback that finds the largest batch size that fits into memory, before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyden.callbacks.base import Callback
from leyden.trainer.tuning.batch_size import BatchSizeSearch
from leyden.trainer.tuning.trial import Subject
from leyden.trainer.tuning.tuner import find_batch_size

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class BatchSizeFinder(Callback):
    """Searches for the largest batch size that fits into memory, with copies, and sets it on the module or DataModule.

    The search runs in `setup` of fit, validate, test or predict, before the loaders are created. A fit that resumes a
    checkpoint does not search. Loaders passed to the Trainer and several ranks are not supported.

    Args:
        mode: "power" doubles the size until it is too large; "binsearch" then bisects the last interval.
        steps_per_trial: the number of steps per trial.
        init_val: the first size.
        max_trials: the maximum number of trials.
        batch_arg_name: the attribute or hyperparameter that holds the size.
        margin: the fraction by which "binsearch" reduces the size it found.
        max_val: the largest size to try; None for no limit.

    Attributes:
        optimal_batch_size: the result; None before the search.

    Raises:
        ConfigurationError: for an invalid value, or if the run does not support a search.

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
        is_continued = stage == "fit" and (trainer.ckpt_path is not None or trainer.global_step > 0)
        if not is_continued:
            self.scale_batch_size(trainer, module)

    def scale_batch_size(self, trainer: Trainer, module: TrainModule) -> None:
        """Searches now."""
        subject = Subject.of_run(trainer, trainer.state.stage or "fit", module)
        self.optimal_batch_size = find_batch_size(self._search, subject)
