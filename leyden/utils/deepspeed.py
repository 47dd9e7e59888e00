"""The names of `accelerate.utils.deepspeed`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.utils import DummyOptim, DummyScheduler

__all__ = ["DummyOptim", "DummyScheduler"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
