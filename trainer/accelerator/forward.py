"""The forward of a prepared model: it runs in the precision's context, whoever calls it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from leyden.strategies.batch import map_tensors


def run_in_context(
    module: nn.Module, context: Callable[[], AbstractContextManager[Any]], outputs_in_float32: bool = False
) -> None:
    """Lets a module's forward run in a context, whoever calls it; class, names and hooks stay as they are.

    Args:
        module: whose forward it is.
        context: makes the context of one forward.
        outputs_in_float32: convert what comes out in half precision, so that a loss is computed in float32 anywhere.
    """
    if getattr(module.forward, "_leyden_context", False):
        return
    plain = module.forward
    own = vars(module).get("forward")
    function = getattr(plain, "__func__", plain)

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context():
            # A copy of the module has a forward of its own, bound to the copy.
            outputs = own(*args, **kwargs) if own is not None else function(self, *args, **kwargs)
        return map_tensors(outputs, _in_float32) if outputs_in_float32 else outputs

    forward._leyden_context = True  # type: ignore[attr-defined]
    forward._leyden_own = own  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def run_without_context(module: nn.Module) -> None:
    """Takes back what `run_in_context` did."""
    forward = vars(module).get("forward")
    if isinstance(forward, types.MethodType) and getattr(forward, "_leyden_context", False):
        del module.forward
        own = forward.__func__._leyden_own  # type: ignore[attr-defined]
        if own is not None:
            vars(module)["forward"] = own


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
