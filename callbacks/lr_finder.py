"""LearningRateFinder, a callback that finds a learning rate before fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyden.callbacks.base import Callback
from leyden.core.errors import ConfigurationError
from leyden.trainer.tuning.learning_rate import LRFinder, RateSearch
from leyden.trainer.tuning.trial import Subject
from leyden.trainer.tuning.tuner import find_rate

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class LearningRateFinder(Callback):
    """Searches for a learning rate at the start of fit, with a copy of the module, and sets it on the module.

    The search runs in `setup`, before `configure_optimizers`, so the optimizer and schedulers are created with the
    result. (Lightning searches in `on_fit_start`, after that.) Otherwise the run is bit-identical to one that had this
    rate from the start. A fit that resumes a checkpoint does not search again. With several ranks, call
    `Tuner(trainer).lr_find(…)` before fit instead.

    A subclass that overrides `on_fit_start` disables this search and calls `lr_find(trainer, module)` itself, at epochs
    of its choice, for instance; on a single process. `lr_find` also changes the optimizers' rates. A scheduler that
    derives rates from the initial one, such as LambdaLR, overwrites them at its next step.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        num_training_steps: the number of steps in the search.
        mode: how the rate grows: "exponential" or "linear".
        early_stop_threshold: end the search once the loss exceeds the best loss by this factor; None for no limit.
        update_attr: set the suggested rate on the module.
        attr_name: the attribute or hyperparameter to set; `lr` or `learning_rate` if empty.

    Attributes:
        optimal_lr: the result, with `suggestion()`, `results` and `plot()`; None before the search.

    Raises:
        ConfigurationError: for an invalid value, or if the module has no such attribute.

    Example:
        >>> LearningRateFinder(num_training_steps=50).optimal_lr is None
        True
    """

    state_per_rank = False

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        self._search = RateSearch(
            min_lr, max_lr, num_training_steps, mode, early_stop_threshold, update_attr, attr_name
        )
        self.optimal_lr: LRFinder | None = None

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        is_overridden = type(self).on_fit_start is not LearningRateFinder.on_fit_start
        if stage == "fit" and trainer.ckpt_path is None and trainer.global_step == 0 and not is_overridden:
            self._run_search(trainer, module)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """A no-op, since the search has already run in `setup`. An override disables that search."""

    def lr_find(self, trainer: Trainer, module: TrainModule) -> None:
        """Searches now, and also sets the suggested rate on the optimizers."""
        rate = self._run_search(trainer, module)
        for optimizer in trainer.optimizers if rate is not None else ():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _run_search(self, trainer: Trainer, module: TrainModule) -> float | None:
        """Searches; returns the rate set on the module, or None."""
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"LearningRateFinder runs on one process, and there are {trainer.world_size} ranks: call "
                "Tuner(trainer).lr_find(module, …) before fit."
            )
        self.optimal_lr, rate = find_rate(self._search, Subject.of_run(trainer, "fit", module))
        return rate
