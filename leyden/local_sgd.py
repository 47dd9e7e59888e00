"""The names of `accelerate.local_sgd`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.accelerator.local_sgd import LocalSGD

__all__ = ["LocalSGD"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
