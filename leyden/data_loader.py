"""The names of `accelerate.data_loader`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.trainer.accelerator.loader import skip_first_batches
from leyden.trainer.accelerator.rank_loaders import SeedableRandomSampler
from leyden.trainer.accelerator.world import synchronize_rng_states

__all__ = ["SeedableRandomSampler", "skip_first_batches", "synchronize_rng_states"]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
