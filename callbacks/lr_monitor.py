"""LearningRateMonitor, a callback that logs learning rates."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import check_has_logger, is_logged, log_to_all
from leyden.core.checks import check_choice
from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class LearningRateMonitor(Callback):
    """Logs the learning rate that each step uses, under that step. `trainer.callback_metrics` includes it.

    The name is `lr-SGD`; with several parameter groups `lr-SGD/pg1`, `lr-SGD/pg2` (or the group's "name"); with several
    optimizers of one class `lr-SGD`, `lr-SGD-1`. The `name` in a scheduler's configuration replaces `lr-SGD`. Momentum
    and weight decay are logged with the suffixes `-momentum` and `-weight_decay`.

    Args:
        logging_interval: "step" to log at the steps that the Trainer logs, "epoch" at the start of each epoch. None
            follows each scheduler's interval (steps for an optimizer without a scheduler).
        log_momentum: also log the momentum, or the first beta of Adam and its variants.
        log_weight_decay: also log the weight decay.

    Raises:
        ConfigurationError: if `logging_interval` is invalid, or a fit starts without a logger.

    Attributes:
        lrs: the learning rates logged so far, by name.
        last_momentum_values: the momentum that was logged last, by name (`lr-SGD-momentum`); None before the first.
        last_weight_decay_values: the same for the weight decay (`lr-SGD-weight_decay`).

    Example:
        >>> callback = LearningRateMonitor(logging_interval="step")
        >>> # Trainer(callbacks=[callback])
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval is not None:
            check_choice("LearningRateMonitor", ("step", "epoch"), logging_interval=logging_interval)
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._named: list[tuple[str, Optimizer, str]] = []

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        check_has_logger(self, trainer)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._named = list(self._names(trainer))
        labels = [label for name, optimizer, _ in self._named for label in _group_names(name, optimizer)]
        self.lrs = {label: [] for label in labels}
        self.last_momentum_values = {f"{label}-momentum": None for label in labels}
        self.last_weight_decay_values = {f"{label}-weight_decay": None for label in labels}
        for name, optimizer, _ in self._named:
            trainer.logs.show(self._values(name, optimizer))

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.logging_interval != "step":
            self._log(trainer, "epoch", trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        # `global_step` increases at the end of the window, so this is the number of the step that uses the rate.
        step = trainer.global_step + 1
        if is_logged(trainer, step) and trainer.window.index == 0 and self.logging_interval != "epoch":
            self._log(trainer, "step", step)

    def _names(self, trainer: Trainer) -> list[tuple[str, Optimizer, str]]:
        """Returns a tuple for each optimizer: its name, the optimizer, and the interval at which to log it."""
        seen: Counter[str] = Counter()
        configs = {id(getattr(config.scheduler, "optimizer", None)): config for config in trainer.lr_scheduler_configs}
        named: list[tuple[str, Optimizer, str]] = []
        for optimizer in trainer.optimizers:
            config = configs.get(id(optimizer))
            base = config.name if config is not None and config.name else f"lr-{type(optimizer).__name__}"
            name = f"{base}-{seen[base]}" if seen[base] else base
            seen[base] += 1
            interval = self.logging_interval or (config.interval if config is not None else "step")
            named.append((name, optimizer, interval))
        return named

    def _log(self, trainer: Trainer, interval: str, step: int) -> None:
        values: dict[str, float] = {}
        for name, optimizer, at in self._named:
            if at != interval:
                continue
            found = self._values(name, optimizer)
            values.update(found)
            for label in _group_names(name, optimizer):
                self.lrs.setdefault(label, []).append(found[label])
                if self.log_momentum:
                    self.last_momentum_values[f"{label}-momentum"] = found[f"{label}-momentum"]
                if self.log_weight_decay:
                    self.last_weight_decay_values[f"{label}-weight_decay"] = found[f"{label}-weight_decay"]
        trainer.logs.show(values)
        log_to_all(trainer, values, step)

    def _values(self, name: str, optimizer: Optimizer) -> dict[str, float]:
        """Returns the values to log for an optimizer, under its name."""
        values: dict[str, float] = {}
        for label, group in zip(_group_names(name, optimizer), optimizer.param_groups, strict=True):
            values[label] = float(group["lr"])
            if self.log_momentum:
                values[f"{label}-momentum"] = _momentum(group)
            if self.log_weight_decay:
                values[f"{label}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return values


def _group_names(name: str, optimizer: Optimizer) -> list[str]:
    groups = optimizer.param_groups
    if len(groups) == 1:
        own = groups[0].get("name")
        return [name if own is None else f"{name}/{own}"]
    names = [f"{name}/{group.get('name', f'pg{index}')}" for index, group in enumerate(groups, start=1)]
    duplicates = [label for label, count in Counter(names).items() if count > 1]
    if duplicates:
        raise ConfigurationError(f"two parameter groups are called '{duplicates[0]}': give each its own 'name'.")
    return names


def _momentum(group: dict[str, Any]) -> float:
    if "momentum" in group:
        return float(group["momentum"])
    return float(group["betas"][0]) if "betas" in group else 0.0
