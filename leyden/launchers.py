"""The names of `accelerate.launchers`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.accelerator.notebook import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
