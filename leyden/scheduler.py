"""The names of `accelerate.scheduler`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.accelerator.scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
