"""How loops call the user's step: its arguments, and calls without side effects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from leyden.core.errors import LeydenError
from leyden.data.rng import undoing
from leyden.strategies.window import BackwardHooks, Window
from leyden.trainer.logging.metric_states import MetricStates

if TYPE_CHECKING:
    from leyden.trainer.run import Run


def step_arguments(step: Callable[..., Any], several: bool = False) -> tuple[bool, bool]:
    """Returns whether a step takes a batch index (under any name) and a `dataloader_idx` after the batch.

    Args:
        step: the user's method.
        several: True with several loaders; `*args` then also receive the loader's index.
    """
    parameters = list(inspect.signature(step).parameters.values())
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return True, several or any(p.name == "dataloader_idx" for p in parameters)
    parameters = parameters[1:]
    takes_loader = any(p.name == "dataloader_idx" for p in parameters)
    required = [
        p for p in parameters if p.name != "dataloader_idx" and p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    return bool(required), takes_loader


@contextmanager
def without_side_effects(module: nn.Module) -> Iterator[None]:
    """Restores buffers, metric states and random states after a step whose result does not count."""
    restore = take_snapshot(module)
    try:
        yield
    finally:
        restore()


def take_snapshot(module: nn.Module, copies: Callable[[str, Tensor], bool] | None = None) -> Callable[[], None]:
    """Records the state that steps change, and returns a function that restores it.

    The returned function undoes changes of a buffer in place as well as assignments of another tensor to its name. It
    raises LeydenError if a buffer that was not copied has changed in place.

    Args:
        module: the module whose buffers and metrics steps may change.
        copies: called with name and buffer, returns whether to copy its values; None copies all buffers.
    """
    buffers = [
        (owner, key, buffer, f"{path}.{key}".removeprefix("."))
        for path, owner in module.named_modules()
        for key, buffer in owner._buffers.items()
    ]
    values: dict[int, Tensor] = {}
    versions: dict[int, int] = {}
    for _, _, buffer, name in buffers:
        if buffer is None or id(buffer) in values:
            continue
        if copies is None or copies(name, buffer):
            values[id(buffer)] = buffer.clone()
        else:
            versions[id(buffer)] = buffer._version
    metrics, restore_rng = MetricStates(module), undoing()
    metric_states = metrics.state_dict()

    def restore() -> None:
        for owner, key, buffer, name in buffers:
            # The buffers of a scripted module have no get().
            if key not in owner._buffers or owner._buffers[key] is not buffer:
                owner._buffers[key] = buffer
            if buffer is None:
                continue
            value = values.get(id(buffer))
            if value is not None:
                # Through `.data`: backward may still need the buffer, and copying into it would bump its version.
                buffer.data.copy_(value)
            elif buffer._version != versions[id(buffer)]:
                raise LeydenError(
                    f"the buffer {name} ({buffer.nbytes / 2**20:.1f} MiB) changed for the first time in a pass that "
                    "ran out of memory, and no copy exists to restore it. Start with enough micro-batches, "
                    "AutoAccumulation(micro_batches=…), or change the buffer from the first batch on."
                )
        metrics.load_state_dict(metric_states)
        restore_rng()

    return restore


class BatchParts:
    """Runs the steps of a strategy that splits a batch into micro-batches, or its sequences over ranks.

    Logged values count only on the rank where a step reaches its end. The values of all parts are combined into one
    value for the batch, which every rank that shares it receives after the batch.

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

    def evaluate(self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...]) -> Any:
        """Runs `Strategy.evaluate` with a step function that `step` returned."""
        with self._logs.by_micro_batch():
            return self._strategy.evaluate(step_fn, batch, extra)

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
