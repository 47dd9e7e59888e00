"""The names of `accelerate.logging`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.accelerator.rank_logging import RankLogger as MultiProcessAdapter
from leyden.trainer.accelerator.rank_logging import get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
