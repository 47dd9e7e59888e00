"""The names of `accelerate.accelerator`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator import Accelerator
from leyden.trainer.own_loop.absent import attribute

__all__ = ["Accelerator"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
