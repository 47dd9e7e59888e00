"""LearningRateFinder, a callback that searches a learning rate before the fit begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.tuning.learning_rate import LRFinder, RateSearch
from leyden.trainer.tuning.trial import Subject
from leyden.trainer.tuning.tuner import find_rate

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class LearningRateFinder(Callback):
    """Searches a learning rate at the start of a fit, with a copy of the module, and gives it to the module.

    It searches in `setup`, before `configure_optimizers`, so that optimizer and schedulers are made with what it found
    (Lightning searches in `on_fit_start`, after them). A fit that resumes a checkpoint does not search again. The run
    is otherwise bit for bit the one with that rate from the start. On several ranks search with
    `Tuner(trainer).lr_find(…)` before fit.

    A subclass that overrides `on_fit_start` searches when it calls `lr_find(trainer, module)` itself: at epochs of its
    own, say, on one process. The optimizer's rate is changed then, too; a scheduler that computes rates from the first
    one, such as LambdaLR, sets its own again at its next step.

    Args:
        min_lr: the first rate.
        max_lr: the last one.
        num_training_steps: steps of the search.
        mode: how the rate grows: "exponential" or "linear".
        early_stop_threshold: ends the search once the loss is so many times the best; None for no end.
        update_attr: give the module the suggested rate.
        attr_name: which attribute or hyperparameter; `lr` or `learning_rate` if empty.

    Attributes:
        optimal_lr: what was found, with `suggestion()`, `results` and `plot()`; None before.

    Raises:
        ConfigurationError: for a value that cannot be, or if the module has no such attribute.

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
        searches_itself = type(self).on_fit_start is not LearningRateFinder.on_fit_start
        if stage == "fit" and trainer.ckpt_path is None and trainer.global_step == 0 and not searches_itself:
            self._search_now(trainer, module)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Does nothing: the search is over by then."""

    def lr_find(self, trainer: Trainer, module: TrainModule) -> None:
        """Searches now, and gives what is suggested to the optimizers, too."""
        rate = self._search_now(trainer, module)
        for optimizer in trainer.optimizers if rate is not None else ():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _search_now(self, trainer: Trainer, module: TrainModule) -> float | None:
        """Searches; returns the rate that the module was given, or None."""
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"LearningRateFinder searches on one process, and there are {trainer.world_size} ranks: search before "
                "fit, with Tuner(trainer).lr_find(module, …)."
            )
        given = trainer.given_loaders
        loaders = {"train_dataloaders": given.get("train"), "val_dataloaders": given.get("val")}
        self.optimal_lr, rate = find_rate(self._search, Subject(trainer, "fit", module, loaders, trainer.datamodule))
        return rate
