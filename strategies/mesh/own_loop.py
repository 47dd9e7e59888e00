"""Models under a loop that the user writes: each forward pass is a step of the mesh by itself."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from leyden.strategies.batch import map_tensors
from leyden.strategies.mesh.styles import gathered


def run_in_steps(module: nn.Module, step: Callable[[Any, bool], AbstractContextManager[None]]) -> None:
    """Lets a model's forward run within a step, whoever calls it. Outputs that are split by class come whole.

    A loss that the model computes itself is computed of what is split.

    Args:
        module: the model.
        step: makes the context of one forward, of its inputs, for training or not.
    """
    own = vars(module).get("forward")
    if getattr(own, "_leyden_step", False):
        return

    @functools.wraps(type(module).forward if own is None else own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with step((args, kwargs), self.training):
            outputs = type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
            return map_tensors(outputs, gathered)

    forward._leyden_step = True  # type: ignore[attr-defined]
    # A method, so that a copy of the model has one of its own.
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
