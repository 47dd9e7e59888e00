"""Steps the learning-rate schedulers of a fit when they are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from leyden.trainer.engine.schedulers import hide_added_groups

if TYPE_CHECKING:
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.engine.schedulers import SchedulerConfig
    from leyden.trainer.events.hooks import Hooks
    from leyden.trainer.logging.values import Value
    from leyden.trainer.module import TrainModule


class Schedulers:
    """The learning-rate schedulers of a fit.

    Args:
        configs: the schedulers with their intervals.
        module: the module whose `lr_scheduler_step` steps them.
        hooks: the run's hooks.
        ranks: the run's ranks, which must all use the same learning rate.
        rest: returns True while no scheduler may step.
    """

    def __init__(
        self,
        configs: Sequence[SchedulerConfig],
        module: TrainModule,
        hooks: Hooks,
        ranks: Ranks,
        rest: Callable[[], bool],
    ) -> None:
        self.configs, self._rest = configs, rest
        self._module, self._hooks, self._ranks = module, hooks, ranks

    def step(self, interval: str, count: int) -> None:
        """Steps the schedulers of an interval that are due and do not depend on a monitored value."""
        for config in () if self._rest() else self.configs:
            if not config.reduce_on_plateau and config.due(interval, count):
                self._step(config, None)

    def due_on_plateau(self, interval: str, count: int) -> list[SchedulerConfig]:
        """Returns the due schedulers that depend on a monitored value; call it after the validation that may log it."""
        configs = () if self._rest() else self.configs
        return [config for config in configs if config.reduce_on_plateau and config.due(interval, count)]

    def step_on_plateau(self, due: Sequence[SchedulerConfig], metrics: Callable[[], Mapping[str, Value]]) -> None:
        """Steps these schedulers with the values logged so far."""
        for config in due:
            metric = config.monitored(metrics())
            if self._ranks.world_size > 1:
                # Values of a step differ between ranks, but the learning rate must not.
                metric = self._ranks.broadcast(None if metric is None else float(metric))
            if metric is not None:
                self._step(config, metric)

    def _step(self, config: SchedulerConfig, metric: float | None) -> None:
        with self._hooks.inside("lr_scheduler_step"), hide_added_groups(config.scheduler):
            self._module.lr_scheduler_step(config.scheduler, metric)
