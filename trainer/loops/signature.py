"""What a user's step takes beside the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


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
