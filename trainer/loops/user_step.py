"""The user's step as a loop calls it: its arguments, and a call that leaves no trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from leyden.strategies.errors import LeydenError
from leyden.trainer.data.rng import undoing
from leyden.trainer.logging.metric_states import MetricStates


def step_arguments(step: Callable[..., Any], several: bool = False) -> tuple[bool, bool]:
    """Whether a step takes the index of the batch, whatever its name, and `dataloader_idx`, after the batch itself.

    Args:
        step: the user's method.
        several: there are several loaders, so that `*args` take the index of the loader too.
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
def without_trace(module: nn.Module) -> Iterator[None]:
    """Has a step that shadows the other ranks leave no buffer, metric state or random number changed."""
    undo = undoing_steps(module)
    try:
        yield
    finally:
        undo()


def undoing_steps(module: nn.Module, copies: Callable[[str, Tensor], bool] | None = None) -> Callable[[], None]:
    """Notes what steps change, and returns a function that undoes it.

    A step may change a buffer in place, or give the module another tensor by its name: both are taken back.

    Args:
        module: whose buffers and metrics may be changed.
        copies: says by name and buffer whether its values are copied; all are if None.

    Raises:
        LeydenError: by that function, if a buffer that was not copied has changed in place.
    """
    places = [
        (owner, name, buffer, f"{path}.{name}".removeprefix("."))
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
    ]
    values: dict[int, Tensor] = {}
    versions: dict[int, int] = {}
    for _, _, buffer, name in places:
        if buffer is None or id(buffer) in values:
            continue
        if copies is None or copies(name, buffer):
            values[id(buffer)] = buffer.clone()
        else:
            versions[id(buffer)] = buffer._version
    metrics, undo_draws = MetricStates(module), undoing()
    accumulated = metrics.state_dict()

    def undo() -> None:
        for owner, key, buffer, name in places:
            # A scripted module's buffers have no get().
            if key not in owner._buffers or owner._buffers[key] is not buffer:
                owner._buffers[key] = buffer
            if buffer is None:
                continue
            value = values.get(id(buffer))
            if value is not None:
                # Not the buffer itself, which backward may still need: it would count as changed.
                buffer.data.copy_(value)
            elif buffer._version != versions[id(buffer)]:
                raise LeydenError(
                    f"the buffer {name} ({buffer.nbytes / 2**20:.1f} MiB) changed for the first time in a pass that "
                    "ran out of memory, and there is no copy to set it back to: begin with as many micro-batches as "
                    "memory needs, AutoAccumulation(micro_batches=…), or change the buffer from the first batch on."
                )
        metrics.load_state_dict(accumulated)
        undo_draws()

    return undo
