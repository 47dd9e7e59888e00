"""The names of `accelerate.state`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.accelerator.gradient_state import GradientState
from leyden.trainer.accelerator.ranks import AcceleratorState, DistributedType, PartialState

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
