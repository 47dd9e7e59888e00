"""The names of `accelerate.tracking`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.accelerator.tracking import (
    CometMLTracker,
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
)

__all__ = ["CometMLTracker", "GeneralTracker", "MLflowTracker", "TensorBoardTracker", "WandBTracker"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
