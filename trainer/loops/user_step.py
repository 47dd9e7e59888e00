"""The user's step as a loop calls it: its arguments, and a call that leaves no trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

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
    """A step in this block, which shadows the other ranks, leaves no buffer, metric state or random number behind."""
    undo = undoing_steps(module, module.buffers())
    try:
        yield
    finally:
        undo()


def undoing_steps(module: nn.Module, buffers: Iterable[Tensor]) -> Callable[[], None]:
    """Notes what steps leave behind, and returns a function that takes it back.

    Args:
        module: whose metrics may be updated.
        buffers: those of it that may be changed.
    """
    values = [(buffer, buffer.clone()) for buffer in buffers]
    metrics, undo_draws = MetricStates(module), undoing()
    accumulated = metrics.state_dict()

    def undo() -> None:
        for buffer, value in values:
            # Not the buffer itself, which backward may still need: it would count as changed.
            buffer.data.copy_(value)
        metrics.load_state_dict(accumulated)
        undo_draws()

    return undo
