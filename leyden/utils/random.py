"""The names of `accelerate.utils.random`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.utils import set_seed, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_states"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
