"""The names of `accelerate.memory_utils`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.utils import find_executable_batch_size, release_memory

__all__ = ["find_executable_batch_size", "release_memory"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
