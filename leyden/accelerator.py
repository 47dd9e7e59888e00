"""The names of `accelerate.accelerator`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
