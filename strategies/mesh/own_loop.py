"""Models in a custom training loop: every forward runs as a step of the mesh."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from leyden.core.tree import map_tensors
from leyden.strategies.mesh.styles import gathered


def run_in_steps(module: nn.Module, step: Callable[[Any, bool], AbstractContextManager[None]]) -> None:
    """Wraps a model's forward in the context of a step. Split outputs, such as logits, are gathered.

    A loss that the model computes itself is computed from the split logits, before they are gathered.

    Args:
        module: the model.
        step: returns the context of one forward, given its inputs and whether the model trains.
    """
    instance_forward = vars(module).get("forward")
    if getattr(instance_forward, "_leyden_step", False):
        return

    @functools.wraps(type(module).forward if instance_forward is None else instance_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with step((args, kwargs), self.training):
            if instance_forward is None:
                outputs = type(self).forward(self, *args, **kwargs)
            else:
                outputs = instance_forward(*args, **kwargs)
            return map_tensors(outputs, gathered)

    forward._leyden_step = True  # type: ignore[attr-defined]
    # A bound method, so that a deep copy of the model is bound to the copy.
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
