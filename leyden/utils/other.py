"""The names of `accelerate.utils.other`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.utils import extract_model_from_parallel, save, wait_for_everyone

__all__ = ["extract_model_from_parallel", "save", "wait_for_everyone"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
