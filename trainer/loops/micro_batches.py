"""Pipeline steps, which run once per micro-batch and log one value per batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leyden.strategies.window import BackwardHooks, Window
from leyden.trainer.loops.user_step import without_side_effects

if TYPE_CHECKING:
    from leyden.trainer.run import Run


class MicroBatches:
    """Calls `forward_backward` of a strategy that splits a batch into micro-batches.

    Logged values count only on the rank where a step reaches its end. The values of all micro-batches are combined into
    one value for the batch, which every rank of the pipeline receives after the batch.

    Args:
        run: the run of the fit.
    """

    def __init__(self, run: Run) -> None:
        self._strategy, self._logs, self._module = run.engine.strategy, run.logs, run.module

    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        """Runs `Strategy.forward_backward` with a step function that `step` returned."""
        with self._logs.by_micro_batch():
            outputs = self._strategy.forward_backward(step_fn, batch, extra, window, hooks)
        self._logs.share_step()
        return outputs

    def step(self, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step function that logs only where the step reaches its end; a rehearsal has no side effects."""

        def step(batch: Any, *extra: Any) -> Any:
            if self._strategy.outputs.are_here and not self._strategy.outputs.are_rehearsed:
                self._logs.begin_part(batch)
                return step_fn(batch, *extra)
            with self._logs.discarding():
                if not self._strategy.outputs.are_rehearsed:
                    return step_fn(batch, *extra)
                with without_side_effects(self._module):
                    return step_fn(batch, *extra)

        return step
