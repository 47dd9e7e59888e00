"""The names of `accelerate.optimizer`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.engine.prepared import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
