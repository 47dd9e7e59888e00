"""The names of `accelerate.state`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.own_loop.absent import attribute
from leyden.trainer.own_loop.gradient_state import GradientState
from leyden.trainer.own_loop.ranks import AcceleratorState, DistributedType, PartialState

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
