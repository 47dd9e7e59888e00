"""Parses the return value of `configure_optimizers`, and decides when schedulers step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
)

from leyden.core.errors import ConfigurationError, kind_of, nearest
from leyden.core.rank_zero import warn
from leyden.core.text import listed
from leyden.trainer.logging.values import Value

FORMS = (
    "return an optimizer, a list of them, ([optimizers], [schedulers]), ([optimizers], scheduler), {'optimizer': …, "
    "'lr_scheduler': …}, a list of such dicts, or None"
)
SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")


BY_GROUP = (LambdaLR, MultiplicativeLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, CyclicLR, OneCycleLR)
"""torch's schedulers with one setting per parameter group, for the groups that exist at construction."""


@dataclass(slots=True)
class SchedulerConfig:
    """A scheduler, and when it steps.

    Attributes:
        scheduler: any object with `step` and `state_dict`.
        interval: "step" to step after optimizer steps, or "epoch" to step at the end of epochs.
        frequency: number of intervals between two steps of the scheduler.
        monitor: name of the logged value that a plateau scheduler steps on.
        strict: whether to raise if the monitored value was never logged. If False, warn and skip the scheduler's step.
        name: the name under which LearningRateMonitor logs the scheduler.
        reduce_on_plateau: whether the scheduler steps after validation, on the monitored value.
    """

    scheduler: Any
    interval: Literal["epoch", "step"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False

    def due(self, interval: str, count: int) -> bool:
        """Returns True if the scheduler steps at the end of the `count`-th step or epoch, counted from 1."""
        return self.interval == interval and count % self.frequency == 0

    def monitored(self, metrics: Mapping[str, Value]) -> float | None:
        """Returns the monitored value, read back from the device; None, with a warning, if it was never logged.

        Raises:
            ConfigurationError: if the value was never logged and the scheduler is strict.
        """
        assert self.monitor is not None
        if self.monitor in metrics:
            return float(metrics[self.monitor])
        message = (
            f"{type(self.scheduler).__name__} monitors {self.monitor!r}, which was not logged. "
            f"{nearest(self.monitor, metrics) if metrics else 'Nothing has been logged yet.'} "
            "Log it before the scheduler steps, or set 'strict': False."
        )
        if self.strict:
            raise ConfigurationError(message)
        warn(message)
        return None


@contextmanager
def hide_added_groups(scheduler: Any) -> Iterator[None]:
    """Hides parameter groups added after the scheduler's construction, if the scheduler has no settings for them.

    Newer versions of torch raise for such groups. Their learning rates stay unchanged.
    """
    known = _known_groups(scheduler)
    groups = scheduler.optimizer.param_groups if known is not None else []
    added = groups[known:]
    del groups[known:]
    try:
        yield
    finally:
        groups += added


def _known_groups(scheduler: Any) -> int | None:
    """Returns the number of groups that a scheduler has settings for; None if it handles any number."""
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if isinstance(part, BY_GROUP):
            return len(part.base_lrs)
    return None


def parse(configured: Any, automatic: bool = True) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Returns the optimizers and schedulers from the return value of `configure_optimizers`.

    Args:
        configured: the return value of `configure_optimizers`.
        automatic: False in manual optimization. There the module itself steps its schedulers and passes the values, so
            no scheduler needs a monitor.

    Raises:
        ConfigurationError: if the value has no supported form; the message names the fix.
    """
    if configured is None:
        return [], []
    if isinstance(configured, Optimizer):
        return [configured], []
    if isinstance(configured, Mapping):
        return _from_dicts([configured], automatic)
    if isinstance(configured, (list, tuple)):
        if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
            optimizers, entries = configured
            if entries is None:
                entries = []
            elif not isinstance(entries, (list, tuple)):
                entries = [entries]
            return _checked(list(optimizers), [_scheduler(entry, automatic) for entry in entries])
        if configured and all(isinstance(part, Mapping) for part in configured):
            return _from_dicts(configured, automatic)
        return _checked(list(configured), [])
    raise ConfigurationError(f"configure_optimizers returned {kind_of(configured)}. It may {FORMS}.")


def _from_dicts(parts: Sequence[Mapping[str, Any]], automatic: bool) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers: list[Any] = []
    schedulers: list[SchedulerConfig] = []
    for part in parts:
        if "optimizer" not in part:
            raise ConfigurationError(
                f"configure_optimizers returned a dict without the key 'optimizer' (keys {list(part)}). It may {FORMS}."
            )
        for key in part:
            if key not in ("optimizer", "lr_scheduler", "monitor"):
                raise ConfigurationError(
                    f"configure_optimizers returned a dict with the key {key!r}. "
                    f"{nearest(key, ('optimizer', 'lr_scheduler', 'monitor'))}"
                )
        optimizers.append(part["optimizer"])
        if part.get("lr_scheduler") is not None:
            schedulers.append(_scheduler(part["lr_scheduler"], automatic, part.get("monitor")))
    return _checked(optimizers, schedulers)


def _scheduler(entry: Any, automatic: bool, monitor: str | None = None) -> SchedulerConfig:
    values = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
    for key in values:
        if key not in SCHEDULER_KEYS:
            raise ConfigurationError(f"lr_scheduler has the unknown key {key!r}. {nearest(key, SCHEDULER_KEYS)}")
    if "scheduler" not in values:
        raise ConfigurationError(
            "lr_scheduler is a dict without the key 'scheduler'. Use {'scheduler': scheduler, 'interval': 'step'}."
        )
    scheduler = values["scheduler"]
    # In manual optimization the module itself drives its schedulers, whatever their methods are called.
    needed = ("step", "state_dict", "load_state_dict") if automatic else ("state_dict", "load_state_dict")
    if isinstance(scheduler, Optimizer) or not all(callable(getattr(scheduler, name, None)) for name in needed):
        raise ConfigurationError(
            f"lr_scheduler is {kind_of(scheduler)}, not a scheduler. Use one of torch.optim.lr_scheduler, or an object "
            f"with {listed(needed)}. If its step takes arguments, override lr_scheduler_step."
        )
    values.setdefault("monitor", monitor)
    values.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    config = SchedulerConfig(**values)
    if config.interval not in ("epoch", "step"):
        raise ConfigurationError(f"lr_scheduler has interval={config.interval!r}: use 'epoch' or 'step'.")
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigurationError(f"lr_scheduler has frequency={config.frequency!r}: use a whole number from 1.")
    if automatic and config.reduce_on_plateau and config.monitor is None:
        raise ConfigurationError(
            f"{type(scheduler).__name__} needs a value to monitor. Return "
            f"{{'scheduler': scheduler, 'monitor': 'val_loss'}} as lr_scheduler."
        )
    return config


def _checked(optimizers: list[Any], schedulers: list[SchedulerConfig]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Raises if an element is not an optimizer, or if a scheduler's optimizer is not in the list."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"configure_optimizers returned {kind_of(optimizer)} in place of an optimizer. It may {FORMS}."
            )
    for config in schedulers:
        owner = getattr(config.scheduler, "optimizer", None)
        if isinstance(config.scheduler, LRScheduler) and all(owner is not optimizer for optimizer in optimizers):
            raise ConfigurationError(
                f"{type(config.scheduler).__name__} belongs to an optimizer that configure_optimizers does not return, "
                "so its steps would have no effect. Return that optimizer too."
            )
    return optimizers, schedulers
