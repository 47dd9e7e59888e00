"""StochasticWeightAveraging, a callback that averages the last epochs' weights under a separate learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR, AveragedModel

from leyden.callbacks.averaged_weights import ExchangesWeights, parse_device
from leyden.core.checks import check_choice, check_whole
from leyden.core.errors import ConfigurationError
from leyden.core.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

ANNEALING = ("cos", "linear")


class StochasticWeightAveraging(ExchangesWeights):
    """Averages the weights at the end of each of the last epochs, by torch's recipe (Izmailov et al., 2018).

    From the first averaged epoch on, torch's `SWALR` sets the learning rate, and the run's scheduler is suspended. At
    the end of the last epoch the averages replace the weights, and one more pass over the training data recomputes
    batch norm's statistics for them. Checkpoints saved after that, at the epoch's end or later, hold the averages.
    Earlier validations use the current weights, and earlier checkpoints hold them; so do those that the last epoch
    saves after a step or a validation. A resume continues bit for bit.

    Lightning averages the weights at the start of each of these epochs, so it never includes those of the last epoch.

    Args:
        swa_lrs: the learning rate during averaging, or a list with one for each parameter group.
        swa_epoch_start: the first averaged epoch: a number counted from 1, or a fraction of `max_epochs`.
        annealing_epochs: the number of epochs over which the learning rate moves to `swa_lrs`; 0 for immediately.
        annealing_strategy: the shape of that transition: "cos" or "linear".
        avg_fn: a function of the average, the weight and the number of updates so far. None: the plain mean.
        device: the device of the averages. None: the device of the weights.

    Raises:
        ConfigurationError: for an invalid value, several optimizers or schedulers, a strategy that cannot exchange
            weights, or weights trained in float16 or bfloat16.

    Example:
        >>> swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.5)
        >>> swa.first_epoch(max_epochs=10)
        4
    """

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        by_group = isinstance(swa_lrs, (list, tuple))
        rates: list[Any] = list(swa_lrs) if isinstance(swa_lrs, (list, tuple)) else [swa_lrs]
        if not rates or any(
            isinstance(rate, bool) or not isinstance(rate, (int, float)) or rate <= 0 for rate in rates
        ):
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_lrs={swa_lrs!r}): give a learning rate above 0, or a list with one for "
                "each parameter group."
            )
        start = swa_epoch_start
        is_count = type(start) is int and start >= 1
        if not is_count and not (isinstance(start, float) and 0 <= start <= 1):
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_epoch_start={start!r}): give an epoch from 1, or a fraction of "
                "max_epochs from 0.0 to 1.0."
            )
        check_whole("StochasticWeightAveraging", 0, annealing_epochs=annealing_epochs)
        check_choice("StochasticWeightAveraging", ANNEALING, annealing_strategy=annealing_strategy)
        if avg_fn is not None and not callable(avg_fn):
            raise ConfigurationError(f"StochasticWeightAveraging(avg_fn={avg_fn!r}): give a function, or None.")
        self._rates: float | list[float] = rates if by_group else float(rates[0])
        self._start, self._epochs, self._strategy = swa_epoch_start, annealing_epochs, annealing_strategy
        self._function, self._device = avg_fn, parse_device(self, device)
        self._scheduler: SWALR | None = None
        self._steps: int | None = None
        """Steps of the SWALR; None before the first averaged epoch."""
        self._measured = 0
        """The number of updates when batch norm's statistics were last recomputed."""

    refuses_rollback = "replaces the learning rate schedule at some epoch, which earlier checkpoints do not record"

    def first_epoch(self, max_epochs: int | None) -> int:
        """Returns the first averaged epoch, counted from 0.

        Args:
            max_epochs: the Trainer's `max_epochs`.

        Raises:
            ConfigurationError: if `swa_epoch_start` is a fraction and the fit has no `max_epochs`.
        """
        if isinstance(self._start, int):
            return self._start - 1
        if max_epochs is None or max_epochs < 0:
            raise ConfigurationError(
                f"swa_epoch_start={self._start} is a fraction, but max_epochs={max_epochs}: set the Trainer's "
                "max_epochs, or use the number of an epoch."
            )
        return max(int(max_epochs * self._start) - 1, 0)

    # a run ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        self.first_epoch(trainer.max_epochs)
        if self._begin(trainer, module):
            self._steps, self._measured = None, 0

    def _average(self, flat: nn.Module) -> AveragedModel:
        return AveragedModel(flat, avg_fn=self._function)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not module.automatic_optimization and any(isinstance(part, _BatchNorm) for part in module.modules()):
            raise ConfigurationError(
                "StochasticWeightAveraging runs training_step again to recompute batch norm's statistics, and under "
                "manual optimization that would step. Use WeightAveraging, or a module without batch norm."
            )
        self._scheduler = None
        if len(trainer.optimizers) != 1 or len(trainer.lr_schedulers) > 1:
            raise ConfigurationError(
                "StochasticWeightAveraging supports one optimizer with at most one scheduler. configure_optimizers "
                f"returned {len(trainer.optimizers)} and {len(trainer.lr_schedulers)}."
            )
        groups = len(trainer.optimizers[0].param_groups)
        if isinstance(self._rates, list) and len(self._rates) != groups:
            raise ConfigurationError(
                f"swa_lrs has {len(self._rates)} learning rates, but the optimizer has {groups} parameter groups: give "
                "one for each group, or a single number."
            )
        super().on_fit_start(trainer, module)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._steps is not None:
            self._take_over(trainer, self._steps)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._steps is None and trainer.current_epoch >= self.first_epoch(trainer.max_epochs):
            self._steps = 0
            self._take_over(trainer, 0)

    def _take_over(self, trainer: Trainer, steps: int) -> None:
        """Suspends the run's scheduler and lets SWALR set the learning rate, from its step `steps` on."""
        trainer.rest_schedulers()
        [optimizer] = trainer.optimizers
        saved_rates = [{key: group.get(key) for key in ("lr", "initial_lr")} for group in optimizer.param_groups]
        self._scheduler = SWALR(optimizer, self._rates, self._epochs, self._strategy)  # type: ignore[arg-type]
        if steps:
            # The constructor takes a first step. A continued run has taken it already, so its effect is undone.
            for group, values in zip(optimizer.param_groups, saved_rates, strict=True):
                group.update({key: value for key, value in values.items() if value is not None})
            rates = [group["lr"] for group in optimizer.param_groups]
            self._scheduler.load_state_dict({"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates})

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._scheduler is None or self._steps is None or not self._has_new_epoch(trainer):
            return
        assert self._weights is not None
        self._weights.update()
        self._scheduler.step()
        self._steps += 1
        self._latest_update_epoch = epoch = trainer.current_epoch
        if trainer.max_epochs is not None and epoch + 1 == trainer.max_epochs:
            self._finish(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.interrupted:
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        """Replaces the weights by the averages and recomputes batch norm's statistics."""
        weights = self._weights
        if weights is None or not weights.count:
            return
        if not weights.in_module:
            weights.exchange()
        if self._measured == weights.count:
            return
        if trainer.update_batch_norm():
            self._measured = weights.count
        else:
            # A signal ends the run: its checkpoint holds the current weights, and the resume repeats this pass.
            weights.exchange()

    # in a checkpoint --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"latest_update_epoch": self._latest_update_epoch, "steps": self._steps}
        weights = self._weights
        if weights is None or not weights.count:
            return state
        return {
            **state,
            "n_averaged": weights.count,
            "measured": self._measured,
            "averages_are_in_model": weights.in_module,
            "held": weights.stored(),
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        saved.integer("latest_update_epoch", least=-1)
        if not saved.is_none("steps"):
            saved.integer("steps", least=0, most=2**53)
        if saved.integer("n_averaged", 0, least=0):
            saved.integer("measured", least=0)
            saved.flag("averages_are_in_model")
            if self._weights is not None:
                self._weights.check(saved.nested("held"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        self._latest_update_epoch = saved.integer("latest_update_epoch", least=-1)
        self._steps = None if saved.is_none("steps") else saved.integer("steps", least=0)
        self._measured = saved.integer("measured", 0)
        self._pending_state = saved if saved.integer("n_averaged", 0) else None

    def weights_loaded(self) -> None:
        saved, self._pending_state = self._pending_state, None
        if saved is not None and self._weights is not None:
            in_module = saved.flag("averages_are_in_model")
            self._weights.restore(saved.integer("n_averaged"), saved.nested("held").entries, in_module)
            if in_module:
                self._weights.exchange()
