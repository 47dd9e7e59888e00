"""The names of `accelerate.utils.modeling`, for scripts that import from there: an import of one says what to use."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute

__all__ = []


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
