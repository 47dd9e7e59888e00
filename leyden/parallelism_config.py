"""The names of `accelerate.parallelism_config`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.accelerator.parallel import ParallelismConfig

__all__ = ["ParallelismConfig"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
