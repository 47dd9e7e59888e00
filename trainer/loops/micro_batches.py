"""Steps of a pipeline, which run once for each micro-batch and log the values of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leyden.strategies.window import BackwardHooks, Window
from leyden.trainer.loops.user_step import without_trace

if TYPE_CHECKING:
    from leyden.trainer.run.state import Run


class MicroBatches:
    """Calls the strategy's `forward_backward` for a batch that it cuts into micro-batches.

    What a step logs counts where it reaches its end. The values of the micro-batches are one value of the batch, which
    every rank of the pipeline learns when the batch is done.

    Args:
        run: of the fit.
    """

    def __init__(self, run: Run) -> None:
        self._strategy, self._logs, self._module = run.engine.strategy, run.logs, run.module

    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        """What `Strategy.forward_backward` does, with a step function that `step` returned."""
        with self._logs.by_micro_batch():
            outputs = self._strategy.forward_backward(step_fn, batch, extra, window, hooks)
        self._logs.share_step()
        return outputs

    def step(self, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        """A step function that logs only where it reaches its end, and leaves no trace in a rehearsal."""

        def step(batch: Any, *extra: Any) -> Any:
            if self._strategy.outputs.are_here and not self._strategy.outputs.are_rehearsed:
                self._logs.begin_part(batch)
                return step_fn(batch, *extra)
            with self._logs.discarding():
                if not self._strategy.outputs.are_rehearsed:
                    return step_fn(batch, *extra)
                with without_trace(self._module):
                    return step_fn(batch, *extra)

        return step
