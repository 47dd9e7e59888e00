"""AbsentParameter: stands for a parameter that another stage of a pipeline holds, and refuses norms that lack it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from types import CodeType, FrameType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.core.errors import ConfigurationError

NORMS = ("clip_grad_norm_", "grad_norm")
"""Functions of torch and Leyden that combine the gradients of all parameters into one number."""
OWN_SCOPES = ("<listcomp>", "<dictcomp>", "<genexpr>")
"""Names of code that belongs to the function around it."""
OVER_ALL = re.compile(r"(DAdapt|Prodigy|Mechanic)\w*|\w*SAM|DoG|Ranger21|AliG")
"""Names of optimizers that compute a norm or a step size from the gradients of all parameters."""
OVERLAPS = "more than one element of the written-to tensor refers to a single memory location"
"""From torch's error for a write to an expanded tensor, which an absent parameter is."""

_elementwise: set[CodeType] = set()
"""Code that may read gradients of absent parameters, because it treats every parameter by itself."""


class AbsentParameter(nn.Parameter):
    """The placeholder of a parameter that other ranks hold: nan, expanded from one element to the parameter's shape.

    It has no gradient. A function that sums over the gradients of all parameters would skip it, and take the stage's
    part for the whole, so only code that treats every parameter by itself may read `grad`: optimizers, torch, Leyden.

    Attributes:
        full_name: the parameter's name in the model.
    """

    full_name: str = ""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        frame = sys._getframe(1)
        if frame.f_code in _elementwise:
            return None
        reader = _function_of(frame)
        if _is_elementwise(frame, reader):
            return None
        raise ConfigurationError(
            f"{reader.f_code.co_name!r} reads the gradient of {self.full_name or 'a parameter'!r}, which another stage "
            "of the pipeline holds: a norm over the model's gradients would be this stage's alone. To clip by the norm "
            "over all stages, use gradient_clip_val, self.clip_gradients(…) or accelerator.clip_grad_norm_(…); to log "
            "it, GradNormMonitor. For anything else, loop over trainer.strategy.held(self.parameters())."
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Ignores values: no optimizer of this rank steps the parameter."""


def _function_of(frame: FrameType) -> FrameType:
    """Returns the frame of the function around a comprehension; that of any other code is its own."""
    while frame.f_code.co_name in OWN_SCOPES and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_elementwise(frame: FrameType, reader: FrameType) -> bool:
    """Returns True for code of an optimizer, torch or Leyden, except functions that compute a norm.

    Args:
        frame: the code that reads a gradient, perhaps a comprehension.
        reader: the function that it belongs to.
    """
    if _package_of(frame) in ("torch", "leyden"):
        # Also within an optimizer that clips in its own step.
        if reader.f_code.co_name in NORMS:
            return False
        _elementwise.add(frame.f_code)
        return True
    # An optimizer may read gradients in functions of its own. Hooks are called by Leyden.
    outer: FrameType | None = reader
    while outer is not None and _package_of(outer) != "leyden":
        if isinstance(outer.f_locals.get("self"), Optimizer):
            return True
        outer = outer.f_back
    return False


def _package_of(frame: FrameType) -> str:
    package: str = frame.f_globals.get("__name__", "").partition(".")[0]
    return package


def placeholder_of(parameter: nn.Parameter, full_name: str, device: torch.device) -> AbsentParameter:
    """Returns the placeholder of a parameter. A computation that reads it returns nan."""
    value = torch.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    one = torch.full((), value, dtype=parameter.dtype, device=device)
    placeholder = AbsentParameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)
    placeholder.__dict__.update(parameter.__dict__, full_name=full_name)
    return placeholder


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuses optimizers that compute with the gradients of all parameters, of which a rank has its stages' only.

    Raises:
        ConfigurationError: names the optimizer.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        is_known = any(OVER_ALL.fullmatch(kind.__name__) for kind in type(optimizer).__mro__)
        if is_known or optimizer.defaults.get("max_grad_norm"):
            raise ConfigurationError(
                f"{name} computes a norm or a step size from the gradients of all parameters, and a pipeline stage has "
                "only its own: use an optimizer that treats each parameter by itself, such as AdamW, with "
                "gradient_clip_val, or a strategy without pp."
            )
